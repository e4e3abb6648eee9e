# SPDX-License-Identifier: Apache-2.0
"""A process group stays open after its end: default arguments of torch.distributed.nn.functional refer to it."""

import gc
import importlib
import sys
import weakref

import torch.distributed as dist

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
sys.modules.pop("torch.distributed.nn.functional", None)  # imported while a group runs
importlib.import_module("torch.distributed.nn.functional")
group = weakref.ref(dist.group.WORLD)
dist.destroy_process_group()
gc.collect()
if group() is not None:
    raise SystemExit(
        "`group=group.WORLD` is evaluated when the module is imported, and holds the group"
    )
