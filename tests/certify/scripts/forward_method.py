# SPDX-License-Identifier: Apache-2.0
"""A method that computes with the parameters, beside the forward.

Certified in ddp:2 fsdp:2 fsdp1:2 tp:2.
"""

import torch
import torch.nn.functional as F
from models import MLP, WIDTH
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.utils import set_seed


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList([MLP(), MLP()])
        self.decoder = nn.Linear(WIDTH, WIDTH)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.encoder:
            x = torch.tanh(layer(x))
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decoder(self.encode(x))


def main() -> None:
    set_seed(0)
    accelerator = Accelerator()
    model = Autoencoder().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    inputs = torch.randn(64, WIDTH, dtype=torch.float64)
    loader = DataLoader(TensorDataset(inputs), batch_size=4, shuffle=True)
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, loader, forward_methods=["encode"]
    )
    for (rows,) in loader:
        loss = F.mse_loss(model(rows), rows) + 0.1 * model.encode(rows + 0.1).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
