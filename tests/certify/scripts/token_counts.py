# SPDX-License-Identifier: Apache-2.0
"""A mean over the tokens of a window that are not padding, of which each process and batch has another number.

Certified in ddp:2 fsdp:2 fsdp1:2 tp:2 pp:2 cp:2 sp:2.
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
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(Documents(64, is_padded=True), batch_size=4, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(2):
        for batch in loader:
            with accelerator.accumulate(model), split_sequences(accelerator, batch):
                count = (batch["labels"] != -100).sum()
                accelerator.backward(loss_of(model, batch), num_items=count)
                optimizer.step()
                optimizer.zero_grad()


if __name__ == "__main__":
    main()
