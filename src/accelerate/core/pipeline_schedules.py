# SPDX-License-Identifier: Apache-2.0
"""The schedules of pipeline parallelism, one row each. No torch: the launcher reads their names."""

from __future__ import annotations

from typing import NamedTuple


class PipelineSchedule(NamedTuple):
    """One schedule of pipeline parallelism.

    Fields:
        implementation: the schedule class, as "module:class". None: GPipe's order, which `parallel.pipeline` runs
            itself, with any loss.
        stages_per_rank: how many stages each rank must have; None: any number, two by default.
        v_shaped: the last stages run back from the last rank to the first; otherwise ranks take stages in turns.
        splits_backward: computes the gradients of inputs and of weights separately.
        minimum_torch: the oldest torch version whose class computes correct gradients.
    """

    implementation: str | None
    stages_per_rank: int | None = None
    v_shaped: bool = False
    splits_backward: bool = False
    minimum_torch: str = "2.11"


# Before 2.13, torch's schedules that split the backward compute wrong gradients where weights meet the inputs in
# several places (an LSTM).
_TORCH = "torch.distributed.pipelining.schedules"
PIPELINE_SCHEDULES = {
    "gpipe": PipelineSchedule(None, stages_per_rank=1),
    "1f1b": PipelineSchedule(f"{_TORCH}:Schedule1F1B", stages_per_rank=1),
    "looped_bfs": PipelineSchedule(f"{_TORCH}:ScheduleLoopedBFS"),
    "interleaved": PipelineSchedule(f"{_TORCH}:ScheduleInterleaved1F1B"),
    "zero_bubble": PipelineSchedule(
        f"{_TORCH}:ScheduleInterleavedZeroBubble", splits_backward=True, minimum_torch="2.13"
    ),
    "zbv": PipelineSchedule(
        f"{_TORCH}:ScheduleZBVZeroBubble",
        stages_per_rank=2,
        v_shaped=True,
        splits_backward=True,
        minimum_torch="2.13",
    ),
}
