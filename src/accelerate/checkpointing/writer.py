# SPDX-License-Identifier: Apache-2.0
"""Saving in the background: a copy of the state in reused host memory, one thread, errors raised by the next call.

Peak extra memory: one copy of what this rank writes, kept for the next save. A second save waits for the first.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..core.devices import kind_of
from ..core.errors import CheckpointError
from ..core.trees import map_leaves
from .files import BlockIO, Segment, host_view, is_host, nbytes
from .ranks import SaveRanks
from .saving import PendingCheckpoint, complete

logger: logging.Logger = logging.getLogger(__name__)

_ALIGN = 64  # bytes; the widest vector registers


@dataclass
class _Job:
    thread: threading.Thread
    folder: str
    error: BaseException | None = None


class Writer:
    """Writes one save at a time in a background thread. Hand it to `save_run`; keep it for the next save.

    `wait` returns when nothing is being written; it raises the error of the save that was. `save_run` calls it first,
    so an error surfaces at the next save; call it at the end of a run. At exit what is being written is finished.

    Example:
        writer = Writer()
        save_run(run, "run/checkpoints/checkpoint_3", process=state, writer=writer)  # returns when copied
        writer.wait()
    """

    def __init__(self) -> None:
        self._job: _Job | None = None
        self._buffer: torch.Tensor | None = None

    def wait(self) -> None:
        """Wait for what is being written; raise its error, once."""
        job = self._job
        if job is None:
            return
        job.thread.join()
        self._job = None
        _UNFINISHED.discard(self)
        if job.error is not None:
            raise CheckpointError(
                f"the background save of {job.folder} failed: {job.error}"
            ) from job.error

    def submit(self, pending: PendingCheckpoint) -> None:
        """Write a pending checkpoint, whose state was copied, in the background."""
        # A separate agreement: messages of the training and other saves never wait for this one.
        ranks = SaveRanks(
            pending.process, pending.folder, pending.options.timeout, "checkpoint-writer"
        )
        job = _Job(
            threading.Thread(name="checkpoint-writer", target=lambda: _run(job)),
            str(pending.folder),
        )

        def _run(job: _Job) -> None:
            try:
                complete(pending, ranks)
            except BaseException as error:
                job.error = error
            finally:
                pending.files.clear()

        job.thread.start()
        self._job = job
        _UNFINISHED.add(self)

    def copy(self, pending: PendingCheckpoint) -> None:
        """Copy the state to host memory, so that training can continue."""
        pieces = itertools.chain.from_iterable(pending.files.values())
        tensors = [piece for piece in pieces if isinstance(piece, torch.Tensor)]
        copies = iter(self._snapshot(tensors))
        pending.files = {
            name: [next(copies) if isinstance(piece, torch.Tensor) else piece for piece in pieces]
            for name, pieces in pending.files.items()
        }
        # Pickled files keep their structure; they are an old format, copied the plain way.
        pending.pickled = map_leaves(
            lambda tensor: tensor.detach().to("cpu", copy=True), pending.pickled
        )

    def _snapshot(self, tensors: Sequence[torch.Tensor]) -> list[Segment]:
        """Copies of the tensors in one buffer, which is kept: memory that is mapped takes a copy at full speed."""
        places = []
        size = 0
        for tensor in tensors:
            places.append(size)
            size += -(-nbytes(tensor) // _ALIGN) * _ALIGN
        if self._buffer is None or self._buffer.numel() < size:
            device = next(
                (tensor.device for tensor in tensors if tensor.device.type != "cpu"), None
            )
            pin = device is not None and kind_of(device).pin_memory
            self._buffer = None
            self._buffer = torch.empty(size, dtype=torch.uint8, pin_memory=pin)
        copies: list[Segment] = []
        pairs = []
        for tensor, start in zip(tensors, places, strict=True):
            place = self._buffer[start : start + nbytes(tensor)]
            copies.append(host_view(place) if tensor.numel() else b"")
            if is_host(tensor) and tensor.numel():
                pairs.append((host_view(tensor), host_view(place)))
            elif tensor.numel():
                place.view(tensor.dtype).view(tensor.shape).copy_(
                    tensor.detach(), non_blocking=True
                )
        with BlockIO() as io:
            io.copy(pairs)
        for device in {tensor.device for tensor in tensors if tensor.device.type != "cpu"}:
            torch.accelerator.synchronize(device)
        return copies

    def release(self) -> None:
        """Free the host buffer. The next save allocates a new one."""
        self.wait()
        self._buffer = None


_UNFINISHED: set[Writer] = set()  # whose last saves nobody has waited for


@atexit.register
def _report_errors() -> None:
    """The interpreter has waited for the threads: log what no call raises any more."""
    for writer in list(_UNFINISHED):
        try:
            writer.wait()
        except CheckpointError as error:
            logger.error("%s", error)
