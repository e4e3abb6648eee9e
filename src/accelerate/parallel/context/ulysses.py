# SPDX-License-Identifier: Apache-2.0
"""All-to-all attention: each rank gets the full sequence of some heads, which torch's attention computes."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from ...collectives import transport
from ...core.errors import ConfigurationError


class _Exchange(torch.autograd.Function):
    """`all_to_all_single` of equal shards along dimension 0; its gradient is exchanged in reverse."""

    @staticmethod
    def forward(ctx: Any, shards: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _all_to_all(shards, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _all_to_all(gradient, ctx.group), None


def _all_to_all(shards: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    shards = shards.contiguous()
    received = torch.empty_like(shards)
    transport.exchange(received, shards, group)
    return received


def split_heads(heads: torch.Tensor, group: dist.ProcessGroup, ranks: int) -> torch.Tensor:
    """(batch, heads, rows of this rank, width) -> (batch, heads / ranks, all rows, width)."""
    shards = heads.unflatten(1, (ranks, -1)).movedim(1, 0)
    received: torch.Tensor = _Exchange.apply(shards, group)
    return received.movedim(0, 2).flatten(2, 3)


def split_rows(heads: torch.Tensor, group: dist.ProcessGroup, ranks: int) -> torch.Tensor:
    """The way back: (batch, heads / ranks, all rows, width) -> (batch, heads, rows of this rank, width)."""
    shards = heads.unflatten(2, (ranks, -1)).movedim(2, 0)
    received: torch.Tensor = _Exchange.apply(shards, group)
    return received.movedim(0, 1).flatten(1, 2)


def copies_of_heads(shared: int, ranks: int) -> int:
    """To how many ranks a key head is sent, so that every rank has those that its queries need."""
    return math.lcm(shared, ranks) // shared


def spread_inputs(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, group: dist.ProcessGroup, ranks: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query, key and value with all rows of this rank's heads; in one message where their widths are equal.

    Where there are fewer key heads than ranks, each is sent to all ranks that have queries for it.
    Source: S. A. Jacobs et al., "DeepSpeed Ulysses" (2023).
    """
    heads, shared = query.shape[1], key.shape[1]
    if heads % ranks:
        raise ConfigurationError(
            f"sp_size={ranks} does not divide the {heads} attention heads of a layer: each rank takes some of them. "
            "Choose a divisor, or split with cp_size, which does not split heads."
        )
    copies = copies_of_heads(shared, ranks)
    if copies > 1:
        key, value = (tensor.repeat_interleave(copies, dim=1) for tensor in (key, value))
    if not query.shape[-1] == key.shape[-1] == value.shape[-1] or not query.dtype == key.dtype == value.dtype:
        return tuple(split_heads(tensor, group, ranks) for tensor in (query, key, value))  # type: ignore[return-value]
    # A rank's heads of all three lie next to each other.
    joined = torch.cat([tensor.unflatten(1, (ranks, -1)) for tensor in (query, key, value)], dim=2)
    together = split_heads(joined.flatten(1, 2), group, ranks)
    query, key, value = together.split([heads // ranks, key.shape[1] // ranks, key.shape[1] // ranks], dim=1)
    return query, key, value
