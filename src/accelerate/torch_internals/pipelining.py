# SPDX-License-Identifier: Apache-2.0
"""Schedules of torch's pipelines: on tensors without values, and with stages that FSDP2 shards."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any
from unittest import mock

from ..core.imports import is_torch_version
from . import Internal

STATIC_SHAPES = Internal(
    name="pipeline_static_shapes",
    what="torch.distributed.pipelining: _PipelineSchedule._warmup_p2p and PipelineStage._inference_mode",
    versions="2.12 to 2.14.0; earlier versions do not vote, later ones not in a trace",
    upstream="not reported",
    needed_by="accelerate plan: the estimates of pipelines with schedules other than gpipe",
    without="these layouts have no estimate: before the first batch torch's stages vote, by the value of a tensor, on "
    "whether all of them know their shapes, and a trace has no values",
    test="tests/torch_internals/test_pipelining.py::test_stages_of_a_trace_do_not_vote",
)


@contextlib.contextmanager
def static_shapes() -> Iterator[None]:
    """A block in which all stages take the shapes that they were given."""
    if not STATIC_SHAPES.is_on or is_torch_version("<", "2.12") or is_torch_version(">=", "2.14.1"):
        yield
        return
    # It takes long to import.
    from torch.distributed.pipelining import schedules, stage

    def without_vote(self: Any, stages: Iterable[Any], *_: Any) -> None:
        for each in stages:
            each._inference_mode = stage.InferenceMode.STATIC

    with mock.patch.object(schedules._PipelineSchedule, "_warmup_p2p", without_vote):
        yield


LATE_RESHARD = Internal(
    name="pipeline_late_reshard",
    what="schedule_ref.unsharded_stages, which the context of a schedule's custom function has",
    versions="2.11 to 2.14",
    upstream="not reported",
    needed_by="interleaved pipelines whose stages FSDP2 shards",
    without="a rank reshards each stage before the backward of the next one, and gathers it again",
    test="tests/torch_internals/test_pipelining.py::test_a_stage_stays_unsharded",
)


def reshard_late(schedule: Any) -> None:
    """Have a schedule of several stages on a rank keep them unsharded for the whole batch.

    Its caller reshards them.
    """
    if not LATE_RESHARD.is_on:
        return
    from torch.distributed.pipelining import schedules

    def forget(action: Any, context: Any) -> None:
        context.schedule_ref.unsharded_stages.discard(action.stage_index)

    schedule.register_custom_function(schedules.RESHARD, forget)
