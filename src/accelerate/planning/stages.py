# SPDX-License-Identifier: Apache-2.0
"""The messages of a traced stage of a pipeline: tensors are not sent, and objects pass through a file.

Each stage is traced in its own process, with the pipeline's own code.
"""

from __future__ import annotations

import copy
import pickle
from collections import Counter
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn

from ..parallel.base import Strategy
from ..parallel.pipeline.microbatch import disable_caches
from ..parallel.pipeline.p2p import P2PChannel
from ..parallel.pipeline.split import computing_units, observe_dummies
from ..parallel.pipeline.strategy import PipelineParallel

T = TypeVar("T")

# A stage waits so long for another one to be prepared or to compute on fake tensors (seconds).
_LIMIT = 600


class TracedChannel(P2PChannel):
    """The channel of a pipeline whose stages exchange objects only. There is one process for each stage.

    Args:
        channel: the one that it replaces.
        path: a file that all stages have.
    """

    has_values = False

    def __init__(self, channel: P2PChannel, path: str) -> None:
        super().__init__(channel.group, channel.device)
        self._store = dist.FileStore(path, -1)
        self._store.set_timeout(timedelta(seconds=_LIMIT))
        self._counts: Counter[str] = Counter()

    def _key(self, name: str) -> str:
        self._counts[name] += 1
        return f"{name}/{self._counts[name]}"

    def _set(self, key: str, value: object) -> None:
        # As text: a store takes it on any torch version.
        self._store.set(key, pickle.dumps(value).hex())

    def _get(self, key: str) -> Any:
        return pickle.loads(bytes.fromhex(self._store.get(key).decode()))

    def send_object(self, value: object, to: int) -> None:
        """Send an object to a rank."""
        if to == self.rank:
            super().send_object(value, to)
            return
        self._set(self._key(f"{self.rank}-{to}"), value)

    def receive_object(self, sender: int) -> Any:
        """Return the next object of a rank."""
        if sender == self.rank:
            return super().receive_object(sender)
        return self._get(self._key(f"{sender}-{self.rank}"))

    def broadcast_object(self, value: object, source: int) -> Any:
        """Return the object of the stage `source`, on all stages."""
        key = self._key("broadcast")
        if self.rank == source:
            self._set(key, value)
            return value
        return self._get(key)

    def from_first(self, value: T) -> T:
        """Return the object of the first stage, on all stages."""
        result: T = self.broadcast_object(value, 0)
        return result

    def from_all(self, value: T) -> list[T]:
        """Return the object of each stage."""
        key = self._key("gather")
        self._set(f"{key}/{self.rank}", value)
        return [self._get(f"{key}/{stage}") for stage in range(self.size)]


def trace_as_stage(strategy: Strategy, model: nn.Module, path: str) -> None:
    """Have a strategy prepare a model, which is on the meta device, as a stage that exchanges objects only.

    Args:
        strategy: the pipeline of this process.
        model: the one that is prepared as a copy of fake tensors.
        path: a file that all stages have.
    """
    assert isinstance(strategy, PipelineParallel)
    strategy.channel = TracedChannel(strategy.channel, path)
    if hasattr(model, "dummy_inputs"):
        # The order of calls is observed here, because fake tensors of two modes cannot meet.
        plain = copy.deepcopy(model)
        disable_caches(plain)
        strategy.observed = observe_dummies(plain, [unit.name for unit in computing_units(plain)])
