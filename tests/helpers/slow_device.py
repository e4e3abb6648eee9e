# SPDX-License-Identifier: Apache-2.0
"""An accelerator in the place of `DeviceCopies`: it copies slowly in a queue, counts its memory, and poisons it."""

import contextlib
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from accelerate.placement import streaming
from accelerate.placement.copies import WeightCopies


class Copied:
    """An event in the queue of copies."""

    def __init__(self, future):
        self.future = future

    def synchronize(self):
        self.future.result()


class SlowDevice:
    """Its memory is the host's, so that modules that run on the CPU compute on it.

    Memory on the device is filled with ones in all bits (NaN in floats) until a copy arrives, also where it is used
    again. With `far_behind` the device computes in a queue too, what `compute` is given; the process does not wait.
    """

    def __init__(self, far_behind=False, page_locks=True, allowed=True, delay=0.002):
        self.page_locks, self.allowed, self.delay = page_locks, allowed, delay
        self.copies = ThreadPoolExecutor(1, "device copies")
        self.queue = ThreadPoolExecutor(1, "device") if far_behind else None
        self.guard = threading.RLock()
        self.closed = False
        self.free, self.allocations, self.used, self.peak = {}, 0, 0, 0
        self.locked, self.pinned_at, self.blocks = {}, {}, {}
        # The modules whose copies were begun, by the prefix of their weights; those that were begun when the module
        # started and not before; and the bytes of each copy.
        self.fetched, self.late, self.copied = [], [], []

    def compute(self, function):
        self.queue.submit(function)

    def after_compute(self):
        if self.queue is not None:
            computed = self.queue.submit(int)
            self.copies.submit(computed.result)

    def empty_like(self, tensor):
        size = tensor.nbytes
        with self.guard:
            memory = self.free.get(size, [])
            if memory:
                block = memory.pop()
            else:
                block = np.empty(max(size, 1), np.uint8)
                self.allocations += 1
            self.used += size
            self.peak = max(self.peak, self.used)
        if self.queue is None:
            block[:] = 255
        flat = torch.from_numpy(block.view())[:size]
        self.blocks[flat.untyped_storage().data_ptr()] = block
        weakref.finalize(flat.untyped_storage(), self.release, size, block)
        return flat.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())

    def alias(self, tensor):
        """The memory of a tensor on the device, as bytes. It does not keep the tensor."""
        block = self.blocks[tensor.untyped_storage().data_ptr()]
        begin = tensor.storage_offset() * tensor.itemsize
        return block[begin : begin + tensor.nbytes]

    def release(self, size, block):
        with self.guard:
            self.used -= size
            self.free.setdefault(size, []).append(block)

    def copy(self, host, target):
        assert self.is_pinned(host), "a copy from memory that can be moved is not asynchronous"

        # A device keeps no tensor: what it works with are addresses.
        memory = [host.numpy(), self.alias(target)]

        def slow():
            time.sleep(self.delay)
            source, destination = memory
            memory.clear()
            np.copyto(destination, source)

        self.copied.append(host.numel())
        return Copied(self.copies.submit(slow))

    def receive(self, copied):
        if self.queue is None:
            copied.synchronize()
        else:
            self.queue.submit(copied.synchronize)

    def pinned(self, size):
        return self.pin(torch.empty(size, dtype=torch.uint8))

    def pin(self, tensor):
        tensor = tensor.clone()
        storage = tensor.untyped_storage()
        with self.guard:
            self.pinned_at[storage.data_ptr()] = storage.nbytes()
        weakref.finalize(storage, self.pinned_at.pop, storage.data_ptr())
        return tensor

    def is_pinned(self, tensor):
        address = tensor.data_ptr()
        with self.guard:
            ranges = [*self.pinned_at.items(), *self.locked.items()]
        return any(begin <= address < begin + size for begin, size in ranges)

    def lock(self, storage):
        if self.allowed:
            assert storage.data_ptr() not in self.locked
            self.locked[storage.data_ptr()] = storage.nbytes()
        return self.allowed

    def unlock(self, storages):
        if not self.closed:
            self.copies.submit(int).result()
        for storage in storages:
            del self.locked[storage.data_ptr()]


class Recorded(WeightCopies):
    """Copies that tell the device for which module they are, and whether they were begun ahead."""

    finished = 0

    def begin(self, request):
        transfer = super().begin(request)
        transfer.prefix = getattr(request.source, "prefix", request.module)
        transfer.begun = self.finished
        self._device.fetched.append(transfer.prefix)
        return transfer

    def finish(self, transfer):
        if transfer.begun == self.finished:
            self._device.late.append(transfer.prefix)
        self.finished += 1
        return super().finish(transfer)


@contextlib.contextmanager
def slow_device(monkeypatch, **options):
    """Inside the block weights are copied to a slow device, also for modules that run on the CPU."""
    device = SlowDevice(**options)
    with monkeypatch.context() as patch:
        patch.setattr(streaming, "carrier_for", lambda _: Recorded(device))
        try:
            yield device
        finally:
            device.closed = True
    for queue in (device.copies, device.queue):
        if queue is not None:
            queue.shutdown()
