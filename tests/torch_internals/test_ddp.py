# SPDX-License-Identifier: Apache-2.0
"""When DistributedDataParallel reduces."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from accelerate.torch_internals import ddp


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_a_backward_is_reduced_after_a_forward_under_no_sync() -> None:
    replica = DistributedDataParallel(nn.Linear(2, 2))
    messages = []

    def count(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        messages.append(bucket.index())
        return allreduce_hook(None, bucket)

    count.__annotations__ = allreduce_hook.__annotations__ | {"bucket": dist.GradBucket}
    count.__annotations__["return"] = torch.futures.Future[torch.Tensor]
    replica.register_comm_hook(None, count)
    with replica.no_sync():
        assert not ddp.reduces(replica)
        loss = replica(torch.ones(1, 2)).sum()
        with ddp.reducing(replica):
            assert ddp.reduces(replica)
            loss.backward()
    assert messages and ddp.reduces(replica)
