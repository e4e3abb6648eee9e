# SPDX-License-Identifier: Apache-2.0
"""Random numbers of a stage come from a stream of its own.

All ranks of a pipeline read the same samples: the generators that samplers draw from must stay equal although one
stage draws more than another.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

_MIX = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0xD6E8FEB86659FD93)


class StageRandom:
    """The stream of one stage: a seed for each call from the run's seed, the model, the stage and the data shard.

    `calls` is how often the model was called for training. The caller counts.
    """

    def __init__(self, device: torch.device, model: int, stage: int, shard: int) -> None:
        self.device = device
        self.offset: int = model * _MIX[3] + stage * _MIX[1] + shard * _MIX[2]
        self.calls = 0

    @contextlib.contextmanager
    def seeded(self) -> Iterator[None]:
        """A block that draws from the stream of this call."""
        generator = torch.default_generator
        before = generator.get_state()
        seed = (generator.initial_seed() + self.offset + self.calls * _MIX[0]) % (1 << 63)
        generator.manual_seed(seed)
        module = torch.get_device_module(self.device) if self.device.type != "cpu" else None
        device_state = module.get_rng_state(self.device) if module is not None else None
        if module is not None:
            module.manual_seed(seed)
        try:
            yield
        finally:
            generator.set_state(before)
            if module is not None:
                module.set_rng_state(device_state, self.device)
