# SPDX-License-Identifier: Apache-2.0
"""Values of a step that are on a device: copied to the host without waiting for the device, and read later."""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..core import devices

_SLOTS = 256
_UNKNOWN = (math.nan, math.nan)


def scalar(value: Any) -> float | torch.Tensor | None:
    """A number as a float, if it is on the host; a tensor on a device as it is; None where there is no such value."""
    if type(value) is torch.Tensor:
        if value.numel() != 1 or value.is_meta:
            return None
        return float(value.item()) if value.device.type == "cpu" else value.detach()
    return float(value) if isinstance(value, (int, float)) else None


class DeviceValues:
    """Copies scalars to pinned memory.

    Args:
        device: of the run, one with streams and events.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = devices.module_of(device)
        self._rows = torch.empty(_SLOTS, 2, dtype=torch.float32, pin_memory=devices.kind_of(device).pin_memory)
        self._free: deque[int] = deque(range(_SLOTS))

    def copy(self, values: Sequence[Any]) -> Callable[[bool], tuple[float, ...] | None]:
        """Start to copy loss and norm; what is a float already is kept.

        Returns:
            A function that returns the two numbers, or None while the device computes them; with True it waits.
        """
        if not self._free:
            return lambda wait: _UNKNOWN
        slot = self._free.popleft()
        row = self._rows[slot]
        for place, value in enumerate(values):
            if isinstance(value, torch.Tensor):
                row[place].copy_(value.reshape(()), non_blocking=True)
            else:
                row[place] = value
        done = self._module.current_stream(self._device).record_event()
        return functools.partial(self._read, slot, done)

    def _read(self, slot: int, done: Any, wait: bool) -> tuple[float, ...] | None:
        if wait:
            done.synchronize()
        elif not done.query():
            return None
        found = tuple(self._rows[slot].tolist())
        self._free.append(slot)
        return found


def device_values(device: torch.device) -> DeviceValues | None:
    """For a device with streams and events; None for others, whose values are then not known."""
    if device.type in ("cpu", "meta"):
        return None
    module = devices.module_of(device)
    return DeviceValues(device) if hasattr(module, "Stream") and hasattr(module, "current_stream") else None
