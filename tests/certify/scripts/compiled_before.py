# SPDX-License-Identifier: Apache-2.0
"""A model that is compiled before `prepare`.

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
    model = torch.compile(Decoder().double(), backend="aot_eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = DataLoader(Documents(64), batch_size=4, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        with split_sequences(accelerator, batch):
            accelerator.backward(loss_of(model, batch))
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
