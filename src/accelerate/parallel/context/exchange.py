# SPDX-License-Identifier: Apache-2.0
"""Exact attention of a rank's rows to the keys of all ranks, exchanged in an all-gather or round a ring."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch.autograd.function import FunctionCtx, once_differentiable

from ...collectives import transport
from .blocks import Attended, Block, Gradients, Merger, accumulator, attend, attend_backward
from .masks import SEES_ALL, Visibility
from .shard import SequenceLayout

# The name since torch 2.13; torch 2.11 and 2.12 have the older one.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

ALL = slice(None)

# Keys and values of one rank, (batch, heads, rows, width) each.
KeyValue = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Tile:
    """Some of this rank's queries, and keys that all of them see in the same way: (rank, which of its keys)."""

    queries: slice
    keys: tuple[tuple[int, slice], ...]
    block: Block

    def join(self, shards: Mapping[int, KeyValue]) -> KeyValue:
        """Concatenate the keys and values of this tile, given those of each rank."""
        found = [tuple(part[:, :, keys] for part in shards[source]) for source, keys in self.keys]
        key, value = found[0] if len(found) == 1 else (torch.cat(part, dim=2) for part in zip(*found, strict=True))
        return key, value


@dataclass(frozen=True)
class Exchange:
    """One attention: the group, how keys are exchanged, and which keys a query sees.

    `keep` (ranks, batch, rows): which keys of each rank are not padding; None for all.
    """

    method: type[KeyValueExchange]
    group: dist.ProcessGroup
    layout: SequenceLayout
    block: Block
    keep: torch.Tensor | None = None
    visibility: Visibility = SEES_ALL

    def groups(self) -> list[Sequence[int]]:
        """Groups of ranks whose keys the same queries see in the same way: this rank, earlier ones, later ones."""
        ranks, rank = self.layout.ranks, self.layout.rank
        if not self.block.causal:
            return [range(ranks)]
        return [group for group in ([rank], range(rank), range(rank + 1, ranks)) if group]

    def pieces(self, sources: Sequence[int], rows: int) -> list[Tile]:
        """What this rank's queries see of the keys of one of the `groups`, or of one rank; empty where nothing."""
        if self.visibility.mask is not None:
            return list(self._masked(sources, rows))
        queries, keys, block = self._visible(sources[0], rows)
        return [Tile(queries, pairs := tuple((s, keys) for s in sources), self._kept(block, pairs))]

    def _visible(self, source: int, rows: int) -> tuple[slice, slice, Block]:
        """Which of this rank's queries see which of `source`'s keys: (queries, keys, block).

        A rank has a chunk from the first and one from the second half of the sequence. Under a causal mask, all
        queries see the first chunk of an earlier rank and none sees its second; only the queries of this rank's second
        chunk see the keys of a later rank.
        """
        if not self.block.causal or source == self.layout.rank:
            return ALL, ALL, self.block
        block = replace(self.block, causal=False)
        if source < self.layout.rank:
            return ALL, slice(0, rows // 2), block
        return slice(rows // 2, rows), ALL, block

    def _masked(self, sources: Sequence[int], rows: int) -> Iterator[Tile]:
        """Tiles of a mask: first keys that are seen completely, then keys that it shows partly."""
        half = rows // 2
        slices = (slice(0, half), slice(half, rows))
        keys = [(source, place, chunk) for source in sources for place, chunk in enumerate(self.layout.chunks(source))]
        for completely in (True, False):
            seen = [tuple(key for key in keys if views[key[2]] is completely) for views in self.visibility.chunks]
            if seen[0] == seen[1]:
                seen = [seen[0]]
            for queries, found in zip((ALL,) if len(seen) == 1 else slices, seen, strict=True):
                if not found:
                    continue
                pairs = _joined([(source, slices[place]) for source, place, _ in found])
                block = replace(self._kept(self.block, pairs), shift=self.visibility.shift_of(queries))
                if not completely:
                    block = replace(block, mask=self.visibility.part(queries, [chunk for *_, chunk in found], half))
                yield Tile(queries, pairs, block)

    def _kept(self, block: Block, pairs: tuple[tuple[int, slice], ...]) -> Block:
        if self.keep is None:
            return block
        return replace(block, keep=torch.cat([self.keep[source][:, keys] for source, keys in pairs], dim=1))


def _joined(pairs: list[tuple[int, slice]]) -> tuple[tuple[int, slice], ...]:
    """Merge the two chunks of a rank."""
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


def unpack(message: torch.Tensor, like: KeyValue) -> KeyValue:
    """Keys and values out of a message, in the shapes of `like` (views)."""
    first, second = message.split([part.numel() for part in like])
    return first.view(like[0].shape), second.view(like[1].shape)


class KeyValueExchange:
    """Sends keys and values to all ranks, and their gradients back."""

    def __init__(self, exchange: Exchange, key: torch.Tensor, value: torch.Tensor) -> None:
        self.exchange = exchange
        self.own: tuple[torch.Tensor, torch.Tensor] = (key, value)
        self.dtype: torch.dtype = accumulator(key.dtype)

    def arrivals(self) -> Iterator[tuple[Sequence[int], Mapping[int, KeyValue]]]:
        """Yield (ranks whose keys are attended to together, keys and values by rank), for all ranks."""
        raise NotImplementedError

    def sums(self, source: int) -> KeyValue:
        """Views in which the gradients of a rank's keys and values are accumulated."""
        raise NotImplementedError

    def total(self) -> KeyValue:
        """The gradients of this rank's keys and values, summed over all ranks."""
        raise NotImplementedError

    def add(self, pieces: Sequence[Tile], found: Sequence[Gradients]) -> None:
        """Accumulate the gradients of what arrived last."""
        for piece, (_, d_key, d_value) in zip(pieces, found, strict=True):
            lengths = [self.own[0][:, :, keys].shape[2] for _, keys in piece.keys]
            split = zip(d_key.split(lengths, dim=2), d_value.split(lengths, dim=2), strict=True)
            for (source, keys), shards in zip(piece.keys, split, strict=True):
                for total, part in zip(self.sums(source), shards, strict=True):
                    total[:, :, keys] += part


class Gather(KeyValueExchange):
    """One all-gather of keys and values, attention in few large blocks, one reduce-scatter of the gradients."""

    _sums: torch.Tensor | None = None

    def arrivals(self) -> Iterator[tuple[Sequence[int], Mapping[int, KeyValue]]]:
        """Gather the keys of all ranks once, then yield them in groups."""
        everyone = transport.all_gather(pack(*self.own), self.exchange.group)
        shards = {source: unpack(message, self.own) for source, message in enumerate(everyone.unbind())}
        for sources in self.exchange.groups():
            yield sources, shards

    def sums(self, source: int) -> KeyValue:
        """Return the sum of the gradients for the keys of `source`."""
        assert self._sums is not None
        return unpack(self._sums[source], self.own)

    def add(self, pieces: Sequence[Tile], found: Sequence[Gradients]) -> None:
        """Add gradients of keys and values."""
        if self._sums is None:
            numbers = sum(part.numel() for part in self.own)
            ranks = self.exchange.layout.ranks
            self._sums = torch.zeros((ranks, numbers), dtype=self.dtype, device=self.own[0].device)
        super().add(pieces, found)

    def total(self) -> KeyValue:
        """Sum the gradients over the ranks, and return those of this rank's keys and values."""
        assert self._sums is not None
        mine = torch.empty_like(self._sums[0])
        _reduce_scatter(mine, self._sums.flatten(), group=self.exchange.group)
        return unpack(mine, self.own)


class _RingMessage:
    """Sends a tensor to the next rank and receives that of the previous one."""

    def __init__(self, exchange: Exchange, outgoing: torch.Tensor) -> None:
        group, layout = exchange.group, exchange.layout
        # Both must stay alive until `wait`.
        self.outgoing = outgoing.contiguous()
        self.incoming = torch.empty_like(self.outgoing)
        after, before = (layout.rank + 1) % layout.ranks, (layout.rank - 1) % layout.ranks
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


class Ring(KeyValueExchange):
    """Source: H. Liu, M. Zaharia, P. Abbeel, "Ring Attention with Blockwise Transformers" (2023).

    Forward: ranks - 1 messages of keys and values. Backward: the same again, and `ranks` messages of their gradients,
    which travel with them.
    """

    _sum: torch.Tensor
    _homing: _RingMessage | None = None

    def arrivals(self) -> Iterator[tuple[Sequence[int], Mapping[int, KeyValue]]]:
        """Yield the keys of one rank after another, while those of the next one are received."""
        ranks, message = self.exchange.layout.ranks, pack(*self.own)
        for step in range(ranks):
            moving = _RingMessage(self.exchange, message) if step < ranks - 1 else None
            source = (self.exchange.layout.rank - step) % ranks
            yield [source], {source: unpack(message, self.own)}
            if moving is not None:
                message = moving.wait()

    def sums(self, source: int) -> KeyValue:
        """Return the sum of the gradients for the keys that are present."""
        return unpack(self._sum, self.own)

    def add(self, pieces: Sequence[Tile], found: Sequence[Gradients]) -> None:
        """Add gradients of keys and values to the sum of the previous rank, and send it on."""
        # The sum for these keys arrives from the previous rank, and leaves with this rank's gradients added.
        if self._homing is None:
            numbers = sum(part.numel() for part in self.own)
            self._sum = torch.zeros(numbers, dtype=self.dtype, device=self.own[0].device)
        else:
            self._sum = self._homing.wait()
        super().add(pieces, found)
        self._homing = _RingMessage(self.exchange, self._sum)

    def total(self) -> KeyValue:
        """Return the gradients of this rank's keys and values, which have passed all ranks."""
        assert self._homing is not None
        return unpack(self._homing.wait(), self.own)


class _OfExchange(FunctionCtx):
    exchange: Exchange
    saved_tensors: tuple[torch.Tensor, ...]


class ExchangedAttention(torch.autograd.Function):
    """Exact attention over all ranks' keys. `apply(query, key, value, exchange)`, all (batch, heads, rows, width).

    The backward exchanges keys and values again: between forward and backward a rank keeps only its own.
    Gradients of keys and values are accumulated in float32 (float64).
    """

    @staticmethod
    def forward(
        ctx: _OfExchange, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, exchange: Exchange
    ) -> torch.Tensor:
        """Compute the attention of this rank's queries to all keys."""
        merger = Merger(query, value.shape[-1])
        for sources, shards in exchange.method(exchange, key, value).arrivals():
            for piece in exchange.pieces(sources, query.shape[2]):
                merger.add(piece.queries, attend(query[:, :, piece.queries], *piece.join(shards), piece.block))
        out, lse = merger.result()
        # One tensor more than torch's attention saves. A checkpointed layer that is recomputed outside of the block
        # would attend to its own rows only; torch notices by the number of saved tensors.
        ctx.save_for_backward(query, key, value, out, lse, lse.new_empty(0))
        ctx.exchange = exchange
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: _OfExchange, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Compute the gradients of query, key and value."""
        query, key, value, out, lse, _ = ctx.saved_tensors
        exchange = ctx.exchange
        of = Attended(query, key, value, out, lse, gradient.contiguous())
        d_query = torch.zeros_like(query, dtype=accumulator(query.dtype))
        travel = exchange.method(exchange, key, value)
        for sources, shards in travel.arrivals():
            pieces = exchange.pieces(sources, query.shape[2])
            found = [attend_backward(of.part(piece.queries, *piece.join(shards)), piece.block) for piece in pieces]
            for piece, (d_part, *_) in zip(pieces, found, strict=True):
                d_query[:, :, piece.queries] += d_part
            travel.add(pieces, found)
        d_key, d_value = travel.total()
        return d_query.to(query.dtype), d_key.to(key.dtype), d_value.to(value.dtype), None
