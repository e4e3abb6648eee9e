# SPDX-License-Identifier: Apache-2.0
"""FSDP1 cannot save the state of an optimizer that has none of some parameters of a unit, as of an unused one."""

import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel

warnings.simplefilter("ignore")
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
sharded = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
optimizer = torch.optim.Adam(sharded.parameters())
used = next(sharded.parameters())
used.grad = torch.ones_like(used)
optimizer.step()
try:
    get_optimizer_state_dict(sharded, optimizer, options=StateDictOptions(full_state_dict=True))
except RuntimeError as error:
    raise SystemExit(str(error)) from None
