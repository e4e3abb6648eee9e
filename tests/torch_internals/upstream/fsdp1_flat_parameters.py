# SPDX-License-Identifier: Apache-2.0
"""The names of the parameters that FSDP1 has flattened cannot be asked for with public names."""

import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

warnings.simplefilter("ignore")
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = FullyShardedDataParallel(nn.Linear(2, 3), device_id=torch.device("cpu"))
names = [name for name, _ in model.named_parameters()]
public = [name for name in dir(next(model.parameters())) if "fqn" in name and name[0] != "_"]
if "weight" not in names and not public:
    raise SystemExit(f"weight and bias have become {names}, with no public attribute of the names")
