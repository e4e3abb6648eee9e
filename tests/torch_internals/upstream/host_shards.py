# SPDX-License-Identifier: Apache-2.0
"""DTensor.from_local moves a local tensor to the mesh's device: a shard that is offloaded cannot be a DTensor."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
# On a machine without an accelerator "meta" stands for its device.
mesh = init_device_mesh("meta", (1,))
local = torch.ones(4, 2)
sharded = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
if sharded.to_local().device != local.device:
    raise SystemExit(
        f"the local tensor is on {local.device}, that of the DTensor on {sharded.to_local().device}"
    )
