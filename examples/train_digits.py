# SPDX-License-Identifier: Apache-2.0
"""Train a small convolutional network on scikit-learn's handwritten digits (1,797 images) to over 97% test accuracy.

    python examples/train_digits.py
    accelerate launch --num_processes 2 examples/train_digits.py
    torchrun --nproc_per_node 2 examples/train_digits.py

The lines marked [1] to [4] are the Accelerate calls. The rest is plain PyTorch. Training takes a few seconds on a CPU.
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.utils import set_seed


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0],
        epilog=__doc__[__doc__.index("\n\n") + 2 :],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--epochs", type=positive_int, default=15, help="(default: %(default)s)")
    parser.add_argument(
        "--batch_size",
        type=positive_int,
        default=32,
        help="batch size per process (default: %(default)s)",
    )
    parser.add_argument(
        "--lr", type=float, default=3e-3, help="peak learning rate (default: %(default)s)"
    )
    parser.add_argument(
        "--max_steps",
        type=positive_int,
        help="stop after this many steps (default: run all epochs)",
    )
    parser.add_argument(
        "--mixed_precision",
        choices=["no", "bf16", "fp16"],
        help="default: the setting of the launcher, else no",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="seed of the split, the weights and the data order (default: %(default)s)",
    )
    parser.add_argument(
        "--cpu", action="store_true", help="use the CPU even if an accelerator is available"
    )
    return parser.parse_args()


def positive_int(text: str) -> int:
    value = int(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"must be positive, got {text}")
    return value


def digits(seed: int) -> tuple[TensorDataset, TensorDataset]:
    """Return a stratified 80/20 split into training and test set. Images are (1, 8, 8) with values in [0, 1]."""
    try:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    except ImportError:
        raise SystemExit("this example needs scikit-learn: pip install scikit-learn") from None
    images, labels = load_digits(return_X_y=True)
    arrays = train_test_split(images, labels, test_size=0.2, stratify=labels, random_state=seed)
    train_x, test_x = (
        torch.tensor(x, dtype=torch.float32).view(-1, 1, 8, 8) / 16 for x in arrays[:2]
    )
    train_y, test_y = (torch.tensor(y) for y in arrays[2:])
    return TensorDataset(train_x, train_y), TensorDataset(test_x, test_y)


def network() -> nn.Module:
    """Map (batch, 1, 8, 8) images to (batch, 10) logits."""
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
def evaluate(accelerator: Accelerator, model: nn.Module, loader: DataLoader) -> tuple[int, int]:
    """Return the number of correct predictions and the size of the test set, on every process."""
    model.eval()
    correct = count = 0
    for images, labels in loader:
        # Duplicates that fill up the last batch are dropped: each image counts once.
        labels, predictions = accelerator.gather_for_metrics(
            (labels, model(images).argmax(dim=1))
        )  # [4]
        correct += (labels == predictions).sum().item()
        count += len(labels)
    model.train()
    return correct, count


def main() -> None:
    args = parse_arguments()
    start = time.perf_counter()
    accelerator = Accelerator(cpu=args.cpu, mixed_precision=args.mixed_precision)  # [1]
    set_seed(args.seed)
    train_set, test_set = digits(args.seed)
    loader = DataLoader(train_set, args.batch_size, shuffle=True)
    test_loader = DataLoader(test_set, 4 * args.batch_size)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    # The loader is not prepared yet, so len(loader) counts the batches of all processes.
    # The prepared scheduler counts them too: each step advances it by the number of processes.
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
        correct, test_size = evaluate(accelerator, model, test_loader)
        mean = accelerator.reduce(total / count, reduction="mean").item()
        accelerator.print(
            f"epoch {epoch + 1:2d}   training loss {mean:.4f}   test accuracy {correct / test_size:.2%}"
        )
        if steps == args.max_steps:
            break

    accelerator.print(f"trained on {len(train_set):,} digits, {epoch + 1} epochs, {steps} steps")
    accelerator.print(f"test accuracy {correct / test_size:.2%} ({correct} of {test_size})")
    accelerator.print(f"processes: {accelerator.num_processes} on {accelerator.device.type}")
    accelerator.print(f"wall time {time.perf_counter() - start:.1f} s")
    accelerator.end_training()


if __name__ == "__main__":
    main()
