# SPDX-License-Identifier: Apache-2.0
"""The process groups of this process, what keeps one open after its end, and the end of its threads."""

from __future__ import annotations

import importlib
import time

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

LATE_RELEASES = Internal(
    name="late_releases",
    what="nothing private: 20 ms in which gloo's threads get the interpreter lock, before a group or the interpreter "
    "ends. A thread drops its last work late, and needs the lock for the Python objects of that work. A group that "
    "DDP's reducer frees waits for its threads with that lock; the end of the interpreter ends the thread, which "
    "aborts the process. torch does not report whether threads are idle",
    versions="2.11 to 2.14",
    upstream="not reported",
    needed_by="end_training, and the exit of each process of a run on gloo",
    without="some runs that are through never end, or end with SIGABRT: 'terminate called without an active "
    "exception'",
    test="tests/torch_internals/test_process_group.py::test_the_end_of_a_group_waits_for_its_threads",
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


def let_threads_end() -> None:
    """Wait until gloo's threads have dropped their last works. Collectives that run go on."""
    if LATE_RELEASES.is_on:
        time.sleep(0.02)
