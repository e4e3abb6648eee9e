# SPDX-License-Identifier: Apache-2.0
"""The process groups of this process."""

from __future__ import annotations

import torch.distributed as dist

from accelerate.torch_internals import process_group


def test_all_groups() -> None:
    assert process_group.all_groups() == []
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        other = dist.new_group([0])
        assert process_group.all_groups() == [dist.group.WORLD, other]
    finally:
        dist.destroy_process_group()
