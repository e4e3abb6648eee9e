# SPDX-License-Identifier: Apache-2.0
"""Accumulated gradients, clipped by their norm, and a schedule.

Certified in ddp:2 fsdp:2 fsdp1:2 tp:2 pp:2 cp:2 sp:2 ddp:2xfsdp:2.
"""

import torch
from models import Decoder, Documents, loss_of, split_sequences
from torch.utils.data import DataLoader

from accelerate import Accelerator
from accelerate.utils import set_seed


def main() -> None:
    set_seed(0)
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = Decoder().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=16)
    loader = DataLoader(Documents(64), batch_size=4, shuffle=True)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    for _ in range(2):
        for batch in loader:
            with accelerator.accumulate(model), split_sequences(accelerator, batch):
                accelerator.backward(loss_of(model, batch))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()


if __name__ == "__main__":
    main()
