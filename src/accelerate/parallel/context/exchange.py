# SPDX-License-Identifier: Apache-2.0
"""Exact attention of a rank's rows to keys that are brought from all ranks: what ring and all-gather share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from .blocks import Attended, Block, Gradients, Merger, accumulator, attend, attend_backward
from .masks import EVERYTHING, Sight
from .shard import SequenceLayout

ALL = slice(None)

# Keys and values of one rank.
Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Piece:
    """Some of this rank's queries and the keys that they see in one way, as (rank, which of its keys)."""

    queries: slice
    keys: tuple[tuple[int, slice], ...]
    block: Block

    def join(self, parts: Mapping[int, Pair]) -> Pair:
        found = [tuple(part[:, :, keys] for part in parts[source]) for source, keys in self.keys]
        key, value = found[0] if len(found) == 1 else (torch.cat(part, dim=2) for part in zip(*found, strict=True))
        return key, value


@dataclass(frozen=True)
class Exchange:
    """What all ranks of an attention agree on: the group, how keys are brought, and what a query sees.

    `keep` (ranks, batch, rows), where given, says which keys of each rank are seen at all.
    """

    way: type[Travel]
    group: dist.ProcessGroup
    layout: SequenceLayout
    block: Block
    keep: torch.Tensor | None = None
    sight: Sight = EVERYTHING

    def groups(self) -> list[Sequence[int]]:
        """Ranks whose keys the same queries see in the same way: this rank, those before it, and those after it."""
        ranks, rank = self.layout.ranks, self.layout.rank
        if not self.block.causal:
            return [range(ranks)]
        return [group for group in ([rank], range(rank), range(rank + 1, ranks)) if group]

    def pieces(self, sources: Sequence[int], rows: int) -> list[Piece]:
        """What this rank's queries see of the keys of one of the `groups`, or of one rank; nothing where unseen."""
        if self.sight.mask is not None:
            return list(self._masked(sources, rows))
        queries, keys, block = self._visible(sources[0], rows)
        return [Piece(queries, pairs := tuple((s, keys) for s in sources), self._kept(block, pairs))]

    def _visible(self, source: int, rows: int) -> tuple[slice, slice, Block]:
        """Which of this rank's queries see which of `source`'s keys: (queries, keys, how).

        A rank holds a head chunk and a tail chunk of the sequence. Under a causal mask all queries see the head of an
        earlier rank, and its tail none; of a later rank the tail queries alone see everything.
        """
        if not self.block.causal or source == self.layout.rank:
            return ALL, ALL, self.block
        block = replace(self.block, causal=False)
        if source < self.layout.rank:
            return ALL, slice(0, rows // 2), block
        return slice(rows // 2, rows), ALL, block

    def _masked(self, sources: Sequence[int], rows: int) -> Iterator[Piece]:
        """Pieces of a mask: keys that are seen whole, and those of which the mask shows a part."""
        half = rows // 2
        slices = (slice(0, half), slice(half, rows))
        keys = [(source, place, chunk) for source in sources for place, chunk in enumerate(self.layout.chunks(source))]
        for whole in (True, False):
            seen = [tuple(key for key in keys if views[key[2]] is whole) for views in self.sight.chunks]
            if seen[0] == seen[1]:
                seen = [seen[0]]
            for queries, found in zip((ALL,) if len(seen) == 1 else slices, seen, strict=True):
                if not found:
                    continue
                pairs = _joined([(source, slices[place]) for source, place, _ in found])
                block = replace(self._kept(self.block, pairs), shift=self.sight.shift_of(queries))
                if not whole:
                    block = replace(block, mask=self.sight.part(queries, [chunk for *_, chunk in found], half))
                yield Piece(queries, pairs, block)

    def _kept(self, block: Block, pairs: tuple[tuple[int, slice], ...]) -> Block:
        if self.keep is None:
            return block
        return replace(block, keep=torch.cat([self.keep[source][:, keys] for source, keys in pairs], dim=1))


def _joined(pairs: list[tuple[int, slice]]) -> tuple[tuple[int, slice], ...]:
    """Both chunks of a rank as one."""
    result: list[tuple[int, slice]] = []
    for source, keys in pairs:
        if result and result[-1][0] == source:
            result[-1] = (source, ALL)
        else:
            result.append((source, keys))
    return tuple(result)


def pack(key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Keys and values as one message."""
    return torch.cat([key.flatten(), value.flatten()])


def unpack(message: torch.Tensor, like: Pair) -> Pair:
    """Keys and values out of a message, in the shapes of `like` (views)."""
    first, second = message.split([part.numel() for part in like])
    return first.view(like[0].shape), second.view(like[1].shape)


class Travel:
    """One way of keys and values to all ranks, and of their gradients home."""

    def __init__(self, exchange: Exchange, key: torch.Tensor, value: torch.Tensor) -> None:
        self.exchange, self.own = exchange, (key, value)
        self.dtype = accumulator(key.dtype)

    def arrivals(self) -> Iterator[tuple[Sequence[int], Mapping[int, Pair]]]:
        """(ranks whose keys can be attended to together, keys and values by rank), until all ranks' were there."""
        raise NotImplementedError

    def sums(self, source: int) -> Pair:
        """Where the gradients of a rank's keys and values are added up. Views."""
        raise NotImplementedError

    def total(self) -> Pair:
        """The gradients of this rank's keys and values, from all ranks."""
        raise NotImplementedError

    def add(self, pieces: Sequence[Piece], found: Sequence[Gradients]) -> None:
        """Take the gradients of what arrived last."""
        for piece, (_, d_key, d_value) in zip(pieces, found, strict=True):
            lengths = [self.own[0][:, :, keys].shape[2] for _, keys in piece.keys]
            split = zip(d_key.split(lengths, dim=2), d_value.split(lengths, dim=2), strict=True)
            for (source, keys), parts in zip(piece.keys, split, strict=True):
                for total, part in zip(self.sums(source), parts, strict=True):
                    total[:, :, keys] += part


class ExchangedAttention(torch.autograd.Function):
    """Exact attention over all ranks' keys. `apply(query, key, value, exchange)`, all (batch, heads, rows, width).

    What was brought is not kept: the backward brings it again, so that between them a rank holds its own part alone.
    Gradients of keys and values are added up in float32 (float64).
    """

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, exchange: Exchange
    ) -> torch.Tensor:
        merger = Merger(query, value.shape[-1])
        for sources, parts in exchange.way(exchange, key, value).arrivals():
            for piece in exchange.pieces(sources, query.shape[2]):
                merger.add(piece.queries, attend(query[:, :, piece.queries], *piece.join(parts), piece.block))
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
        of = Attended(query, key, value, out, lse, gradient.contiguous())
        d_query = torch.zeros_like(query, dtype=accumulator(query.dtype))
        travel = exchange.way(exchange, key, value)
        for sources, parts in travel.arrivals():
            pieces = exchange.pieces(sources, query.shape[2])
            found = [attend_backward(of.part(piece.queries, *piece.join(parts)), piece.block) for piece in pieces]
            for piece, (d_part, *_) in zip(pieces, found, strict=True):
                d_query[:, :, piece.queries] += d_part
            travel.add(pieces, found)
        d_key, d_value = travel.total()
        return d_query.to(query.dtype), d_key.to(key.dtype), d_value.to(value.dtype), None
