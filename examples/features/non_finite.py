# SPDX-License-Identifier: Apache-2.0
"""Leave out optimizer steps whose loss is not finite: three images have a pixel that is not a number.

    python examples/features/non_finite.py
    accelerate launch --num_processes 2 examples/features/non_finite.py

With `non_finite="ignore"`, the default, the first such batch makes all weights NaN. With "skip" its step is left out
on all processes, whichever of them has the image, and a warning names this process.
"""

import math

import torch
import torch.nn.functional as F
from common import digits, evaluate, network, print_table
from torch.utils.data import DataLoader

from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed


def train(non_finite: str) -> tuple[str, int, int, float, float]:
    accelerator = Accelerator(
        exact=True,
        dataloader_config=DataLoaderConfiguration(split_batches=True),
        non_finite=non_finite,
    )
    set_seed(0)
    data, test = digits()
    data.tensors[0][[50, 800, 1100], 0, 3, 3] = math.nan
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer, loader, test_loader = accelerator.prepare(
        model, optimizer, DataLoader(data, 32, shuffle=True), DataLoader(test, 64)
    )
    steps = left_out = 0
    for _ in range(3):
        for images, labels in loader:
            accelerator.backward(F.cross_entropy(model(images), labels))
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
            left_out += accelerator.optimizer_step_was_skipped
    return non_finite, steps, left_out, *evaluate(accelerator, model, test_loader)


def main() -> None:
    rows = [train(non_finite) for non_finite in ("ignore", "skip")]
    accelerator = Accelerator()
    print_table(accelerator, ("non_finite", "steps", "left out", "test loss", "accuracy"), *rows)
    accelerator.end_training()


if __name__ == "__main__":
    main()
