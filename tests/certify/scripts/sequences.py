# SPDX-License-Identifier: Apache-2.0
"""A model that mixes a sequence by a convolution and a recurrence, with a head on its mean and its first token.

Certified in ddp:2 fsdp:2 fsdp1:2 tp:2 pp:2.
"""

import torch
import torch.nn.functional as F
from models import MLP, WIDTH, WORDS, Documents
from torch import nn
from torch.utils.data import DataLoader

from accelerate import Accelerator
from accelerate.utils import set_seed


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.recurrence = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.mlp = MLP()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.convolution(x.transpose(1, 2)).transpose(1, 2)
        x = x + self.recurrence(x)[0]
        return x + self.mlp(x)


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList([Mixer() for _ in range(2)])
        self.head = nn.Linear(2 * WIDTH, 3)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(torch.cat([x.mean(1), x[:, 0]], dim=-1))


def main() -> None:
    set_seed(0)
    accelerator = Accelerator()
    model = Classifier().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = DataLoader(Documents(64), batch_size=4, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        ids = batch["input_ids"]
        accelerator.backward(F.cross_entropy(model(ids), ids.sum(1) % 3))
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
