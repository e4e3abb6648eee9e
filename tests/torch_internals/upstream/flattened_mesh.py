# SPDX-License-Identifier: Apache-2.0
"""Two dimensions of a device mesh cannot be made one with public names, as FSDP over both needs it."""

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "cp"))
assert mesh._flatten("dp_cp").ndim == 1
if not hasattr(mesh, "flatten"):
    raise SystemExit("DeviceMesh has _flatten, and no public method that does the same")
