# SPDX-License-Identifier: Apache-2.0
"""Fetching offloaded weights ahead of the module that needs them, in the background."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from ..core.device_kinds import DEVICES
from .subclasses import convert_inner, inner_tensors

# A smaller set of weights is read when it is needed: handing it to another thread takes as long as reading it.
MINIMUM = 2**18  # bytes


@dataclass(frozen=True, eq=False)
class FetchRequest:
    """The weights of one module that may be fetched ahead.

    Fields:
        module: a number that stands for the module.
        source: offloaded weights by name.
        names: those of the module.
        size: of these weights, in bytes.
        device: on which the module runs.
    """

    module: int
    source: Mapping[str, torch.Tensor]
    names: tuple[str, ...]
    size: int
    device: torch.device


@dataclass(frozen=True)
class _Fetched:
    values: dict[str, torch.Tensor]
    copied: Any = None  # the event behind the copies to an accelerator; None on the CPU

    def take(self, device: torch.device) -> dict[str, torch.Tensor]:
        """Return the values once the current stream of the device may use them."""
        if self.copied is not None:
            stream = torch.accelerator.current_stream(device)
            stream.wait_event(self.copied)
            for value in self.values.values():
                for inner in inner_tensors(value).values():
                    inner.record_stream(stream)
        return self.values


class WeightStream:
    """Fetches the weights of the modules that run next while the current one computes.

    It learns the order in which modules run from the run itself: what followed a pair of modules last time is expected
    to follow it again. A wrong guess costs the time of that fetch; its weights are dropped when the next module
    starts. What is fetched ahead is at most as large as the largest module, or one module if all are larger than what
    remains, so that two modules are in memory at a time.

    On the CPU, the pages of weights in files are read ahead. For accelerators weights are copied from pinned memory on
    a stream of their own.
    """

    def __init__(self) -> None:
        self._requests: dict[int, FetchRequest] = {}
        self._next: dict[tuple[int, int], int] = {}
        self._last = (-1, -1)  # the last two modules
        self.ahead: dict[int, Future[_Fetched]] = {}
        self._largest = 0
        self._executor: ThreadPoolExecutor | None = None
        self._copies: dict[torch.device, torch.Stream] = {}

    def __reduce__(self) -> Any:
        # A copy of a model learns its own order.
        return WeightStream, ()

    def fetch(self, request: FetchRequest) -> dict[str, torch.Tensor]:
        """Return what was fetched for the module that starts now, and begin to fetch for the modules after it.

        Returns:
            The weights by name, on the device of the request; nothing if they were not fetched ahead.
        """
        if request.size < MINIMUM or not _can_stream(request.device):
            return {}
        module = request.module
        self._requests[module] = request
        self._largest = max(self._largest, request.size)
        self._next[self._last] = module
        self._last = (self._last[1], module)
        present = self.ahead.pop(module, None)
        expected = self._expected(self._last)
        for number in self.ahead.keys() - expected:
            self.ahead.pop(number).cancel()
        for number in expected:
            if number not in self.ahead:
                if self._executor is None:
                    self._executor = ThreadPoolExecutor(1, "weights")
                self.ahead[number] = self._executor.submit(self._fetch, self._requests[number])
        if present is None:
            return {}
        return present.result().take(request.device)

    def _expected(self, last: tuple[int, int]) -> list[int]:
        """The modules that should run after the `last` two, as many as may be fetched ahead."""
        modules: list[int] = []
        running = last[1]
        left = self._largest
        while True:
            number = self._next.get(last)
            if number is None or number == running or number in modules:
                return modules
            left -= self._requests[number].size
            if left < 0 and modules:
                return modules
            modules.append(number)
            last = (last[1], number)

    def _fetch(self, request: FetchRequest) -> _Fetched:
        device = request.device
        values = {name: request.source[name] for name in request.names}
        if device.type == "cpu":
            for value in values.values():
                for tensor in inner_tensors(value).values():
                    # A touch of a page of a mapped file reads it, and Linux maps the 16 pages around it.
                    tensor.detach().reshape(-1).view(torch.uint8)[:: 16 * mmap.PAGESIZE].sum()
            return _Fetched(values)
        if device not in self._copies:
            self._copies[device] = torch.Stream(device=device)
        stream = self._copies[device]

        def copied(inner: torch.Tensor) -> torch.Tensor:
            # The allocator of pinned memory keeps a block until the copies from it are done.
            return inner.pin_memory().to(device, non_blocking=True)

        with stream:
            copies = {name: convert_inner(value, copied) for name, value in values.items()}
            return _Fetched(copies, stream.record_event())


def _can_stream(device: torch.device) -> bool:
    kind = DEVICES.get(device.type)
    return kind is not None and (device.type == "cpu" or kind.pin_memory)
