# SPDX-License-Identifier: Apache-2.0
"""Styles of tensor parallelism."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from accelerate.torch_internals.parallel_styles import SplitStyle


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_a_style_splits_its_module(mesh: DeviceMesh) -> None:
    class Replaced(SplitStyle):
        def split(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
            return nn.Sequential(module)

    layer = nn.Linear(2, 2)
    assert parallelize_module(layer, mesh, SplitStyle()) is layer
    replaced = parallelize_module(layer, mesh, Replaced())
    assert isinstance(replaced, nn.Sequential) and replaced[0] is layer
