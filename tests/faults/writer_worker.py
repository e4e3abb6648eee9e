# SPDX-License-Identifier: Apache-2.0
"""A run that saves into one folder again and again, and says which saves were won."""

import sys
from pathlib import Path

import torch

from accelerate import Accelerator
from accelerate.core.errors import CheckpointError


def main(folder, rounds):
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(8, 8))
    for _ in range(rounds):
        with torch.no_grad():
            model.weight.add_(1.0)
        try:
            accelerator.save_state(folder)
        except CheckpointError as error:
            assert "another run saved" in str(error)
            print("lost")
        else:
            print("won")


sys.path.append(str(Path(__file__).parents[1] / "helpers"))
import without_compiler  # noqa: E402, F401

main(sys.argv[1], int(sys.argv[2]))
