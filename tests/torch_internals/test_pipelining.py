# SPDX-License-Identifier: Apache-2.0
"""A schedule of torch on stages that exchange nothing."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from accelerate.core.imports import is_torch_version
from accelerate.torch_internals.pipelining import reshard_late, static_shapes


@pytest.mark.skipif(
    is_torch_version("<", "2.12") or is_torch_version(">=", "2.14.1"), reason="stages do not vote"
)
def test_stages_of_a_trace_do_not_vote() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B
    from torch.testing._internal.distributed.fake_pg import FakeStore

    # One process is the first of two stages.
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    shape = torch.empty(1, 4, device="meta", requires_grad=True)
    try:
        with static_shapes(), FakeTensorMode(allow_non_fake_inputs=True):
            layer, device = torch.nn.Linear(4, 4), torch.device("cpu")
            stage = PipelineStage(layer, 0, 2, device, input_args=(shape,), output_args=(shape,))
            schedule = Schedule1F1B(stage, n_microbatches=2, loss_fn=torch.sum)
            schedule.step(torch.ones(2, 4))
    finally:
        dist.destroy_process_group()


def test_a_stage_stays_unsharded() -> None:
    """The schedule only forgets, in place of resharding, that the stage is unsharded."""
    from torch.distributed.pipelining import schedules

    functions = {}
    schedule = SimpleNamespace(
        unsharded_stages={0, 2}, register_custom_function=functions.__setitem__
    )
    reshard_late(schedule)
    function = functions[schedules.RESHARD]
    function(SimpleNamespace(stage_index=2), SimpleNamespace(schedule_ref=schedule))
    assert schedule.unsharded_stages == {0}
