# SPDX-License-Identifier: Apache-2.0
"""Fetching offloaded weights ahead of the module that needs them, in the background."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ..core.device_kinds import DEVICES
from .file_pages import are_in_memory, map_pages
from .subclasses import convert_inner, inner_tensors

# A smaller set of weights is read when it is needed: handing it to another thread takes as long as reading it.
MINIMUM = 2**18  # bytes


class WeightSource(Protocol):
    """Offloaded weights by name."""

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return a weight."""
        ...

    def shared(self, name: str) -> torch.Tensor:
        """Return a weight for one forward on the CPU. Its memory may be that of earlier and later calls."""
        ...

    def read(self, name: str) -> None:
        """Read the bytes of a weight in a file to the system's cache."""
        ...

    def stays(self, name: str) -> bool:
        """Return whether the last result of `shared` stays mapped."""
        ...

    def is_ready(self, name: str) -> bool:
        """Return whether `shared` takes no time: the weight is mapped and its pages are in memory."""
        ...


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
    source: WeightSource
    names: tuple[str, ...]
    size: int
    device: torch.device

    def is_ready(self) -> bool:
        """Return whether nothing remains to be fetched ahead."""
        return self.device.type == "cpu" and all(map(self.source.is_ready, self.names))

    def stays(self) -> bool:
        """Return whether the weights stay mapped after a forward."""
        return self.device.type == "cpu" and all(map(self.source.stays, self.names))


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


class _Position(threading.local):
    """Where one thread is in the forward of a model."""

    def __init__(self) -> None:
        self.last = (-1, -1)  # the last two modules
        self.ahead: dict[int, Future[_Fetched]] = {}


class WeightStream:
    """Fetches the weights of the modules that run next while the current one computes.

    It learns the order in which modules run from the run itself: what followed a pair of modules last time is expected
    to follow it again. A wrong guess costs the time of that fetch; its weights are dropped when the next module
    starts. What is fetched ahead is at most as large as the largest module, or one module if all are larger than what
    remains, so that two modules are in memory at a time, for each thread that calls the model.

    On the CPU, weights in files are mapped, and read ahead if they are not in memory. For accelerators
    they are copied from pinned memory on a stream of their own.
    """

    def __init__(self) -> None:
        self._requests: dict[int, FetchRequest] = {}
        self._next: dict[tuple[int, int], int] = {}
        self._position = _Position()
        self._largest = 0
        self._executor: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()  # for the making of the executor
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
        position = self._position
        self._next[position.last] = module
        position.last = (position.last[1], module)
        ahead = position.ahead
        present = ahead.pop(module, None)
        expected = self._expected(position.last)
        for other in [number for number in ahead if number not in expected]:
            ahead.pop(other).cancel()
        for number in expected:
            if number not in ahead and not self._requests[number].is_ready():
                ahead[number] = self._submit(self._fetch, self._requests[number])
        if present is not None:
            return present.result().take(request.device)
        if request.device.type == "cpu" and not request.is_ready():
            # Reading a file is faster than the page faults of a computation that finds it on the disk.
            for name in request.names:
                request.source.read(name)
        return {}

    def release(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        """Drop the last references to tensors in the background: taking away a mapping of a file takes a while."""
        if self._executor is not None:
            self._submit(tensors.clear)

    def _expected(self, last: tuple[int, int]) -> list[int]:
        """The modules that should run after the `last` two, as many as may be fetched ahead."""
        found: list[int] = []
        running, left = last[1], self._largest
        while (number := self._next.get(last)) is not None and number not in (*found, running):
            left -= self._requests[number].size
            if left < 0 and found:
                break
            found.append(number)
            last = (last[1], number)
        return found

    def _submit(self, function: Any, *arguments: Any) -> Future[Any]:
        if self._executor is None:
            with self._lock:
                # One thread: it drops what was used before it fetches what comes.
                self._executor = self._executor or ThreadPoolExecutor(1, "weights")
        return self._executor.submit(function, *arguments)

    def _fetch(self, request: FetchRequest) -> _Fetched:
        device = request.device
        if device.type == "cpu":
            values = {name: request.source.shared(name) for name in request.names}
            for name, value in values.items():
                tensors = list(inner_tensors(value).values())
                if not all(are_in_memory(tensor.data_ptr(), tensor.nbytes) for tensor in tensors):
                    request.source.read(name)
                for tensor in tensors:
                    map_pages(tensor)
            return _Fetched(values)
        values = {name: request.source[name] for name in request.names}
        stream = self._copies.get(device)
        if stream is None:
            stream = self._copies[device] = torch.Stream(device=device)
        with stream:
            # The allocator of pinned memory keeps a block until the copies from it are done.
            copies = {
                name: convert_inner(value, lambda inner: inner.pin_memory().to(device, non_blocking=True))
                for name, value in values.items()
            }
            return _Fetched(copies, stream.record_event())


def _can_stream(device: torch.device) -> bool:
    kind = DEVICES.get(device.type)
    return kind is not None and (device.type == "cpu" or kind.pin_memory)
