# SPDX-License-Identifier: Apache-2.0
"""What the examples of this folder share: handwritten digits, a small network, its evaluation, and tables.

Everything computes in float64, so that tables of one process and of several are equal to the last printed digit.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator

torch.set_default_dtype(torch.float64)


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Return 1,437 images of handwritten digits to train on and 360 to test on: (1, 8, 8) with values in [0, 1]."""
    from sklearn.datasets import (
        load_digits,
    )  # pip install scikit-learn; examples on text do without

    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    images, labels = torch.tensor(images).view(-1, 1, 8, 8)[order] / 16, torch.tensor(labels)[order]
    return TensorDataset(images[:1437], labels[:1437]), TensorDataset(images[1437:], labels[1437:])


def network() -> nn.Module:
    """Map (batch, 1, 8, 8) images to (batch, 10) logits."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(8 * 4 * 4, 32),
        nn.ReLU(),
        nn.Linear(32, 10),
    )


@torch.no_grad()
def evaluate(accelerator: Accelerator, model: nn.Module, loader: DataLoader) -> tuple[float, float]:
    """Return the mean loss and the accuracy over all samples of a prepared loader, on every process."""
    model.eval()
    losses, right = [], []
    for inputs, labels in loader:
        logits = model(inputs)
        own = F.cross_entropy(logits, labels, reduction="none"), logits.argmax(-1) == labels
        loss, correct = accelerator.gather_for_metrics(own)
        losses.append(loss)
        right.append(correct)
    model.train()
    return torch.cat(losses).mean().item(), torch.cat(right).double().mean().item()


def bar(value: float, largest: float, width: int = 30) -> str:
    """Return a bar of a text chart, `width` characters long at `largest`."""
    return "#" * round(width * min(value / largest, 1))


def print_table(accelerator: Accelerator, *rows: tuple[object, ...]) -> None:
    """Print rows with aligned columns, on the main process. The first row has the names of the columns."""
    texts = [
        [f"{cell:.4f}" if isinstance(cell, float) else str(cell) for cell in row] for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    for row in texts:
        accelerator.print(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        )
