# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters beside frozen layers.

Certified in ddp:2 fsdp:2 fsdp1:2 pp:2.
"""

import torch
from models import Decoder, Documents, loss_of
from torch import nn
from torch.utils.data import DataLoader

from accelerate import Accelerator
from accelerate.utils import set_seed


class Adapted(nn.Module):
    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def main() -> None:
    set_seed(0)
    accelerator = Accelerator()
    model = Decoder().requires_grad_(False)
    for block in model.blocks:
        block.mlp.up_proj = Adapted(block.mlp.up_proj)
        block.attention.v_proj = Adapted(block.attention.v_proj)
    model = model.double()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.01)
    loader = DataLoader(Documents(64), batch_size=4, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        accelerator.backward(loss_of(model, batch))
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
