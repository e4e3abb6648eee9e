# SPDX-License-Identifier: Apache-2.0
"""A step on packed rows: with `seq_lens`, and in plain PyTorch with the mask and the positions made by hand.

Also the same documents as padded rows, one document each.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from timing import alternate, emit
from torch import nn

import accelerate.utils
from accelerate import Accelerator

VOCABULARY, WIDTH, HEADS, LAYERS = 256, 256, 8, 4
LENGTHS = [[40, 200, 16, 120, 136], [300, 60, 100, 52]]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        heads = self.qkv(self.norm(x)).unflatten(-1, (3 * HEADS, -1)).transpose(1, 2)
        query, key, value = heads.chunk(3, dim=1)
        seen = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None
        )
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(512, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        x = self.embedding(input_ids) + self.positions(position_ids)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x)


def build() -> tuple[Model, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Model()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def by_hand(ids: torch.Tensor, targets: torch.Tensor) -> Callable[[], None]:
    model, optimizer = build()

    def run() -> None:
        numbers, positions = [], []
        for row in LENGTHS:
            sizes = torch.tensor(row)
            numbers.append(torch.arange(len(row)).repeat_interleave(sizes))
            positions.append(torch.cat([torch.arange(size) for size in row]))
        number = torch.stack(numbers)
        mask = (number[:, None, :, None] == number[:, None, None]).tril()
        logits = model(ids, torch.stack(positions), mask)
        F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return run


def with_lengths(ids: torch.Tensor, targets: torch.Tensor) -> Callable[[], None]:
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(*build())

    def run() -> None:
        logits = model(ids, seq_lens=LENGTHS)
        accelerator.backward(F.cross_entropy(logits.flatten(0, 1), targets.flatten()))
        optimizer.step()
        optimizer.zero_grad()

    return run


def padded(ids: torch.Tensor, targets: torch.Tensor) -> Callable[[], None]:
    model, optimizer = build()
    documents, labels = [], []
    for tokens, following, row in zip(ids, targets, LENGTHS, strict=True):
        documents += tokens.split(row)
        labels += following.split(row)
    rows = nn.utils.rnn.pad_sequence(documents, batch_first=True)
    row_targets = nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=-100)
    positions = torch.arange(rows.shape[1]).expand_as(rows)

    def run() -> None:
        logits = model(rows, positions)
        F.cross_entropy(logits.flatten(0, 1), row_targets.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return run


def main() -> None:
    if not hasattr(accelerate.utils, "pack"):
        return  # the peer does not separate documents
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(VOCABULARY, (len(LENGTHS), sum(LENGTHS[0])), generator=generator)
    targets = F.pad(ids[:, 1:], (0, 1), value=-100)
    loops = {
        "by hand": by_hand(ids, targets),
        "packed": with_lengths(ids, targets),
        "padded": padded(ids, targets),
    }
    seconds = alternate(loops, rounds=11)
    emit("packed step", "ms", seconds["by hand"], seconds["packed"])
    emit("packed step, against padding", "ms", seconds["padded"], seconds["packed"])


if __name__ == "__main__":
    main()
