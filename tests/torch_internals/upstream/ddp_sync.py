# SPDX-License-Identifier: Apache-2.0
"""The backward of a forward under no_sync cannot be reduced by a public method, as FSDP2 has one."""

import torch.distributed as dist
from torch import nn, ones
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
replica = DistributedDataParallel(nn.Linear(1, 1))
with replica.no_sync():
    loss = replica(ones(1, 1)).sum()
loss.backward()
has_method = hasattr(replica, "set_requires_gradient_sync")
dist.destroy_process_group()
if not has_method:
    raise SystemExit("no_sync is decided in the forward, and no method synchronizes later")
