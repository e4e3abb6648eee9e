# SPDX-License-Identifier: Apache-2.0
"""The process groups of this process. torch has the default one only in its public API."""

from __future__ import annotations

import torch.distributed as dist

from . import Internal

ALL_GROUPS = Internal(
    name="all_groups",
    what="the list of process groups in torch.distributed.distributed_c10d._world",
    versions="2.11 to 2.14",
    upstream="not reported",
    needed_by="the exit of a process whose sharded model holds groups with collectives that others never join",
    without="such a process stays in the destructor of a group until the timeout of the group, half an hour",
    test="tests/torch_internals/test_process_group.py::test_all_groups",
)


def all_groups() -> list[dist.ProcessGroup]:
    """All groups of this process, the default one first; with the row off, only that."""
    if ALL_GROUPS.is_on:
        return list(dist.distributed_c10d._world.pg_map)
    if dist.group.WORLD is None:
        return []
    return [dist.group.WORLD]
