# SPDX-License-Identifier: Apache-2.0
"""Which collectives this process has begun cannot be asked for with public names, if one hangs."""

import json

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace_json

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(2))
entry = json.loads(_dump_fr_trace_json())["entries"][-1]
assert entry["profiling_name"] == "gloo:all_reduce", entry
public = [name for name in dir(dist) if name in ("flight_recorder", "dump_trace")]
if not public:
    raise SystemExit("the flight recorder has the collective, and torch.distributed no name for it")
