# SPDX-License-Identifier: Apache-2.0
"""Evaluate a language model on lines of different lengths: each token counts once, on any number of processes.

    python examples/recipes/token_metrics.py
    accelerate launch --num_processes 2 examples/recipes/token_metrics.py --batch_size 3

The mean over all tokens does not depend on the batch size or the number of processes. The mean of means does.
"""

import argparse
import inspect
import string
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from accelerate import Accelerator

PADDING = -100  # cross_entropy leaves these targets out


def lines() -> list[torch.Tensor]:
    """Return the lines of a module of the standard library, as bytes. Their lengths are 2 to 80."""
    source = inspect.getsource(string).splitlines(keepends=True)
    return [torch.tensor(list(line.encode())) for line in source if len(line) > 1]


def collate(batch: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad the lines of a batch to the longest one. The target of a byte is the next byte."""
    inputs = pad_sequence([line[:-1] for line in batch], batch_first=True)
    targets = pad_sequence([line[1:] for line in batch], batch_first=True, padding_value=PADDING)
    return inputs, targets


@torch.no_grad()
def evaluate(accelerator: Accelerator, model: nn.Module, loader: DataLoader) -> tuple[float, float]:
    """Return the mean loss of all tokens, and the mean of the batches' means."""
    loss_sum = torch.zeros((), dtype=torch.float64, device=accelerator.device)
    tokens = torch.zeros((), dtype=torch.int64, device=accelerator.device)
    means = []
    for inputs, targets in loader:
        losses = F.cross_entropy(
            model(inputs).transpose(1, 2), targets, ignore_index=PADDING, reduction="none"
        )  # (batch, length), 0 where the target is padding
        counts = (targets != PADDING).sum(1)
        means.append(losses.sum() / counts.sum())
        # One row for each line: the samples that fill the last batches are removed.
        losses, counts = accelerator.gather_for_metrics((losses.sum(1), counts))
        loss_sum += losses.double().sum()
        tokens += counts.sum()
    mean_of_means = accelerator.reduce(torch.stack(means).mean(), reduction="mean")
    return (loss_sum / tokens).item(), mean_of_means.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--batch_size", type=int, default=8, help="lines of a process (default: %(default)s)"
    )
    args = parser.parse_args()
    accelerator = Accelerator()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(256, 64), nn.Linear(64, 256))
    # As after training: the loss of a byte depends on how often it occurs in the text.
    frequencies = torch.bincount(torch.cat(lines()), minlength=256) + 1.0
    model[1].bias.data = torch.log(frequencies / frequencies.sum())
    loader = DataLoader(lines(), args.batch_size, collate_fn=collate)
    model, loader = accelerator.prepare(model, loader)
    loss, mean_of_means = evaluate(accelerator, model.eval(), loader)
    count = accelerator.num_processes
    setting = f"{count} process{'es' * (count > 1)}, batches of {args.batch_size}"
    accelerator.print(f"{setting}: mean over tokens {loss:.6f}, mean of means {mean_of_means:.6f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
