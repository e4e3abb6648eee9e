# SPDX-License-Identifier: Apache-2.0
"""Random numbers for a shard of a sequence: dropout differs along it, everything else draws the same on its ranks."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator

import torch

from ...core import devices


class ShardRandom:
    """Streams seeded from the generators' states and the rank in the sequence: a checkpoint needs none of them.

    Afterwards the generators are where they were. Where something was drawn they are one number further, equally on
    all ranks, so that the next streams differ.
    """

    def __init__(self, rank: int, device_type: str) -> None:
        self.place: bytes = rank.to_bytes(8, "little")
        self.kinds: tuple[str, ...] = ("cpu",) if device_type == "cpu" else ("cpu", device_type)

    @contextlib.contextmanager
    def seeded(self) -> Iterator[None]:
        """A block that draws from this shard's streams."""
        sources = [(kind, torch if kind == "cpu" else devices.module_of(kind)) for kind in self.kinds]
        before = [source.get_rng_state() for _, source in sources]
        begun = []
        for (kind, source), state in zip(sources, before, strict=True):
            # Of one device: torch.manual_seed seeds all of them.
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
                    torch.empty((), device=kind).uniform_()

    def _seed(self, state: torch.Tensor) -> int:
        digest = hashlib.blake2b(state.numpy().tobytes(), digest_size=8, salt=self.place)
        return int.from_bytes(digest.digest(), "little") >> 1
