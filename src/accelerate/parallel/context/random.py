# SPDX-License-Identifier: Apache-2.0
"""Random numbers of a part of a sequence: dropout differs along it, while everything else draws alike on its ranks."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator

import torch

from ...core import devices


class PartRandom:
    """Streams that follow from the generators' states and the rank in the sequence; nothing has to be saved of them.

    Afterwards the generators are where they were; a number further where something was drawn, alike on all ranks, so
    that the next streams are others.
    """

    def __init__(self, rank: int, device_type: str) -> None:
        self.place = rank.to_bytes(8, "little")
        self.kinds = ("cpu",) if device_type == "cpu" else ("cpu", device_type)

    @contextlib.contextmanager
    def own(self) -> Iterator[None]:
        """A block that draws from this part's streams."""
        sources = [(kind, torch if kind == "cpu" else devices.module_of(kind)) for kind in self.kinds]
        before = [source.get_rng_state() for _, source in sources]
        begun = []
        for (kind, source), state in zip(sources, before, strict=True):
            # For one device at a time: torch.manual_seed seeds them all.
            seeder = torch.default_generator if kind == "cpu" else source
            seeder.manual_seed(self._seed(state))
            begun.append(source.get_rng_state())
        try:
            yield
        finally:
            for (kind, source), state, first in zip(sources, before, begun, strict=True):
                drawn = not torch.equal(source.get_rng_state(), first)
                source.set_rng_state(state)
                if drawn:
                    _go_on(kind)

    def _seed(self, state: torch.Tensor) -> int:
        digest = hashlib.blake2b(state.numpy().tobytes(), digest_size=8, salt=self.place)
        return int.from_bytes(digest.digest(), "little") >> 1


def _go_on(kind: str) -> None:
    torch.empty((), device=kind).uniform_()
