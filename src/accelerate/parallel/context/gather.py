# SPDX-License-Identifier: Apache-2.0
"""All-gather attention: one message brings all ranks' keys and values, one takes their gradients back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from ...collectives import transport
from .blocks import Block, Merger, accumulator, attend, attend_backward
from .ring import ALL, Exchange, pack, unpack

# The name since torch 2.13; torch 2.11 and 2.12 have the older one.
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def _gather(exchange: Exchange, key: torch.Tensor, value: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    everyone = transport.all_gather(pack(key, value), exchange.group)
    return [unpack(message, key, value) for message in everyone.unbind()]


class _Visible:
    """Keys of several ranks that the same queries see in the same way: they are computed on together."""

    def __init__(self, exchange: Exchange, queries: slice, block: Block, sources: list[tuple[int, slice]]) -> None:
        self.queries, self.sources = queries, sources
        if exchange.keep is not None:
            keep = torch.cat([exchange.keep[source][:, keys] for source, keys in sources], dim=1)
            block = replace(block, keep=keep)
        self.block = block

    def join(self, parts: list[torch.Tensor]) -> torch.Tensor:
        found = [parts[source][:, :, keys] for source, keys in self.sources]
        return found[0] if len(found) == 1 else torch.cat(found, dim=2)


def _groups(exchange: Exchange, rows: int) -> Iterator[_Visible]:
    """At most three: this rank's own keys, those of the ranks before it, and those of the ranks after it."""
    if not exchange.block.causal:
        yield _Visible(exchange, ALL, exchange.block, [(source, ALL) for source in range(exchange.ranks)])
        return
    for sources in ([exchange.rank], range(exchange.rank), range(exchange.rank + 1, exchange.ranks)):
        seen = [(source, *exchange.visible(source, rows)) for source in sources]
        if seen:
            _, queries, _, block = seen[0]
            yield _Visible(
                exchange, queries, replace(block, keep=None), [(source, keys) for source, _, keys, _ in seen]
            )


class GatherAttention(torch.autograd.Function):
    """Exact attention over all ranks' keys. `apply(query, key, value, exchange)`, all (batch, heads, rows, width).

    What was gathered is not kept: the backward gathers again, so that between them a rank holds its own part alone.
    Gradients of keys and values are added up in float32 (float64) by one reduce-scatter.
    """

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, exchange: Exchange
    ) -> torch.Tensor:
        keys, values = (list(parts) for parts in zip(*_gather(exchange, key, value), strict=True))
        merger = Merger(query, value.shape[-1])
        for group in _groups(exchange, query.shape[2]):
            part = attend(query[:, :, group.queries], group.join(keys), group.join(values), group.block)
            merger.add(group.queries, part)
        out, lse = merger.result()
        ctx.save_for_backward(query, key, value, out, lse, lse.new_empty(0))  # see RingAttention
        ctx.exchange = exchange
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, out, lse, _ = ctx.saved_tensors
        exchange: Exchange = ctx.exchange
        gradient = gradient.contiguous()
        dtype = accumulator(query.dtype)
        keys, values = (list(parts) for parts in zip(*_gather(exchange, key, value), strict=True))
        d_query = torch.zeros_like(query, dtype=dtype)
        total = torch.zeros((exchange.ranks, key.numel() + value.numel()), dtype=dtype, device=key.device)
        for group in _groups(exchange, query.shape[2]):
            rows = group.queries
            d_part, *d_found = attend_backward(
                gradient[:, :, rows],
                query[:, :, rows],
                group.join(keys),
                group.join(values),
                (out[:, :, rows], lse[:, :, rows]),
                group.block,
            )
            d_query[:, :, rows] += d_part
            lengths = [key[:, :, seen].shape[2] for _, seen in group.sources]
            split = zip(*(found.split(lengths, dim=2) for found in d_found), strict=True)
            for (source, seen), (d_key, d_value) in zip(group.sources, split, strict=True):
                d_keys, d_values = unpack(total[source], key, value)
                d_keys[:, :, seen] += d_key
                d_values[:, :, seen] += d_value
        mine = torch.empty_like(total[0])
        _reduce_scatter(mine, total.flatten(), group=exchange.group)
        d_key, d_value = unpack(mine, key, value)
        return d_query.to(query.dtype), d_key.to(key.dtype), d_value.to(value.dtype), None
