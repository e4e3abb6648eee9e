# SPDX-License-Identifier: Apache-2.0
"""A pipeline's schedule cannot run on fake tensors: its stages vote on a value first, although shapes were given."""

# torch: >=2.12,<2.14.1
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.testing._internal.distributed.fake_pg import FakeStore

dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
shape = torch.empty(1, 4, device="meta", requires_grad=True)
with FakeTensorMode(allow_non_fake_inputs=True):
    layer = torch.nn.Linear(4, 4)
    stage = PipelineStage(
        layer, 0, 2, torch.device("cpu"), input_args=(shape,), output_args=(shape,)
    )
    try:
        Schedule1F1B(stage, n_microbatches=2, loss_fn=torch.sum).step(torch.ones(2, 4))
    except Exception as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from None
