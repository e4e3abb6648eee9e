# SPDX-License-Identifier: Apache-2.0
"""Train a causal language model whose tokens have weights: exact with gradient accumulation, on several processes.

    python examples/features/gradient_weights.py
    accelerate launch --num_processes 2 examples/features/gradient_weights.py

The loss of a batch is the weighted mean over its tokens. `backward(loss, num_items=weights.sum())` gives the gradient
of the weighted mean over all tokens of the accumulation window on all processes. So the columns are equal: they train
on the same 16 windows in a step, in one batch, in two and in four.
"""

import inspect
import string

import torch
import torch.nn.functional as F
from common import print_table
from torch import nn
from torch.utils.data import DataLoader, Dataset

from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed

LENGTH, WINDOWS_IN_A_STEP = 32, 16


class Windows(Dataset):
    """Windows of the source of the module `string`. Letters weigh 1, other bytes 0.25, and comments nothing."""

    def __init__(self) -> None:
        lines = inspect.getsource(string).splitlines(keepends=True)
        text = "".join(lines).encode()
        weights = [
            0.0 if line.lstrip().startswith("#") else 1.0 if char.isalpha() else 0.25
            for line in lines
            for char in line
        ]
        count = (len(text) - 1) // LENGTH // 64 * 64
        self.tokens = torch.tensor(list(text[: count * LENGTH + 1]))
        self.weights = torch.tensor(weights[: count * LENGTH + 1])
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        start, end = index * LENGTH, (index + 1) * LENGTH
        return (
            self.tokens[start:end],
            self.tokens[start + 1 : end + 1],
            self.weights[start + 1 : end + 1],
        )


class Model(nn.Module):
    """A causal language model over bytes: an embedding, one layer of attention, and a linear layer."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed, self.qkv = nn.Embedding(256, width), nn.Linear(width, 3 * width)
        self.place = nn.Parameter(torch.randn(LENGTH, width) / 8)
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.place
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return self.head(x + F.scaled_dot_product_attention(q, k, v, is_causal=True))


def train(accumulation: int) -> tuple[Accelerator, list[float]]:
    accelerator = Accelerator(
        gradient_accumulation_steps=accumulation,
        dataloader_config=DataLoaderConfiguration(split_batches=True),
    )
    set_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    # With split_batches=True this is the batch size of all processes together.
    loader = DataLoader(Windows(), WINDOWS_IN_A_STEP // accumulation)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses, total = [], torch.zeros(2, device=accelerator.device)
    for tokens, targets, weights in loader:
        with accelerator.accumulate(model):
            each = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction="none")
            sums = torch.stack([(each * weights.flatten()).sum(), weights.sum()])
            accelerator.backward(sums[0] / sums[1].clamp(min=1e-9), num_items=weights.sum())
            optimizer.step()
            optimizer.zero_grad()
        total += sums.detach()
        if accelerator.sync_gradients:
            weighted, items = accelerator.reduce(total, "sum").tolist()
            losses.append(weighted / items)
            total.zero_()
    return accelerator, losses


def main() -> None:
    columns = {}
    for accumulation in (1, 2, 4):
        accelerator, columns[accumulation] = train(accumulation)
        accelerator.free_memory()
    header = "step", *(f"batches a step: {number}" for number in columns)
    print_table(
        accelerator,
        header,
        *((step, *row) for step, row in enumerate(zip(*columns.values(), strict=True))),
    )
    accelerator.end_training()


if __name__ == "__main__":
    main()
