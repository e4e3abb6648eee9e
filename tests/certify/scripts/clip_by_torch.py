# SPDX-License-Identifier: Apache-2.0
"""Gradients that torch's function clips.

Certified in ddp:2 fsdp:2 cp:2.
"""

import torch
from models import Decoder, Documents, loss_of, split_sequences
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
        with split_sequences(accelerator, batch):
            accelerator.backward(loss_of(model, batch))
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
