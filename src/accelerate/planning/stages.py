# SPDX-License-Identifier: Apache-2.0
"""What a traced stage of a pipeline needs besides fake tensors: the objects that stages send, and values.

Each stage is traced in its own process, with the pipeline's own code. Tensors are not sent. The descriptions of
what passes between stages are, through a file. Where a pipeline looks at values, a trace takes the common answer: all
ranks have the same inputs.
"""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections import Counter
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..parallel import materialize
from ..parallel.pipeline import microbatch, schedules, stage_plan
from ..parallel.pipeline.model import StageRandom, TiedParameters
from ..parallel.pipeline.p2p import P2PChannel
from ..parallel.pipeline.remote_tensor import RemoteTensor
from ..parallel.pipeline.split import computing_units
from ..torch_internals import pipelining

# A stage waits so long for another one to be prepared or to compute on fake tensors (seconds).
_LIMIT = 600


class StageObjects:
    """Objects that the traced stages of one pipeline send each other through a file.

    Args:
        path: of a file that all stages have.
        stage: of this process.
        stages: their number.
    """

    def __init__(self, path: str, stage: int, stages: int) -> None:
        self._store = dist.FileStore(path, -1)
        self._store.set_timeout(timedelta(seconds=_LIMIT))
        self._stage, self._stages = stage, stages
        self._counts: Counter[str] = Counter()

    def _key(self, name: str) -> str:
        self._counts[name] += 1
        return f"{name}/{self._counts[name]}"

    def _set(self, key: str, value: object) -> None:
        # As text: a store takes it on any torch version.
        self._store.set(key, pickle.dumps(value).hex())

    def _get(self, key: str) -> Any:
        return pickle.loads(bytes.fromhex(self._store.get(key).decode()))

    def send(self, value: object, to: int) -> None:
        """Send an object to a stage."""
        self._set(self._key(f"{self._stage}-{to}"), value)

    def receive(self, sender: int) -> Any:
        """Receive the next object of a stage."""
        return self._get(self._key(f"{sender}-{self._stage}"))

    def broadcast(self, value: object, source: int) -> Any:
        """The object of the stage `source`, on all stages."""
        key = self._key("broadcast")
        if self._stage == source:
            self._set(key, value)
            return value
        return self._get(key)

    def gather(self, value: object) -> list[Any]:
        """The objects of all stages."""
        key = self._key("gather")
        self._set(f"{key}/{self._stage}", value)
        return [self._get(f"{key}/{stage}") for stage in range(self._stages)]


def prepare_stage(objects: StageObjects, model: nn.Module, scheduled: bool) -> None:
    """Have this process, a stage of a traced pipeline, send objects only, and answer what depends on values.

    It cannot be undone. `model` is on the meta device. `scheduled`: one of torch's schedules runs its batches.
    """

    def broadcast_list(values: list[Any], src: int = 0, **_: Any) -> None:
        values[:] = objects.broadcast(values, src)

    def gather(found: list[Any], value: object, **_: Any) -> None:
        found[:] = objects.gather(value)

    flow = _observed(model)
    replaced: Any
    for owner, name, replaced in (
        (dist, "broadcast_object_list", broadcast_list),
        (dist, "all_gather_object", gather),
        (P2PChannel, "send_object", lambda _, value, to: objects.send(value, to)),
        (P2PChannel, "receive_object", lambda _, sender: objects.receive(sender)),
        (P2PChannel, "broadcast_object", lambda _, value, source: objects.broadcast(value, source)),
        # The order of calls was observed on the model itself: fake tensors of two modes cannot meet.
        (stage_plan, "observe_dummies", lambda *_: flow),
        # A fake tensor cannot be of another class, and has no values anyway.
        (
            RemoteTensor,
            "of",
            staticmethod(
                lambda shape, dtype, device, _: torch.zeros((), dtype=dtype).expand(shape)
            ),
        ),
        # Values.
        (materialize, "gather_flags", lambda flag, *_: [flag]),
        (microbatch.MicroBatches, "digest", lambda _: ""),
        (schedules, "multiply", lambda *_: None),
        (TiedParameters, "_any_used", lambda *_: True),
        (StageRandom, "seeded", lambda _: contextlib.nullcontext()),
    ):
        setattr(owner, name, replaced)
    if scheduled:
        pipelining.skip_vote()


def _observed(model: nn.Module) -> Any:
    if not hasattr(model, "dummy_inputs"):
        return None
    model = copy.deepcopy(model)
    microbatch.disable_caches(model)
    return stage_plan.observe_dummies(model, [unit.name for unit in computing_units(model)])
