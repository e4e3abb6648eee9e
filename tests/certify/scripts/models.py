# SPDX-License-Identifier: Apache-2.0
"""A small causal language model and its data, for the scripts of this folder."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

from accelerate import Accelerator

WORDS, LENGTH, WIDTH, HEADS = 24, 8, 16, 4


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.q_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.k_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.v_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.o_proj = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = []
        for projection in (self.q_proj, self.k_proj, self.v_proj):
            heads.append(projection(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2))
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up_proj = nn.Linear(WIDTH, 2 * WIDTH)
        self.down_proj = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.gelu(self.up_proj(x)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.mlp = MLP()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.mlp(x)


class Decoder(nn.Module):
    """Returns the scores of the next token at each position."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(4)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(input_ids) + self.positions(position_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Documents(Dataset):
    """Tokens and the next ones, which are padding (-100) at the end of most documents."""

    def __init__(self, count: int, is_padded: bool = False) -> None:
        generator = torch.Generator().manual_seed(1)
        self.tokens = torch.randint(WORDS, (count, LENGTH + 1), generator=generator)
        self.lengths = torch.full((count,), LENGTH)
        if is_padded:
            self.lengths = torch.randint(1, LENGTH + 1, (count,), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        positions = torch.arange(LENGTH)
        labels = self.tokens[index, 1:].masked_fill(positions >= self.lengths[index], -100)
        return {
            "input_ids": self.tokens[index, :-1],
            "position_ids": positions,
            "labels": labels,
        }


def split_sequences(
    accelerator: Accelerator, batch: dict[str, torch.Tensor]
) -> AbstractContextManager[None]:
    """The block in which a batch has this rank's part of the sequences, in a layout that splits them."""
    buffers = list(batch.values())
    return accelerator.maybe_context_parallel(buffers, [1] * len(buffers), set(buffers))


def loss_of(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The mean over the tokens that are not padding."""
    scores = model(batch["input_ids"], batch["position_ids"])
    return F.cross_entropy(scores.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)
