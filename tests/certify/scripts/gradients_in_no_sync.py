# SPDX-License-Identifier: Apache-2.0
"""Gradients that a backward in `no_sync` has left, and `model.zero_grad` clears.

Certified in ddp:2 fsdp1:2.
"""

import torch
from models import Decoder, Documents, loss_of
from torch.utils.data import DataLoader

from accelerate import Accelerator
from accelerate.utils import set_seed


def main() -> None:
    set_seed(0)
    accelerator = Accelerator()
    model = Decoder().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = DataLoader(Documents(64), batch_size=4, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        with accelerator.no_sync(model):
            accelerator.backward(3 * loss_of(model, batch))
        model.zero_grad()
        accelerator.backward(loss_of(model, batch))
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
