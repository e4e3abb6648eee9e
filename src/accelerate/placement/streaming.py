# SPDX-License-Identifier: Apache-2.0
"""Fetching offloaded weights ahead of the module that needs them, in the background."""

from __future__ import annotations

import contextlib
import functools
import mmap
import sys
import threading
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import saved_tensors_hooks

from ..core.device_kinds import DEVICES
from ..core.modules import is_wrapper_subclass
from ..torch_internals.saved_tensors import outer_hooks
from .copies import DeviceCopies, FetchRequest, WeightCopies, Weights
from .subclasses import inner_tensors

# A smaller set of weights in files is read when it is needed: handing it to another thread takes as long.
MINIMUM = 2**18  # bytes


class PageReader:
    """Reads the pages of weights in files into memory, in a thread. For modules that run on the CPU."""

    copies = False

    def __init__(self) -> None:
        self.minimum: int = MINIMUM
        self._executor = ThreadPoolExecutor(1, "weights")

    def begin(self, request: FetchRequest) -> Future[Weights]:
        """Begin to read the weights of a module."""
        return self._executor.submit(_read, request)

    def finish(self, reading: Future[Weights]) -> Weights:
        """The weights. Raises what went wrong while they were read."""
        return reading.result()

    def cancel(self, reading: Future[Weights]) -> None:
        """Do not read what nobody needs, unless it has begun."""
        reading.cancel()

    def close(self) -> None:
        """End the thread."""
        self._executor.shutdown()


def _read(request: FetchRequest) -> Weights:
    """Weights whose pages are in memory."""
    values = {name: request.source[name] for name in request.names}
    for value in values.values():
        for tensor in inner_tensors(value).values():
            # A touch of a page of a mapped file reads it, and Linux maps the 16 pages around it.
            tensor.detach().reshape(-1).view(torch.uint8)[:: 16 * mmap.PAGESIZE].sum()
    return values


def carrier_for(device: torch.device) -> PageReader | WeightCopies | None:
    """What fetches weights for modules on a device; None where nothing is gained by it."""
    kind = DEVICES.get(device.type)
    if device.type == "cpu":
        return PageReader()
    if kind is None or not kind.pin_memory:
        return None
    return WeightCopies(DeviceCopies(device))


class WeightStream:
    """Fetches the weights of the modules that run next while the current one computes.

    It learns the order in which modules run from the run itself: what followed a pair of modules last time is expected
    to follow it again, in the backward too. A wrong guess costs the time of that fetch; its weights are dropped when
    the next module starts. What is fetched ahead is at most as large as the largest module, or one module if all are
    larger than what remains, so that two modules are in memory at a time.
    """

    def __init__(self) -> None:
        self._requests: dict[int, FetchRequest] = {}
        self._next: dict[tuple[int, int], int] = {}
        self._last = (-1, -1)  # the last two modules
        self._largest = 0
        self._carriers: dict[torch.device, Any] = {}
        self.ahead: dict[int, Any] = {}
        # The module that was fetched last, and its weights on the accelerator.
        self._current: tuple[int, Any] = (-1, None)
        # The backward has a thread for each accelerator.
        self._lock = threading.RLock()

    def __reduce__(self) -> Any:
        # A copy of a model learns its own order.
        return WeightStream, ()

    def copies_to(self, device: torch.device) -> bool:
        """Whether weights are copied for modules that run on a device, also those in main memory."""
        carrier = self._carrier(device)
        return carrier is not None and carrier.copies

    def fetch(self, request: FetchRequest) -> Weights:
        """Return the weights of the module that starts now, and begin to fetch those of the modules after it.

        Returns:
            The weights by name, on the device of the request; nothing if the module is to read them itself.
        """
        if not request.size or _is_transformed():
            return {}
        carrier = self._carrier(request.device)
        if carrier is None or request.size < carrier.minimum:
            return {}
        with self._lock:
            module = request.module
            self._requests[module] = request
            self._largest = max(self._largest, request.size)
            self._next[self._last] = module
            self._last = (self._last[1], module)
            self._current = (-1, None)
            transfer = self.ahead.pop(module, None)
            expected = self._expected(self._last)
            self._drop(self.ahead.keys() - expected)
            if carrier.copies and (transfer is None or not transfer.is_current()):
                transfer = carrier.begin(request)
            for number in expected:
                if number not in self.ahead:
                    self._begin(number)
            if transfer is None:
                return {}
            weights: Weights = carrier.finish(transfer)
            if carrier.copies:
                self._current = (module, transfer)
            return weights

    def fetch_again(self, request: FetchRequest) -> Weights:
        """Return the weights of a module for its backward."""
        with self._lock:
            if request.module not in self._requests:
                # The hooks were removed since the forward.
                return {name: request.source[name].to(request.device) for name in request.names}
            if self._current[0] != request.module:
                return self.fetch(request)
            weights: Weights = self._carriers[request.device].finish(self._current[1])
            return weights

    def forget(self, module: int) -> None:
        """Fetch for a module no more. After the last one, page-locked memory, buffers and threads are released."""
        with self._lock:
            self._current = (-1, None)
            if module in self.ahead:
                self._drop([module])
            self._requests.pop(module, None)
            if self._requests:
                return
            for carrier in self._carriers.values():
                if carrier is not None:
                    carrier.close()
            self._carriers = {}

    def _carrier(self, device: torch.device) -> Any:
        if device not in self._carriers:
            self._carriers[device] = carrier_for(device)
        return self._carriers[device]

    def _expected(self, last: tuple[int, int]) -> list[int]:
        """The modules that should run after the `last` two, as many as may be fetched ahead."""
        modules: list[int] = []
        left = self._largest
        while True:
            number = self._next.get(last)
            if number is None or number in modules or number not in self._requests:
                return modules
            left -= self._requests[number].size
            if left < 0 and modules:
                return modules
            modules.append(number)
            last = (last[1], number)

    def _begin(self, number: int) -> None:
        request = self._requests[number]
        # What goes wrong is raised to the module that needs these weights: it tries again.
        with contextlib.suppress(Exception):
            self.ahead[number] = self._carrier(request.device).begin(request)

    def _drop(self, modules: Iterable[int]) -> None:
        for number in modules:
            transfer = self.ahead.pop(number)
            self._carrier(self._requests[number].device).cancel(transfer)


@functools.cache
def _untraced_pack() -> Any:
    # Autograd calls it while compiled functions run. Without this it would be compiled too.
    return torch.compiler.disable(SavedWeights._pack)


def _is_transformed() -> bool:
    """Whether a gradient transform of torch.func runs. New tensors are wrapped then, and of no use after it."""
    try:
        with saved_tensors_hooks(_unchanged, _unchanged):
            return False
    except RuntimeError:
        # It does not allow such hooks.
        return True


def _unchanged(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


class _SavedView(NamedTuple):
    """A view of a weight that the backward needs."""

    stream: WeightStream
    request: FetchRequest
    name: str
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class SavedWeights(saved_tensors_hooks):
    """Inside the block autograd keeps which view of a fetched weight it needs. The backward fetches that weight again.

    Other tensors go to the hooks around this block.
    """

    def __init__(self, stream: WeightStream, request: FetchRequest, weights: Weights) -> None:
        pack = SavedWeights._pack
        if "torch._dynamo" in sys.modules:
            pack = _untraced_pack()
        super().__init__(functools.partial(pack, self), self._unpack)
        self._stream = stream
        self._request = request
        self._outer = outer_hooks()
        self._names: dict[int, str] = {}
        for name, weight in weights.items():
            if weight.numel() and not is_wrapper_subclass(weight):
                self._names[weight.untyped_storage().data_ptr()] = name
        self._dtypes = {name: weight.dtype for name, weight in weights.items()}

    def _pack(self, tensor: torch.Tensor) -> Any:
        name = None
        if tensor.layout == torch.strided and not is_wrapper_subclass(tensor):
            name = self._names.get(tensor.untyped_storage().data_ptr())
        if name is not None and self._dtypes[name] == tensor.dtype and not tensor.is_conj():
            return _SavedView(
                self._stream,
                self._request,
                name,
                tensor.shape,
                tensor.stride(),
                int(tensor.storage_offset()),
            )
        if self._outer is not None:
            return self._outer[0](tensor)
        return tensor

    def _unpack(self, saved: Any) -> torch.Tensor:
        if isinstance(saved, _SavedView):
            weight = saved.stream.fetch_again(saved.request)[saved.name]
            return weight.as_strided(saved.shape, saved.stride, saved.offset)
        if self._outer is not None:
            tensor: torch.Tensor = self._outer[1](saved)
            return tensor
        return saved  # type: ignore[no-any-return]
