# SPDX-License-Identifier: Apache-2.0
"""Ring attention: keys and values go round the ranks, point to point, while each computes on those that it has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist

from .blocks import Gradients
from .exchange import Exchange, Pair, Piece, Travel, pack, unpack


class _RingStep:
    """One tensor on its way to the next rank, while the previous rank's comes in."""

    def __init__(self, exchange: Exchange, outgoing: torch.Tensor) -> None:
        group, layout = exchange.group, exchange.layout
        # Both stay alive until `wait`: the transport reads and writes them meanwhile.
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


class Ring(Travel):
    """Source: H. Liu, M. Zaharia, P. Abbeel, "Ring Attention with Blockwise Transformers" (2023).

    Forward: ranks - 1 messages of keys and values. Backward: the same again, and `ranks` messages of their gradients,
    which go round with them.
    """

    _sum: torch.Tensor
    _homing: _RingStep | None = None

    def arrivals(self) -> Iterator[tuple[Sequence[int], Mapping[int, Pair]]]:
        ranks, message = self.exchange.layout.ranks, pack(*self.own)
        for step in range(ranks):
            moving = _RingStep(self.exchange, message) if step < ranks - 1 else None
            source = (self.exchange.layout.rank - step) % ranks
            yield [source], {source: unpack(message, self.own)}
            if moving is not None:
                message = moving.wait()

    def sums(self, source: int) -> Pair:
        return unpack(self._sum, self.own)

    def add(self, pieces: Sequence[Piece], found: Sequence[Gradients]) -> None:
        # The sum for these keys comes from the rank that had them before, and goes on with this rank's part.
        if self._homing is None:
            numbers = sum(part.numel() for part in self.own)
            self._sum = torch.zeros(numbers, dtype=self.dtype, device=self.own[0].device)
        else:
            self._sum = self._homing.wait()
        super().add(pieces, found)
        self._homing = _RingStep(self.exchange, self._sum)

    def total(self) -> Pair:
        assert self._homing is not None
        return unpack(self._homing.wait(), self.own)
