# SPDX-License-Identifier: Apache-2.0
"""Memory of devices: what is free, limits given as text, and shares that spread a model."""

import logging

import pytest
from torch import nn

from accelerate.placement import device_map
from accelerate.placement.device_map import get_balanced_memory, get_max_memory


def test_free_memory_with_accelerators(monkeypatch):
    monkeypatch.setattr(device_map.devices, "accelerator_type", lambda: "cuda")
    monkeypatch.setattr(device_map.devices, "device_count", lambda kind=None: 3)

    def zeros(size, device):
        if device.index == 1:
            raise RuntimeError("busy")

    monkeypatch.setattr(device_map.torch, "zeros", zeros)
    monkeypatch.setattr(
        device_map.torch.accelerator, "get_memory_info", lambda index: (100 + index, 1000)
    )
    free = get_max_memory()
    assert list(free) == [0, 2, "cpu"] and (free[0], free[2]) == (100, 102)
    monkeypatch.setattr(device_map.devices, "accelerator_type", lambda: "mps")
    assert list(get_max_memory()) == ["mps"]


def test_limits_are_read_and_ordered(caplog):
    given = {"cpu": "2GB", 1: 3, 0: "1GiB", "disk": "1GB"}
    with caplog.at_level(logging.WARNING):
        limits = get_max_memory(given)
    assert list(limits.items()) == [(0, 2**30), (1, 3), ("cpu", 2 * 10**9), ("disk", 10**9)]
    assert given == limits  # callers compare their limits with the answer
    assert get_max_memory({"mps": 5}) == {"mps": 5}


@pytest.mark.parametrize("device", ["foo", "cuda:0", "gpu", True, None])
def test_unknown_devices_are_refused(device):
    with pytest.raises(ValueError, match=f"Device {device} is not recognized"):
        get_max_memory({device: "1GB"})


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)


def test_shares_are_even_and_leave_room_for_a_block():
    model = nn.ModuleList([Block(10) for _ in range(8)])  # 400 bytes each
    block = 1.25 * 400
    limits = get_balanced_memory(
        model, {0: 10_000, 1: 10_000, "cpu": 10_000}, no_split_module_classes=["Block"]
    )
    assert limits == {0: 1600 + block, 1: 10_000, "cpu": 10_000}
    limits = get_balanced_memory(
        model, {0: 10_000, 1: 900, 2: 10_000, 3: 10_000}, no_split_module_classes="Block"
    )
    assert limits == {0: 800 + block, 1: 900, 2: 800 + block, 3: 10_000}
    # Devices that may hold nothing do not count.
    limits = get_balanced_memory(model, {0: 10_000, 1: 0, 2: 10_000})
    assert limits == {0: 1600 + block, 1: 0, 2: 10_000}
    assert get_balanced_memory(model, {"cpu": 100}) == {"cpu": 100}


def test_low_zero_leaves_device_zero_for_other_work():
    model = nn.ModuleList([Block(10) for _ in range(8)])
    limits = get_balanced_memory(model, {0: 10_000, 1: 10_000, 2: 10_000}, low_zero=True)
    assert limits == {0: 0, 1: 1600 + 500, 2: 10_000}
    limits = get_balanced_memory(model, {0: 10_000, 1: 1000, 2: 1000}, low_zero=True)
    assert limits == {0: 1200, 1: 1000, 2: 1000}
