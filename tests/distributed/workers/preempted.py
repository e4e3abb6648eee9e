# SPDX-License-Identifier: Apache-2.0
"""A run that is asked to stop once, in the middle of an epoch and of an accumulation window, and then goes on."""

import os
import signal
import sys
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed

folder, stop_at = Path(sys.argv[1]), int(sys.argv[2])
set_seed(0)
accelerator = Accelerator(
    gradient_accumulation_steps=3,
    exact=True,
    project_config=ProjectConfiguration(
        str(folder), automatic_checkpoint_naming=True, total_limit=2
    ),
)
model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1)).double()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma=0.9)
x = torch.randn(47, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
data = TensorDataset(x, x.sum(1, keepdim=True).sin())
loader = DataLoader(data, batch_size=2, shuffle=True)
model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)

start = accelerator.resume(exit_code=int(sys.argv[3]) if len(sys.argv) > 3 else None)
batches = 0
for _epoch in range(start.epoch if start else 0, 3):
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            accelerator.backward(
                torch.nn.functional.mse_loss(model(inputs), targets), num_items=len(inputs)
            )
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        batches += 1
        if batches == stop_at and accelerator.is_last_process:
            os.kill(os.getpid(), signal.SIGTERM)
if accelerator.is_main_process:
    torch.save(accelerator.unwrap_model(model).state_dict(), folder / "end.pt")
    print("batches", batches)
