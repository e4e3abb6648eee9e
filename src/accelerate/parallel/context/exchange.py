# SPDX-License-Identifier: Apache-2.0
"""Messages between ranks that share sequences: keys and values of all ranks, or heads for rows. With gradients."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch.autograd.function import FunctionCtx, once_differentiable

from ...collectives import transport
from ...core.errors import ConfigurationError
from .shard import SequenceLayout

# `reduce_scatter_tensor` is the older name of the same function.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which gradients are summed over ranks: float64 for float64, else float32."""
    if dtype == torch.float64:
        return torch.float64
    return torch.float32


class _GatherContext(FunctionCtx):
    group: dist.ProcessGroup
    all_to_all: bool


class _Gather(torch.autograd.Function):
    """The rows of all ranks, (ranks, length). The gradient of a rank's row is summed over all ranks.

    With `all_to_all` ranks exchange rows and their gradients directly, otherwise by all-gather and reduce-scatter.
    """

    @staticmethod
    def forward(
        ctx: _GatherContext, row: torch.Tensor, group: dist.ProcessGroup, all_to_all: bool
    ) -> torch.Tensor:
        ctx.group, ctx.all_to_all = group, all_to_all
        if all_to_all:
            return _all_to_all(row.expand(group.size(), -1), group)
        return transport.all_gather(row, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: _GatherContext, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradients = gradient.to(sum_dtype(gradient.dtype)).contiguous()
        if ctx.all_to_all:
            total = _all_to_all(gradients, ctx.group).sum(0)
        else:
            total = torch.empty_like(gradients[0])
            _reduce_scatter(total, gradients.flatten(), group=ctx.group)
        return total.to(gradient.dtype), None, None


def full_keys(
    key: torch.Tensor,
    value: torch.Tensor,
    group: dist.ProcessGroup,
    layout: SequenceLayout,
    all_to_all: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values (batch, heads, rows, width) of the full sequence, in one message."""
    message = torch.cat([key.flatten(), value.flatten()])
    rows = _Gather.apply(message, group, all_to_all)
    keys, values = rows.split([key.numel(), value.numel()], dim=1)
    keys = keys.reshape(layout.ranks, *key.shape)
    values = values.reshape(layout.ranks, *value.shape)
    return layout.join(keys.unbind(), 2), layout.join(values.unbind(), 2)


class _GroupContext(FunctionCtx):
    group: dist.ProcessGroup


class _Exchange(torch.autograd.Function):
    """An all-to-all of equal shards along dimension 0; its gradient is exchanged in reverse."""

    @staticmethod
    def forward(ctx: _GroupContext, shards: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _all_to_all(shards, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: _GroupContext, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _all_to_all(gradient, ctx.group), None


def _all_to_all(shards: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    shards = shards.contiguous()
    received = torch.empty_like(shards)
    transport.exchange(received, shards, group)
    return received


def gather_rows(
    shard: torch.Tensor, dimension: int, group: dist.ProcessGroup, layout: SequenceLayout
) -> torch.Tensor:
    """The full tensor of which each rank has its rows along `dimension`. It has no gradient."""
    row = shard.detach().flatten()
    # As bytes: not all backends send every dtype.
    rows = transport.all_gather(row.view(torch.uint8), group).view(shard.dtype)
    shards = rows.view(layout.ranks, *shard.shape)
    return layout.join(shards.unbind(), dimension)


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


def copies_of_heads(key_heads: int, ranks: int) -> int:
    """To how many ranks a key head is sent, so that every rank has the key heads of its queries."""
    return math.lcm(key_heads, ranks) // key_heads


def spread_inputs(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    group: dist.ProcessGroup,
    ranks: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query, key and value with all rows of this rank's heads; in one message where their widths are equal.

    Where there are fewer key heads than ranks, each is sent to all ranks that have queries for it.
    Source: S. A. Jacobs et al., "DeepSpeed Ulysses" (2023).
    """
    heads = query.shape[1]
    if heads % ranks:
        raise ConfigurationError(
            f"sp_size={ranks} does not divide the {heads} attention heads of a layer, which are "
            "divided among the ranks. Choose a divisor, or use cp_size, which does not split "
            "heads."
        )
    copies = copies_of_heads(key.shape[1], ranks)
    if copies > 1:
        key = key.repeat_interleave(copies, dim=1)
        value = value.repeat_interleave(copies, dim=1)
    inputs = (query, key, value)
    widths = {tensor.shape[-1] for tensor in inputs}
    dtypes = {tensor.dtype for tensor in inputs}
    if len(widths) > 1 or len(dtypes) > 1:
        return tuple(split_heads(tensor, group, ranks) for tensor in inputs)  # type: ignore[return-value]
    # A rank's heads of all three lie next to each other.
    joined = torch.cat([tensor.unflatten(1, (ranks, -1)) for tensor in inputs], dim=2)
    together = split_heads(joined.flatten(1, 2), group, ranks)
    of_rank = key.shape[1] // ranks
    query, key, value = together.split([heads // ranks, of_rank, of_rank], dim=1)
    return query, key, value
