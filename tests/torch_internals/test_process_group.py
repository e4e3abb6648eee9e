# SPDX-License-Identifier: Apache-2.0
"""The process groups of this process."""

from __future__ import annotations

import faulthandler
import gc
import importlib
import os
import sys
import threading
import weakref

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from accelerate.torch_internals import process_group


def test_all_groups() -> None:
    assert process_group.all_groups() == []
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        other = dist.new_group([0])
        assert process_group.all_groups() == [dist.group.WORLD, other]
    finally:
        dist.destroy_process_group()


def test_a_group_is_freed_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    module = "torch.distributed.nn.functional"
    monkeypatch.delitem(sys.modules, module, raising=False)
    process_group.keep_out_of_defaults()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    importlib.import_module(module)
    assert dist.group.WORLD is not None
    group = weakref.ref(dist.group.WORLD)
    dist.destroy_process_group()
    gc.collect()
    assert group() is None


def end_group() -> None:
    """Free a group whose thread needs the interpreter lock. It exits with 1 in a deadlock."""
    process_group.keep_out_of_defaults()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = DistributedDataParallel(torch.nn.Linear(2, 2))
    started, proceed = threading.Event(), threading.Event()

    def wait(future: object) -> None:
        if threading.current_thread() is not threading.main_thread():
            started.set()
            proceed.wait()

    faulthandler.dump_traceback_later(3, exit=True)
    group = dist.group.WORLD
    assert group is not None
    dist.destroy_process_group()
    del model.process_group, model.logger
    while not started.wait(0.01):
        group.allreduce([torch.ones(10)]).get_future().then(wait)
    del group
    proceed.set()
    process_group.let_threads_end()
    del model.reducer


def test_the_end_of_a_group_waits_for_its_threads() -> None:
    child = os.fork()
    if child == 0:
        end_group()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
