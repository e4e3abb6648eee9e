# SPDX-License-Identifier: Apache-2.0
"""Samples that the processes cannot share equally, each of which counts once: `exact=True`.

Certified in ddp:2 fsdp:2 fsdp1:2.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.utils import set_seed


def main() -> None:
    set_seed(0)
    accelerator = Accelerator(exact=True, gradient_accumulation_steps=2)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    inputs = torch.randn(27, 6, dtype=torch.float64)
    dataset = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, DataLoader(dataset, batch_size=4, shuffle=True)
    )
    for _ in range(3):
        for rows, targets in loader:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.mse_loss(model(rows), targets))
                optimizer.step()
                optimizer.zero_grad()


if __name__ == "__main__":
    main()
