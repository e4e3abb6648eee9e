# SPDX-License-Identifier: Apache-2.0
"""The collectives that this process has begun."""

from __future__ import annotations

import torch
import torch.distributed as dist

from accelerate.torch_internals.flight_recorder import newest, recorded


def test_collectives_are_recorded() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        name = f"{dist.group.WORLD.group_name}/{dist.group.WORLD.group_desc}"  # type: ignore[union-attr]
        # The recorder still has the collectives of groups that other tests have destroyed.
        dist.all_reduce(torch.ones(2, 3))
        before = recorded()[-1].number
        dist.all_reduce(torch.ones(2, 3))
        last = recorded()[-1]
        assert last[:4] == (name, before + 1, "all_reduce", "float32 [2, 3]") and not last.is_p2p
        assert newest(recorded())[name] == before + 1
    finally:
        dist.destroy_process_group()
