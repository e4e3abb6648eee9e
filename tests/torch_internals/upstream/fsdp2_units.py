# SPDX-License-Identifier: Apache-2.0
"""Gradients that FSDP2 has accumulated without a reduction are in no public attribute: a checkpoint loses them."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = fully_shard(nn.Linear(2, 1), mesh=init_device_mesh("cpu", (1,)))
model.set_requires_gradient_sync(False)
model(torch.ones(1, 2)).sum().backward()
public = [name for name in dir(model) if "accumulated" in name and not name.startswith("_")]
if all(parameter.grad is None for parameter in model.parameters()) and not public:
    raise SystemExit("after a backward without a reduction no parameter has a gradient")
