# SPDX-License-Identifier: Apache-2.0
"""All process groups of a process cannot be listed with public names."""

import torch.distributed as dist

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
group = dist.new_group([0])
assert group in dist.distributed_c10d._world.pg_map
public = [
    name for name in dir(dist) if name in ("groups", "list_groups", "get_groups", "process_groups")
]
if not public:
    raise SystemExit("only the private _world has the groups that libraries have made")
