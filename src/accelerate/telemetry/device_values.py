# SPDX-License-Identifier: Apache-2.0
"""Loss and gradient norm of a step: numbers on the host, and copies of those that a device still computes."""

from __future__ import annotations

import math
from typing import Any

import torch

from ..core import devices


def scalar(value: Any) -> float | torch.Tensor | None:
    """A number as a float, if it is on the host; a tensor on a device as it is; None where there is no such value."""
    if type(value) is torch.Tensor:
        if value.numel() != 1 or value.is_meta:
            return None
        if value.is_cpu:
            return float(value.item())
        return value.detach().reshape(())
    if isinstance(value, (int, float)):
        return float(value)
    return None


def mean(values: list[float | torch.Tensor | None]) -> float | torch.Tensor | None:
    """The mean of the losses of a step; None where one is not known."""
    numbers = [value for value in values if isinstance(value, float)]
    if len(numbers) == len(values) > 0:
        if len(numbers) == 1:
            return numbers[0]
        return sum(numbers) / len(numbers)
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    if len(tensors) == len(values) > 0:
        return torch.stack([value.float() for value in tensors]).mean()
    return None


class DeviceValues:
    """Copies numbers of a step from a device to the host without waiting for them.

    Args:
        device: of the run. If it has no streams, its numbers are not known: to read them would wait.
        values: numbers, and tensors of one element.
    """

    def __init__(self, device: torch.device, *values: float | torch.Tensor | None) -> None:
        module: Any = devices.module_of(device)
        self._done: Any = None
        if hasattr(module, "current_stream"):
            # Such a copy goes to pinned memory.
            copied = [
                one.to("cpu", non_blocking=True) if isinstance(one, torch.Tensor) else one
                for one in values
            ]
            self._values: list[Any] = copied
            self._done = module.current_stream(device).record_event()
        else:
            self._values = [None if isinstance(one, torch.Tensor) else one for one in values]

    def is_ready(self) -> bool:
        """Whether all are on the host."""
        return self._done is None or bool(self._done.query())

    def read(self) -> list[float]:
        """The numbers, after waiting for them; NaN for None."""
        if self._done is not None:
            self._done.synchronize()
        return [math.nan if value is None else float(value) for value in self._values]
