# SPDX-License-Identifier: Apache-2.0
"""Copies of weights to an accelerator: from page-locked memory, or through pinned buffers that threads fill."""

from __future__ import annotations

import functools
import sys
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch

from ..core.system import usable_cpu_count
from ..torch_internals.tensor_memory import version_of
from . import logger
from .subclasses import convert_inner, inner_tensors

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
        self._users: dict[int, torch.Stream] = {}
        # Which addresses are those of files is known on Linux.
        self.page_locks: bool = device.type == "cuda" and sys.platform == "linux"

    def after_compute(self) -> None:
        """Let the next copies wait for all that the device has been given to compute so far."""
        for stream in self._users.values():
            self._stream.wait_stream(stream)

    def empty_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Memory on the device for a copy of a tensor."""
        with self._stream:
            return torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self._device
            )

    def copy(self, host: torch.Tensor, target: torch.Tensor) -> Any:
        """Copy pinned memory to the device. Returns the event behind the copy."""
        with self._stream:
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
        self._seen: set[int] = set()
        self._locked: list[torch.UntypedStorage] = []
        weakref.finalize(self, _unlock, device, self._locked)

    def begin(self, request: FetchRequest) -> Transfer:
        """Begin to copy the weights of a module."""
        if request.module not in self._seen:
            self._seen.add(request.module)
            self._lock(request)
        transfer = Transfer()
        self._device.after_compute()
        # Another forward may train with these weights.
        with torch.inference_mode(False):
            send = functools.partial(self._send, transfer)
            for name in request.names:
                transfer.values[name] = convert_inner(request.source[name], send)
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
        self._seen = set()
        _unlock(self._device, self._locked)

    def _send(self, transfer: Transfer, weight: torch.Tensor) -> torch.Tensor:
        weight = weight.detach()
        if not weight.is_inference():
            transfer.sources.append((weight, version_of(weight)))
        steps = zip(weight.shape, weight.stride(), strict=True)
        if 1 + sum((size - 1) * stride for size, stride in steps) != weight.numel():
            weight = weight.contiguous()
        target = self._device.empty_like(weight)
        host = _bytes(weight)
        is_pinned = self._device.is_pinned(host)
        if not is_pinned and host.numel() < SMALL:
            host = self._device.pin(host)
            is_pinned = True
        if is_pinned:
            transfer.copied.append(self._device.copy(host, _bytes(target)))
        else:
            if self._ring is None:
                self._ring = _Ring(self._device)
            transfer.filling += self._ring.send(host, _bytes(target))
        return target

    def _lock(self, request: FetchRequest) -> None:
        """Page-lock the weights of a module that are in ordinary memory."""
        if not self._device.page_locks:
            return
        files = list(_mapped_files())
        for name in request.names:
            # A mapping may read a weight anew each time. Locking would keep it in memory.
            again = inner_tensors(request.source[name])
            for key, inner in inner_tensors(request.source[name]).items():
                storage = inner.untyped_storage()
                address = storage.data_ptr()
                if storage.nbytes() < SMALL or self._device.is_pinned(inner):
                    continue
                if again[key].untyped_storage().data_ptr() != address:
                    continue
                # A private mapping of a file would be copied to memory by the lock.
                if any(begin <= address < end for begin, end in files):
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


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor without gaps, whatever the order of its dimensions there."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _unlock(device: DeviceCopies, storages: list[torch.UntypedStorage]) -> None:
    if storages:
        device.unlock(storages)
        storages.clear()


def _mapped_files() -> Iterator[tuple[int, int]]:
    """The addresses of this process where files are mapped."""
    with open("/proc/self/maps") as lines:
        for line in lines:
            addresses, _, _, _, inode, *_ = line.split()
            if inode != "0":
                begin, end = addresses.split("-")
                yield int(begin, 16), int(end, 16)


@functools.cache
def _warn_once() -> None:
    logger.warning(
        "Offloaded weights cannot be page-locked here. They are copied to the device through pinned buffers, which "
        "takes time of the processors."
    )
