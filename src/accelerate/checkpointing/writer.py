# SPDX-License-Identifier: Apache-2.0
"""Saving in the background: a copy of the state in reused host memory, one thread, errors raised by the next call.

Peak extra memory: one copy of what this rank writes, kept for the next save. A second save waits for the first.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ..core.devices import kind_of
from ..core.errors import CheckpointError
from ..core.trees import map_leaves
from .files import BlockIO, Segment, host_view, is_host, nbytes
from .pending import PendingCheckpoint
from .saving import SaveRanks, complete

logger: logging.Logger = logging.getLogger(__name__)

_ALIGN = 64  # bytes; the widest vector registers
_UNNOTICED = 1.0  # seconds that a save waits for the one before without a message


@dataclass
class _Job:
    thread: threading.Thread
    folder: str
    began: float = field(default_factory=time.monotonic)
    error: BaseException | None = None


class Writer:
    """Writes one save at a time in a background thread. Pass it to `save_run`, and keep it for the next save.

    `wait` returns when the current save is written, and raises its error. `save_run` calls it first, so an error
    appears at the next save; call it at the end of a run. A save that is still being written is finished at exit.

    Example:
        writer = Writer()
        save_run(run, "run/checkpoints/checkpoint_3", process=state, writer=writer)  # returns when copied
        writer.wait()
    """

    def __init__(self) -> None:
        self.seconds: float = 0.0  # that the last save took in the background
        self._job: _Job | None = None
        self._buffer: torch.Tensor | None = None

    @property
    def is_done(self) -> bool:
        """Whether the last save is complete."""
        job = self._job
        return job is None or not (job.thread.is_alive() or job.error)

    def wait(self, for_save: bool = False) -> None:
        """Wait for what is being written; raise its error, once. `for_save`: the next save waits."""
        job = self._job
        if job is None:
            return
        if for_save:
            job.thread.join(_UNNOTICED)
            if job.thread.is_alive():
                logger.warning(
                    "the next save waits for %s, whose save has been running for %.0f s: saves take "
                    "longer than the interval between them",
                    job.folder,
                    time.monotonic() - job.began,
                )
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
            begin = time.perf_counter()
            try:
                complete(pending, ranks)
            except BaseException as error:
                job.error = error
            finally:
                pending.files.clear()
                self.seconds = time.perf_counter() - begin

        job.thread.start()
        self._job = job
        _UNFINISHED.add(self)

    def copy(self, pending: PendingCheckpoint) -> None:
        """Copy the state to host memory, so that training can continue."""
        # The pieces of files that are tensors, each with its list.
        tensors = []
        places = []
        for pieces in pending.files.values():
            for index, piece in enumerate(pieces):
                if isinstance(piece, torch.Tensor):
                    tensors.append(piece)
                    places.append((pieces, index))
        for (pieces, index), copied in zip(places, self._snapshot(tensors), strict=True):
            pieces[index] = copied
        # Pickled files keep their structure; they are an old format, copied the plain way.
        pending.pickled = map_leaves(
            lambda tensor: tensor.detach().to("cpu", copy=True), pending.pickled
        )

    def _snapshot(self, tensors: Sequence[torch.Tensor]) -> list[Segment]:
        """Copies of the tensors in one buffer, which is kept: memory that is mapped takes a copy at full speed."""
        starts = []
        size = 0
        devices = set()
        for tensor in tensors:
            starts.append(size)
            size += -(-nbytes(tensor) // _ALIGN) * _ALIGN
            if tensor.device.type != "cpu":
                devices.add(tensor.device)
        if self._buffer is None or self._buffer.numel() < size:
            is_pinned = any(kind_of(device).pin_memory for device in devices)
            self._buffer = None
            self._buffer = torch.empty(size, dtype=torch.uint8, pin_memory=is_pinned)
        copies: list[Segment] = []
        pairs = []
        for tensor, start in zip(tensors, starts, strict=True):
            if not tensor.numel():
                copies.append(b"")
                continue
            buffer = self._buffer[start : start + nbytes(tensor)]
            copies.append(host_view(buffer))
            if is_host(tensor):
                pairs.append((host_view(tensor), host_view(buffer)))
            else:
                shaped = buffer.view(tensor.dtype).view(tensor.shape)
                shaped.copy_(tensor.detach(), non_blocking=True)
        with BlockIO() as io:
            io.copy(pairs)
        for device in devices:
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
