# SPDX-License-Identifier: Apache-2.0
"""A model applied to a dataset, a few milliseconds a sample; the command line: folder, number of samples."""

import os
import sys
from pathlib import Path

import torch

from accelerate import PartialState
from accelerate.inference import map_dataset


class Model(torch.nn.Module):
    """Numbers to numbers, by products that take a while."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weight = torch.nn.Parameter(torch.randn(512, 512, generator=generator) / 512**0.5)

    def forward(self, number):
        x = torch.outer(number.float() / 1000, torch.ones(512))
        for _ in range(60):
            x = torch.sin(x @ self.weight)
        return {"number": number, "value": x.sum(1)}


def main(folder, samples):
    state = PartialState(cpu=True)
    (folder / f"rank{state.process_index}.pid").write_text(str(os.getpid()))
    map_dataset(Model(), range(samples), folder / "output", batch_size=4, part_size=8)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
