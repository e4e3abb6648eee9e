# SPDX-License-Identifier: Apache-2.0
"""Ring attention: keys and values go round the ranks, point to point, while each computes on those that it has."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from .blocks import Block, Merger, accumulator, attend, attend_backward

ALL = slice(None)


@dataclass(frozen=True)
class Exchange:
    """What all ranks of an attention agree on: the group, and what a query sees.

    `keep` (ranks, batch, rows), where given, says which keys of each rank are seen at all.
    """

    group: dist.ProcessGroup
    ranks: int
    rank: int
    block: Block
    keep: torch.Tensor | None = None

    def visible(self, source: int, rows: int) -> tuple[slice, slice, Block]:
        """Which of this rank's queries see which of `source`'s keys: (queries, keys, how).

        A rank holds a head chunk and a tail chunk of the sequence. Under a causal mask all queries see the head of an
        earlier rank, and its tail none; of a later rank the tail queries alone see everything.
        """
        queries, keys, block = ALL, ALL, self.block
        if block.causal and source != self.rank:
            block = replace(block, causal=False)
            if source < self.rank:
                keys = slice(0, rows // 2)
            else:
                queries = slice(rows // 2, rows)
        if self.keep is not None:
            block = replace(block, keep=self.keep[source][:, keys])
        return queries, keys, block


class _Round:
    """One tensor on its way to the next rank, while the previous rank's comes in."""

    def __init__(self, exchange: Exchange, outgoing: torch.Tensor) -> None:
        group = exchange.group
        # Both stay alive until `wait`: the transport reads and writes them meanwhile.
        self.outgoing = outgoing.contiguous()
        self.incoming = torch.empty_like(self.outgoing)
        after, before = (exchange.rank + 1) % exchange.ranks, (exchange.rank - 1) % exchange.ranks
        self.works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, self.outgoing, group=group, group_peer=after),
                dist.P2POp(dist.irecv, self.incoming, group=group, group_peer=before),
            ]
        )

    def wait(self) -> torch.Tensor:
        for work in self.works:
            work.wait()
        return self.incoming


def pack(key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Keys and values as one message."""
    return torch.cat([key.flatten(), value.flatten()])


def unpack(message: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values out of a message, in the shapes of `key` and `value` (views)."""
    first, second = message.split([key.numel(), value.numel()])
    return first.view(key.shape), second.view(value.shape)


class RingAttention(torch.autograd.Function):
    """Exact attention over all ranks' keys. `apply(query, key, value, exchange)`, all (batch, heads, rows, width).

    Source: H. Liu, M. Zaharia, P. Abbeel, "Ring Attention with Blockwise Transformers" (2023). Forward: ranks - 1
    messages of keys and values. Backward: the same again, and `ranks` messages of their gradients, which go round with
    them and are added up in float32 (float64).
    """

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, exchange: Exchange
    ) -> torch.Tensor:
        merger = Merger(query, value.shape[-1])
        message = pack(key, value)
        for step in range(exchange.ranks):
            moving = _Round(exchange, message) if step < exchange.ranks - 1 else None
            there = unpack(message, key, value)
            queries, keys, block = exchange.visible((exchange.rank - step) % exchange.ranks, query.shape[2])
            part = attend(query[:, :, queries], there[0][:, :, keys], there[1][:, :, keys], block)
            merger.add(queries, part)
            if moving is not None:
                message = moving.wait()
        out, lse = merger.result()
        # One more than torch's attention saves: should a checkpointed layer be computed again outside of the block, it
        # would attend to its own rows alone, and what it saves would look the same but for this.
        ctx.save_for_backward(query, key, value, out, lse, lse.new_empty(0))
        ctx.exchange = exchange
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, out, lse, _ = ctx.saved_tensors
        exchange: Exchange = ctx.exchange
        gradient = gradient.contiguous()
        dtype = accumulator(query.dtype)
        d_query = torch.zeros_like(query, dtype=dtype)
        message = pack(key, value)
        homing: _Round | None = None
        for step in range(exchange.ranks):
            moving = _Round(exchange, message) if step < exchange.ranks - 1 else None
            there = unpack(message, key, value)
            queries, keys, block = exchange.visible((exchange.rank - step) % exchange.ranks, query.shape[2])
            d_part, d_key, d_value = attend_backward(
                gradient[:, :, queries],
                query[:, :, queries],
                there[0][:, :, keys],
                there[1][:, :, keys],
                (out[:, :, queries], lse[:, :, queries]),
                block,
            )
            d_query[:, :, queries] += d_part
            # The sum for these keys comes from the rank that had them before, and goes on with this rank's part.
            total = torch.zeros_like(message, dtype=dtype) if homing is None else homing.wait()
            d_keys, d_values = unpack(total, key, value)
            d_keys[:, :, keys] += d_key
            d_values[:, :, keys] += d_value
            homing = _Round(exchange, total)
            if moving is not None:
                message = moving.wait()
        assert homing is not None
        d_key, d_value = unpack(homing.wait(), key, value)
        return d_query.to(query.dtype), d_key.to(key.dtype), d_value.to(value.dtype), None
