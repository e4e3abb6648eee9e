# SPDX-License-Identifier: Apache-2.0
"""The gradient scaler fails for an optimizer of plain tensors and DTensors."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
plain = torch.nn.Parameter(torch.ones(2))
sharded = torch.nn.Parameter(distribute_tensor(torch.ones(2), mesh, [Shard(0)]))
optimizer = torch.optim.SGD([plain, sharded], lr=1.0)
scaler = torch.amp.GradScaler("cpu")
scaler.scale(plain.sum() + sharded.sum().full_tensor()).backward()
try:
    scaler.unscale_(optimizer)
except RuntimeError as error:
    raise SystemExit(f"RuntimeError: {error}") from None
finally:
    dist.destroy_process_group()
