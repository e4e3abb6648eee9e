# SPDX-License-Identifier: Apache-2.0
"""Train a small convolutional network on scikit-learn's handwritten digits (1,797 real ones) to over 97% accuracy.

    python examples/train_digits.py
    accelerate launch --num_processes 2 examples/train_digits.py
    torchrun --nproc_per_node 2 examples/train_digits.py

The lines marked [1] to [4] are all that Accelerate needs; the rest is plain PyTorch. It takes a few seconds on a CPU.
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.utils import set_seed

SHADES = " .:-=+*#%@"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0],
        epilog=__doc__[__doc__.index("\n\n") + 2 :],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--epochs", type=positive(int), default=15, help="(%(default)s)")
    parser.add_argument("--batch_size", type=positive(int), default=32, help="digits a process (%(default)s)")
    parser.add_argument("--lr", type=positive(float), default=3e-3, help="highest learning rate (%(default)s)")
    parser.add_argument("--max_steps", type=positive(int), help="stop after so many steps (none: run all epochs)")
    parser.add_argument(
        "--mixed_precision", choices=["no", "bf16", "fp16"], help="default: what the launcher was told"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the split, the weights and the order (%(default)s)")
    parser.add_argument("--cpu", action="store_true", help="stay on the CPU where there is an accelerator")
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


def digits(seed: int) -> tuple[TensorDataset, TensorDataset]:
    """Four in five digits to train on, the others held out, each class in equal shares: (1, 8, 8) images in [0, 1]."""
    try:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    except ImportError:
        raise SystemExit("this example needs scikit-learn: pip install scikit-learn") from None
    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(images, labels, test_size=0.2, stratify=labels, random_state=seed)
    train_x, test_x = (torch.tensor(part, dtype=torch.float32).view(-1, 1, 8, 8) / 16 for part in parts[:2])
    train_y, test_y = (torch.tensor(part) for part in parts[2:])
    return TensorDataset(train_x, train_y), TensorDataset(test_x, test_y)


def network() -> nn.Module:
    """(batch, 1, 8, 8) images in, (batch, 10) logits out."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


@torch.no_grad()
def evaluate(accelerator: Accelerator, model: nn.Module, loader: DataLoader) -> tuple[torch.Tensor, ...]:
    """Images, labels and answers of all held-out digits, each once, on every process."""
    model.eval()
    seen = []
    for images, labels in loader:
        seen.append(accelerator.gather_for_metrics((images, labels, model(images).argmax(dim=1))))  # [4]
    model.train()
    return tuple(torch.cat(parts).cpu() for parts in zip(*seen, strict=True))


def picture(images: torch.Tensor) -> str:
    """Digits side by side in characters."""
    rows = []
    for row in range(8):
        shades = ((image[0, row] * (len(SHADES) - 1)).round().int().tolist() for image in images)
        rows.append("   ".join("".join(SHADES[shade] * 2 for shade in line) for line in shades))
    return "\n".join(rows)


def report(console: Console, accelerator: Accelerator, images, labels, answers, rows: dict[str, str]) -> None:
    table = Table(title="Handwritten digits", show_header=False, title_justify="left")
    for name, value in rows.items():
        table.add_row(name, value)
    console.print(table)
    wrong = (labels != answers).nonzero().flatten()[:4]
    if len(wrong):
        said = ", ".join(f"{labels[i]} read as {answers[i]}" for i in wrong.tolist())
        console.print(f"misread, for example: {said}", highlight=False)
        console.print(picture(images[wrong]), highlight=False, markup=False)


def main() -> None:
    args = parse_arguments()
    started = time.perf_counter()
    accelerator = Accelerator(cpu=args.cpu, mixed_precision=args.mixed_precision)  # [1]
    set_seed(args.seed)
    train_set, test_set = digits(args.seed)
    loader = DataLoader(train_set, args.batch_size, shuffle=True)
    test_loader = DataLoader(test_set, 4 * args.batch_size)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    # The schedule counts batches over all processes, as the loader does before it is prepared.
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs * len(loader))
    model, optimizer, scheduler, loader, test_loader = accelerator.prepare(  # [2]
        model, optimizer, scheduler, loader, test_loader
    )

    steps = 0
    for epoch in range(args.epochs):
        total, count = 0.0, 0
        for images, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            accelerator.backward(loss)  # [3]
            optimizer.step()
            scheduler.step()
            total, count, steps = total + loss.detach(), count + 1, steps + 1
            if steps == args.max_steps:
                break
        images, labels, answers = evaluate(accelerator, model, test_loader)
        right = (labels == answers).sum().item()
        mean = accelerator.reduce(total / count, reduction="mean").item()
        accelerator.print(
            f"epoch {epoch + 1:2d}   training loss {mean:.4f}   held out {right / len(labels):.2%} right"
        )
        if steps == args.max_steps:
            break

    if accelerator.is_main_process:
        rows = {
            "trained on": f"{len(train_set):,} digits, {epoch + 1} epochs, {steps} steps",
            "held-out accuracy": f"{right / len(labels):.2%} ({right} of {len(labels)})",
            "processes": f"{accelerator.num_processes} on {accelerator.device.type}",
            "wall time": f"{time.perf_counter() - started:.1f} s",
        }
        report(Console(), accelerator, images, labels, answers, rows)
    accelerator.end_training()


if __name__ == "__main__":
    main()
