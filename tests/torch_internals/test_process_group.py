# SPDX-License-Identifier: Apache-2.0
"""The process groups of this process."""

from __future__ import annotations

import gc
import importlib
import sys
import weakref

import pytest
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
