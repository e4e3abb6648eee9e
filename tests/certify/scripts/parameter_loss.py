# SPDX-License-Identifier: Apache-2.0
"""A loss of parameters themselves, beside that of the output.

Certified in ddp:2 tp:2.
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
        loss = loss_of(model, batch)
        for name, parameter in model.named_parameters():
            if "norm" in name:
                loss = loss + 0.01 * parameter.square().sum()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
