# SPDX-License-Identifier: Apache-2.0
"""All-gather attention: one message brings all ranks' keys and values, one takes their gradients back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ...collectives import transport
from .blocks import Gradients
from .exchange import Pair, Piece, Travel, pack, unpack

# The name since torch 2.13; torch 2.11 and 2.12 have the older one.
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Gather(Travel):
    """All keys at once, computed on in few large blocks; their gradients are added up by one reduce-scatter."""

    _sums: torch.Tensor | None = None

    def arrivals(self) -> Iterator[tuple[Sequence[int], Mapping[int, Pair]]]:
        everyone = transport.all_gather(pack(*self.own), self.exchange.group)
        parts = {source: unpack(message, self.own) for source, message in enumerate(everyone.unbind())}
        for sources in self.exchange.groups():
            yield sources, parts

    def sums(self, source: int) -> Pair:
        assert self._sums is not None
        return unpack(self._sums[source], self.own)

    def add(self, pieces: Sequence[Piece], found: Sequence[Gradients]) -> None:
        if self._sums is None:
            numbers = sum(part.numel() for part in self.own)
            ranks = self.exchange.layout.ranks
            self._sums = torch.zeros((ranks, numbers), dtype=self.dtype, device=self.own[0].device)
        super().add(pieces, found)

    def total(self) -> Pair:
        assert self._sums is not None
        mine = torch.empty_like(self._sums[0])
        _reduce_scatter(mine, self._sums.flatten(), group=self.exchange.group)
        return unpack(mine, self.own)
