# SPDX-License-Identifier: Apache-2.0
"""Two optimizers of one model: one with weight decay for matrices, one without for the other parameters.

Certified in ddp:2 fsdp:2 tp:2 pp:2.
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
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    decaying = torch.optim.AdamW(matrices, lr=0.01, weight_decay=0.1)
    plain = torch.optim.SGD(vectors, lr=0.1, momentum=0.9)
    loader = DataLoader(Documents(64), batch_size=4, shuffle=True)
    model, decaying, plain, loader = accelerator.prepare(model, decaying, plain, loader)
    for batch in loader:
        accelerator.backward(loss_of(model, batch))
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        for optimizer in (decaying, plain):
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
