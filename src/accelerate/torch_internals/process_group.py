# SPDX-License-Identifier: Apache-2.0
"""The process groups of this process, and what keeps one open after its end."""

from __future__ import annotations

import importlib

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

GROUP_DEFAULTS = Internal(
    name="group_defaults",
    what="nothing private: torch.distributed.nn.functional, whose default arguments are `group=group.WORLD`, is "
    "imported before a group is made",
    versions="2.11 to 2.14",
    upstream="not reported",
    needed_by="notebook_launcher and interrupted cells, end_training: the connections of gloo close with the group",
    without="a rank that waits in a collective learns that another one has left only after the group's timeout",
    test="tests/torch_internals/test_process_group.py::test_a_group_is_freed_at_its_end",
)


def all_groups() -> list[dist.ProcessGroup]:
    """All groups of this process, the default one first; with the row off, only that."""
    if ALL_GROUPS.is_on:
        return list(dist.distributed_c10d._world.pg_map)
    if dist.group.WORLD is None:
        return []
    return [dist.group.WORLD]


def keep_out_of_defaults() -> None:
    """Import what would hold the default group for ever if it were imported later, as FSDP1 does."""
    if GROUP_DEFAULTS.is_on:
        importlib.import_module("torch.distributed.nn.functional")
