# SPDX-License-Identifier: Apache-2.0
"""Several dimensions of a mesh as one."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from accelerate.torch_internals import device_mesh


# torch would rather have the flattened mesh handed around; the API's users slice it from the root.
@pytest.mark.filterwarnings("ignore:Slicing a flattened dim")
def test_two_dimensions_as_one() -> None:
    dist.init_process_group("fake", rank=0, world_size=4)
    try:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "cp"))
        device_mesh.flatten(mesh["dp_shard", "cp"], "dp_shard_cp")
        assert mesh["dp_shard_cp"].size() == 4
    finally:
        dist.destroy_process_group()
