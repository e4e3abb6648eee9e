# SPDX-License-Identifier: Apache-2.0
"""A schedule of torch on stages that exchange nothing."""

import subprocess
import sys

import pytest

from accelerate.core.imports import is_torch_version

# A process of its own, whose one rank is the first of two stages of a fake group.
TRACE = """
import torch, torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch._subclasses.fake_tensor import FakeTensorMode
from accelerate.torch_internals.pipelining import static_shapes
dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
with static_shapes(), FakeTensorMode(allow_non_fake_inputs=True):
    meta = torch.empty(1, 4, device="meta", requires_grad=True)
    stage = PipelineStage(torch.nn.Linear(4, 4), 0, 2, torch.device("cpu"), input_args=(meta,), output_args=(meta,))
    Schedule1F1B(stage, n_microbatches=2, loss_fn=torch.sum).step(torch.ones(2, 4))
"""


@pytest.mark.skipif(
    is_torch_version("<", "2.13") or is_torch_version(">=", "2.14.1"), reason="stages do not vote"
)
def test_stages_of_a_trace_do_not_vote():
    done = subprocess.run([sys.executable, "-c", TRACE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
