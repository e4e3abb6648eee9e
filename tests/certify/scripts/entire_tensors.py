# SPDX-License-Identifier: Apache-2.0
"""An optimizer whose step of an element needs the entire parameter.

Certified in ddp:2 fsdp:2 tp:2 pp:2 cp:2.
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
    optimizer = torch.optim.Adafactor(model.parameters(), lr=0.05)
    loader = DataLoader(Documents(64), batch_size=4, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        with split_sequences(accelerator, batch):
            accelerator.backward(loss_of(model, batch))
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
