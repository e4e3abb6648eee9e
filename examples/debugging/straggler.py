# SPDX-License-Identifier: Apache-2.0
"""One rank is slow in one step. The report states where it is, and the run continues when it is done.

accelerate launch --cpu --num_processes 2 examples/debugging/straggler.py
"""

import os
import time

# Short, so that the example is. The default is 50 seconds.
os.environ.setdefault("ACCELERATE_HANG_REPORT", "3")

import torch
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator


def augment(batch, seconds):
    """Some work on the CPU that takes much longer for this batch than for others."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        batch = (batch + torch.randn_like(batch) * 1e-6).clamp(-10, 10)
    return batch


def main():
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.randn(128, 8)
    loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=8)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    last = accelerator.num_processes - 1
    for step, (batch, target) in enumerate(loader):
        if step == 3 and accelerator.process_index == last:
            batch = augment(batch, seconds=5)
        loss = torch.nn.functional.mse_loss(model(batch), target)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.print(
        f"trained {step + 1} steps, mean loss {accelerator.reduce(loss.detach(), 'mean').item():.3f}"
    )


if __name__ == "__main__":
    main()
