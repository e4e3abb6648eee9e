# SPDX-License-Identifier: Apache-2.0
"""Which layouts of a model fit a machine: the steps of `accelerate plan` as functions.

python examples/big_model/plan.py --machine 2x1GB --batch 8x64
"""

import argparse

import torch
from torch import nn

from accelerate.planning import estimate, layouts, machine, report, trace
from accelerate.planning.model import parse_batch


class Block(nn.Module):
    """A feed-forward block with a residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down_proj(nn.functional.gelu(self.up_proj(x)))


class Model(nn.Module):
    """Token ids to scores. `_no_split_modules` are the units that are sharded and recomputed."""

    _no_split_modules = ("Block",)

    def __init__(self, width: int = 256, depth: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, width)
        self.blocks = nn.Sequential(*[Block(width) for _ in range(depth)])
        self.head = nn.Linear(width, 1000)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embed(ids)))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--machine", default="2x1GB")
    parser.add_argument("--batch", default="8x64")
    given = parser.parse_args()

    here = machine.describe(given.machine)
    with torch.device("meta"):  # shapes without memory
        training = trace.PlannedTraining(Model(), parse_batch(given.batch), device=here.device)
    rows = estimate.plan(training, here, layouts.candidates(here.ranks))
    for row in rows:
        if row.failure is None:
            low, high = (size / 2**20 for size in row.memory)
            print(
                f"{row.layout.name:10} {low:8.1f} to {high:.1f} MiB, {'fits' if row.fits else 'does not fit'}"
            )
    for names, reason in report.failures(rows):
        print(f"not estimated: {names}: {reason}")


if __name__ == "__main__":
    main()
