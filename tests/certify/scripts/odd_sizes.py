# SPDX-License-Identifier: Apache-2.0
"""Batches of three samples, windows of three batches, and an epoch that ends inside of a window.

Certified in ddp:2 fsdp:2 fsdp1:2 tp:2 pp:2 cp:2 sp:2 fsdp:2xtp:2.
"""

import torch
from models import Decoder, Documents, loss_of, split_sequences
from torch.utils.data import DataLoader

from accelerate import Accelerator
from accelerate.utils import set_seed


def main() -> None:
    set_seed(0)
    accelerator = Accelerator(gradient_accumulation_steps=3)
    model = Decoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(Documents(29), batch_size=3, shuffle=True, drop_last=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(4):
        for batch in loader:
            with accelerator.accumulate(model), split_sequences(accelerator, batch):
                accelerator.backward(loss_of(model, batch))
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()


if __name__ == "__main__":
    main()
