# SPDX-License-Identifier: Apache-2.0
"""One layer in two prepared models, which train in turn.

Certified in ddp:2.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.utils import set_seed


def main() -> None:
    set_seed(0)
    accelerator = Accelerator()
    shared = nn.Linear(6, 8)
    models = []
    for _ in range(2):
        models.append(nn.Sequential(shared, nn.Tanh(), nn.Linear(8, 1)).double())
    first, second = models
    optimizer = torch.optim.SGD([*first.parameters(), *second[2].parameters()], lr=0.1)
    inputs = torch.randn(64, 6, dtype=torch.float64)
    loader = DataLoader(TensorDataset(inputs), batch_size=4, shuffle=True)
    first, second, optimizer, loader = accelerator.prepare(first, second, optimizer, loader)
    for (rows,) in loader:
        loss = nn.functional.mse_loss(first(rows), rows.sum(1, keepdim=True))
        loss = loss + nn.functional.mse_loss(second(rows), rows.prod(1, keepdim=True))
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
