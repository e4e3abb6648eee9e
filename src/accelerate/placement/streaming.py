# SPDX-License-Identifier: Apache-2.0
"""Fetching offloaded weights ahead of the module that needs them, in the background."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import torch

from ..core.device_kinds import DEVICES
from .subclasses import convert_inner, inner_tensors

# A smaller set of weights is read when it is needed: handing it to another thread takes as long as reading it.
MINIMUM = 2**18  # bytes

Weights = Mapping[str, torch.Tensor]


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


class _Copies:
    """The copies of weights to one accelerator: from pinned memory, on a stream of their own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.Stream(device=device)

    def issued(self) -> Any:
        """An event behind all that the device has been given to compute so far."""
        event = torch.Event(self._device, blocking=True)
        torch.accelerator.current_stream(self._device).record_event(event)
        return event

    def copy(self, values: Weights, before: Any) -> tuple[Weights, Any]:
        """The copies of values on the device, made after an event, and the event behind them."""
        pinned = {
            name: convert_inner(value, torch.Tensor.pin_memory) for name, value in values.items()
        }
        # Not the stream but this thread waits: the allocator would take new memory for each module that waits.
        before.synchronize()

        def copied(inner: torch.Tensor) -> torch.Tensor:
            # The allocator of pinned memory keeps a block until the copies from it are done.
            return inner.to(self._device, non_blocking=True)

        with self._stream:
            copies = {name: convert_inner(value, copied) for name, value in pinned.items()}
            return copies, self._stream.record_event()

    def receive(self, copies: Weights, copied: Any) -> None:
        """Let the current stream of the device use copies."""
        stream = torch.accelerator.current_stream(self._device)
        stream.wait_event(copied)
        for value in copies.values():
            for inner in inner_tensors(value).values():
                inner.record_stream(stream)


class WeightStream:
    """Fetches the weights of the modules that run next while the current one computes.

    It learns the order in which modules run from the run itself: what followed a pair of modules last time is expected
    to follow it again. A wrong guess costs the time of that fetch; its weights are dropped when the next module
    starts. What is fetched ahead is at most as large as the largest module, or one module if all are larger than what
    remains, so that two modules are in memory at a time.

    On the CPU, the pages of weights in files are read ahead. To an accelerator a module is copied when the module
    before the current one has been computed, also where the CPU is far ahead of the device.
    """

    def __init__(self) -> None:
        self._requests: dict[int, FetchRequest] = {}
        self._next: dict[tuple[int, int], int] = {}
        self._last = (-1, -1)  # the last two modules
        self.ahead: dict[int, Future[tuple[Weights, Any]]] = {}
        self._largest = 0
        self._executor: ThreadPoolExecutor | None = None
        self._copies: dict[torch.device, _Copies] = {}

    def __reduce__(self) -> Any:
        # A copy of a model learns its own order.
        return WeightStream, ()

    def fetch(self, request: FetchRequest) -> Weights:
        """Return what was fetched for the module that starts now, and begin to fetch for the modules after it.

        Returns:
            The weights by name, on the device of the request; nothing if they were not fetched ahead.
        """
        kind = DEVICES.get(request.device.type)
        if request.size < MINIMUM or kind is None:
            return {}
        if kind.type != "cpu" and not kind.pin_memory:
            return {}
        module = request.module
        self._requests[module] = request
        self._largest = max(self._largest, request.size)
        self._next[self._last] = module
        self._last = (self._last[1], module)
        present = self.ahead.pop(module, None)
        expected = self._expected(self._last)
        for number in self.ahead.keys() - expected:
            wrong = self.ahead.pop(number)
            if not wrong.cancel() and self._requests[number].device.type != "cpu":
                # A copy that has begun takes memory until it ends.
                wait([wrong])
            del wrong
        for number in expected:
            if number not in self.ahead:
                self._begin(number)
        if present is None:
            return {}
        values, copied = present.result()
        if copied is not None:
            self._copies[request.device].receive(values, copied)
        return values

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

    def _begin(self, number: int) -> None:
        """Begin to fetch the weights of a module."""
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, "weights")
        request = self._requests[number]
        device = request.device
        if device.type == "cpu":
            self.ahead[number] = self._executor.submit(_read, request)
            return
        if device not in self._copies:
            self._copies[device] = _Copies(device)
        copies = self._copies[device]
        self.ahead[number] = self._executor.submit(_copy, request, copies, copies.issued())


def _read(request: FetchRequest) -> tuple[Weights, Any]:
    """Weights whose pages are in memory."""
    values = {name: request.source[name] for name in request.names}
    for value in values.values():
        for tensor in inner_tensors(value).values():
            # A touch of a page of a mapped file reads it, and Linux maps the 16 pages around it.
            tensor.detach().reshape(-1).view(torch.uint8)[:: 16 * mmap.PAGESIZE].sum()
    return values, None


def _copy(request: FetchRequest, copies: _Copies, before: Any) -> tuple[Weights, Any]:
    """Weights on the device, copied after an event, and the event behind the copies."""
    return copies.copy({name: request.source[name] for name in request.names}, before)
