# SPDX-License-Identifier: Apache-2.0
"""torch_xla through a stand-in of its four entry points: the real one does not import beside this torch."""

import sys
import types

import pytest
import torch

from accelerate import Accelerator
from accelerate.core import devices, imports
from accelerate.core.enums import DistributedType
from accelerate.runtime import backends


@pytest.fixture
def syncs(monkeypatch):
    """A torch_xla whose device is the meta device, and the list of its syncs."""
    calls = []
    package = types.ModuleType("torch_xla")
    package.device = lambda: torch.device("xla", 0)
    package.sync = lambda: calls.append(1)
    runtime = types.ModuleType("torch_xla.runtime")
    runtime.global_ordinal = runtime.local_ordinal = lambda: 0
    runtime.world_size = runtime.local_process_count = lambda: 1
    package.runtime = runtime
    monkeypatch.setitem(sys.modules, "torch_xla", package)
    monkeypatch.setitem(sys.modules, "torch_xla.runtime", runtime)
    here = imports.is_available.__wrapped__
    monkeypatch.setattr(devices, "is_available", lambda name: name == "torch_xla" or here(name))
    monkeypatch.setattr(backends, "is_available", lambda name: name == "torch_xla" or here(name))
    monkeypatch.setattr(devices, "accelerator_type", lambda: None)
    monkeypatch.setattr(backends, "accelerator_type", lambda: None)
    return calls


def test_device_ranks_and_sync(syncs):
    accelerator = Accelerator(device_placement=False)
    assert accelerator.device == torch.device("xla", 0)
    assert devices.kind_of(accelerator.device).distributed is DistributedType.XLA
    assert backends.xla_topology().launcher == "xla"
    model = torch.nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(2):
        accelerator.backward(model(torch.ones(1, 2)).sum())
        optimizer.step()
    assert len(syncs) == 2


def test_cpu_stays_cpu(syncs):
    assert Accelerator(cpu=True).device.type == "cpu"
