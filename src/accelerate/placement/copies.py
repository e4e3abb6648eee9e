# SPDX-License-Identifier: Apache-2.0
"""Copies of weights to an accelerator: from page-locked memory, or through pinned buffers that threads fill."""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from ..core.system import usable_cpu_count
from ..torch_internals.tensor_memory import version_of
from . import logger
from .subclasses import convert_inner, data_address, inner_tensors

CHUNK = 16 * 2**20  # bytes of a buffer of the ring
# What is smaller is pinned by itself: page-locking it, or handing it to another thread, takes as long as copying it.
SMALL = 2**20  # bytes
THREADS = 8

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
    source: Weights
    names: tuple[str, ...]
    size: int
    device: torch.device


class DeviceCopies:
    """What torch does to copy to one accelerator: memory on both sides, and a stream of its own.

    The memory on the device is allocated in that stream. Before the stream uses memory again, it waits for the streams
    that have computed with its copies. Tests put a slow device in the place of this class.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.Stream(device=device)
        # A stream keeps what its `with` block restores in itself, so that one thread at a time may be in the block.
        self._entering = threading.Lock()
        self._users: dict[int, torch.Stream] = {}
        # Elsewhere nothing tells which addresses are those of files.
        self.page_locks: bool = device.type == "cuda" and sys.platform == "linux"

    def after_compute(self) -> None:
        """Let the next copies wait for all that the device has been given to compute so far."""
        for stream in self._users.values():
            self._stream.wait_stream(stream)

    def empty_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Memory on the device for a copy of a tensor."""
        with self._entering, self._stream:
            return torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self._device
            )

    def copy(self, host: torch.Tensor, target: torch.Tensor) -> Any:
        """Copy pinned memory to the device. Returns the event behind the copy."""
        with self._entering, self._stream:
            target.copy_(host, non_blocking=True)
            event = torch.Event(self._device, blocking=True)
            self._stream.record_event(event)
        return event

    def receive(self, copied: Any) -> None:
        """Let the current stream of the device compute with a copy."""
        stream = torch.accelerator.current_stream(self._device)
        self._users[stream.stream_id] = stream
        stream.wait_event(copied)

    def pinned(self, size: int) -> torch.Tensor:
        """A pinned buffer of `size` bytes."""
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """A pinned copy of a small tensor. Its memory is not used again before the copies from it are done."""
        return tensor.pin_memory()

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether the memory of a tensor is pinned or page-locked."""
        return tensor.is_pinned()

    def lock(self, storage: torch.UntypedStorage) -> bool:
        """Page-lock memory in place. Returns False if the system does not allow it."""
        runtime: Any = torch.cuda.cudart()
        if int(runtime.cudaHostRegister(storage.data_ptr(), storage.nbytes(), 0)) == 0:
            return True
        try:
            # The CUDA runtime keeps the error, and the next kernel of this thread would raise it.
            torch.ones(1, device=self._device)
        except RuntimeError as error:
            logger.debug(f"weights were not page-locked: {error}")
        return False

    def unlock(self, storages: list[torch.UntypedStorage]) -> None:
        """Release page-locked memory when the copies from it are done."""
        self._stream.synchronize()
        runtime: Any = torch.cuda.cudart()
        for storage in storages:
            runtime.cudaHostUnregister(storage.data_ptr())


@dataclass(eq=False)
class Transfer:
    """The weights of one module on their way to the device, or there.

    Fields:
        values: the weights on the device, by name.
        copied: the events behind copies from pinned memory.
        filling: the copies through the ring. Each results in the event behind it.
        sources: the weights that are copied, each with its number of writes at the start.
    """

    values: dict[str, torch.Tensor] = field(default_factory=dict)
    copied: list[Any] = field(default_factory=list)
    filling: list[Future[Any]] = field(default_factory=list)
    sources: list[tuple[torch.Tensor, int]] = field(default_factory=list)

    def is_current(self) -> bool:
        """Whether nobody has written to the weights since the start."""
        return all(version_of(weight) == version for weight, version in self.sources)


class WeightCopies:
    """Copies the weights of modules to one device, in the background.

    Weights in ordinary memory are page-locked where they are, until `close`. Those of files, and those that cannot be
    locked, go through a ring of pinned buffers: threads fill them, so that reading, filling and copying overlap.
    """

    minimum = 0  # bytes
    copies = True

    def __init__(self, device: DeviceCopies) -> None:
        self._device = device
        self._ring: _Ring | None = None
        # For each request that was seen, the weights in files that stay mapped.
        self._mapped: WeakKeyDictionary[FetchRequest, Weights] = WeakKeyDictionary()
        self._locked: list[torch.UntypedStorage] = []
        weakref.finalize(self, _unlock, device, self._locked)

    def begin(self, request: FetchRequest) -> Transfer:
        """Begin to copy the weights of a module."""
        mapped = self._mapped.get(request)
        if mapped is None:
            mapped = self._mapped[request] = self._prepare(request)
        transfer = Transfer()
        self._device.after_compute()
        # Another forward may train with these weights.
        with torch.inference_mode(False):
            send = functools.partial(self._send, transfer)
            for name in request.names:
                weight = mapped.get(name)
                if weight is None:
                    weight = request.source[name]
                transfer.values[name] = convert_inner(weight, send)
        return transfer

    def finish(self, transfer: Transfer) -> Weights:
        """The weights for the current stream of the device. Raises what went wrong while they were read."""
        for filling in transfer.filling:
            self._device.receive(filling.result())
        for copied in transfer.copied:
            self._device.receive(copied)
        return transfer.values

    def cancel(self, transfer: Transfer) -> None:
        """End a transfer that nobody needs. Copies in the stream go on: its next copies come after them."""
        for filling in transfer.filling:
            filling.cancel()
        wait(transfer.filling)

    def close(self) -> None:
        """Release the page-locked memory, the ring and its threads."""
        if self._ring is not None:
            self._ring.close()
            self._ring = None
        self._mapped.clear()
        _unlock(self._device, self._locked)

    def _send(self, transfer: Transfer, weight: torch.Tensor) -> torch.Tensor:
        weight = weight.detach()
        if not weight.is_inference():
            version = version_of(weight)
            transfer.sources.append((weight, version))
        if not _is_compact(weight):
            weight = weight.contiguous()
        target = self._device.empty_like(weight)
        source = _bytes(weight)
        destination = _bytes(target)
        is_pinned = self._device.is_pinned(source)
        if not is_pinned and weight.nbytes < SMALL:
            source = self._device.pin(source)
            is_pinned = True
        if is_pinned:
            copied = self._device.copy(source, destination)
            transfer.copied.append(copied)
            return target
        if self._ring is None:
            self._ring = _Ring(self._device)
        filling = self._ring.send(source, destination)
        transfer.filling.extend(filling)
        return target

    def _prepare(self, request: FetchRequest) -> dict[str, torch.Tensor]:
        """Page-lock the weights of a module that are in ordinary memory. Returns those to be read no more."""
        weights = {name: request.source[name] for name in request.names}
        again = {name: request.source[name] for name in request.names}
        files = _mapped_files()
        mapped: dict[str, torch.Tensor] = {}
        for name, weight in weights.items():
            address = data_address(weight)
            is_same = address == data_address(again[name])
            is_in_file = any(begin <= address < end for begin, end in files)
            if is_in_file and not is_same:
                # The file stays mapped: mapping its pages takes as long as reading them.
                mapped[name] = weight
            if is_same and not is_in_file:
                # What is read into memory anew each time would stay there.
                self._lock(weight)
        return mapped

    def _lock(self, weight: torch.Tensor) -> None:
        if not self._device.page_locks:
            return
        for inner in inner_tensors(weight).values():
            storage = inner.untyped_storage()
            if storage.nbytes() < SMALL or self._device.is_pinned(inner):
                continue
            if self._device.lock(storage):
                self._locked.append(storage)
            else:
                _warn_once()


class _Ring:
    """Pinned buffers that several threads fill, each used again when the copy from it is done."""

    def __init__(self, device: DeviceCopies) -> None:
        self._device = device
        threads = min(THREADS, usable_cpu_count())
        self._executor = ThreadPoolExecutor(threads, "weights")
        self._buffers: SimpleQueue[tuple[torch.Tensor, Any]] = SimpleQueue()
        for _ in range(threads + 2):
            self._buffers.put((device.pinned(CHUNK), None))

    def send(self, host: torch.Tensor, target: torch.Tensor) -> list[Future[Any]]:
        """Copy bytes to the device in parts."""
        parts = deque(zip(host.split(CHUNK), target.split(CHUNK), strict=True))
        return [self._executor.submit(self._copy, parts) for _ in range(len(parts))]

    def _copy(self, parts: deque[tuple[torch.Tensor, torch.Tensor]]) -> Any:
        # Not as arguments: the executor keeps those for longer than the copy takes.
        host, target = parts.popleft()
        buffer, copied = self._buffers.get()
        try:
            if copied is not None:
                copied.synchronize()
            part = buffer[: host.numel()]
            # Without the interpreter's lock, and in this thread alone.
            np.copyto(part.numpy(), host.numpy())
            copied = self._device.copy(part, target)
        finally:
            self._buffers.put((buffer, copied))
        return copied

    def close(self) -> None:
        self._executor.shutdown()


def _is_compact(tensor: torch.Tensor) -> bool:
    """Whether the memory of a tensor has no gaps, whatever the order of its dimensions there."""
    last = 0
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        last += (size - 1) * stride
    return last + 1 == tensor.numel()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a compact tensor."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _unlock(device: DeviceCopies, storages: list[torch.UntypedStorage]) -> None:
    if storages:
        device.unlock(storages)
        storages.clear()


def _mapped_files() -> list[tuple[int, int]]:
    """The addresses of this process where files are mapped. A lock would copy a private mapping to memory."""
    ranges: list[tuple[int, int]] = []
    if sys.platform != "linux":
        return ranges
    with open("/proc/self/maps") as lines:
        for line in lines:
            addresses, _, _, _, inode, *_ = line.split()
            if inode != "0":
                begin, end = addresses.split("-")
                ranges.append((int(begin, 16), int(end, 16)))
    return ranges


@functools.cache
def _warn_once() -> None:
    logger.warning(
        "Offloaded weights cannot be page-locked here. They are copied to the device through pinned buffers, which "
        "takes time of the processors."
    )
