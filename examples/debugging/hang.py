# SPDX-License-Identifier: Apache-2.0
"""One rank calls a collective that the other does not call. The run stands still, and reports which rank is where.

    accelerate launch --cpu --num_processes 2 examples/debugging/hang.py

After the report the run ends with an error that names the ranks, because ACCELERATE_COLLECTIVE_TIMEOUT is set.
"""

import os

# Short, so that the example is. By default the report comes after 50 seconds, and the run ends after torch's timeout.
os.environ.setdefault("ACCELERATE_HANG_REPORT", "3")
os.environ.setdefault("ACCELERATE_COLLECTIVE_TIMEOUT", "8")

import torch
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator


def main():
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.randn(256, 8)
    loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=8)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    for step, (batch, target) in enumerate(loader):
        loss = torch.nn.functional.mse_loss(model(batch), target)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if step == 5 and accelerator.is_main_process:
            # The mistake: the other ranks do not call it. They are in the backward of the next step.
            mean = accelerator.reduce(loss.detach(), "mean")
            print(f"mean loss {mean.item():.3f}")


if __name__ == "__main__":
    main()
