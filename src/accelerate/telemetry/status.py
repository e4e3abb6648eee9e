# SPDX-License-Identifier: Apache-2.0
"""The newest state of each rank for its launcher: one small memory-mapped file a rank. Nothing here imports torch."""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ..core.files import lock_file

STARTING, TRAINING, EVALUATING, SAVING, ENDED = range(5)
STATES = ("starting", "training", "evaluating", "saving", "ended")

_STEP = struct.Struct("<IIQdIIIfddf")
_CHECKPOINT = struct.Struct("<dH")
_CHECKPOINT_AT = 128
_PATH_AT = _CHECKPOINT_AT + _CHECKPOINT.size
SIZE = 1024  # bytes of a file
_MAGIC = 0x41435331


class Status(NamedTuple):
    """What a rank has published.

    Fields:
        state: an index of `STATES`.
        step: optimizer steps of the run; 0 before the first.
        time: seconds since 1970 at the last change.
        epoch: the pass over the loader that is read, from 0.
        batch, batches: batches of it that were read, of how many; 0 where that is not known.
        loss: a recent one; NaN where it is not known.
        samples, tokens: this rank's part of what all ranks have processed since its start; NaN where not known.
        memory: most bytes allocated on its device; NaN on the CPU.
        checkpoint: the folder that was saved last; empty before the first save.
        saved: seconds since 1970 when it was.
    """

    state: int
    step: int
    time: float
    epoch: int
    batch: int
    batches: int
    loss: float
    samples: float
    tokens: float
    memory: float
    checkpoint: str
    saved: float


class StatusFile:
    """The file of this rank, open for writing. Writing makes no call to the operating system."""

    def __init__(self, path: Path) -> None:
        with open(path, "xb+") as file:
            file.truncate(SIZE)
            self._map = mmap.mmap(file.fileno(), SIZE)

    def write(self, *fields: float) -> None:
        """Publish the first ten fields of `Status`: those before the checkpoint."""
        _STEP.pack_into(self._map, 0, _MAGIC, *fields)

    def write_checkpoint(self, path: str, time: float) -> None:
        """Publish the checkpoint that was saved last."""
        text = path.encode(errors="surrogateescape")[-(SIZE - _PATH_AT) :]
        self._map[_PATH_AT : _PATH_AT + len(text)] = text
        _CHECKPOINT.pack_into(self._map, _CHECKPOINT_AT, time, len(text))


def new_folder() -> str | None:
    """A new folder for these files that only this user can read; in memory where that is possible.

    This process locks it until it ends. The folders of launchers that were killed, which have no lock, are removed.
    """
    if sys.platform == "win32":
        import tempfile

        return tempfile.mkdtemp(prefix="accelerate-")
    for root in ("/dev/shm", "/tmp"):
        for former in Path(root).glob("accelerate-launch-*"):
            with contextlib.suppress(OSError):
                descriptor = _locked(former)
                if os.fstat(descriptor).st_uid == os.geteuid():
                    shutil.rmtree(former)
                os.close(descriptor)
        path = f"{root}/accelerate-launch-{os.getpid()}-{time.monotonic_ns():x}"
        with contextlib.suppress(OSError):
            os.mkdir(path, 0o700)
            _locked(Path(path))
            return path
    return None


def _locked(folder: Path) -> int:
    """The descriptor of a folder, locked as long as it is open. OSError where another process has the lock."""
    # Windows has neither of the flags, and no such folders.
    flags = getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_NOFOLLOW", 0)
    descriptor = os.open(folder, os.O_RDONLY | flags)
    try:
        lock_file(descriptor)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def status_file(folder: Path, rank: int) -> Path:
    """The file of a rank in the launcher's folder."""
    return folder / f"rank_{rank:05d}.status"


def open_status(folder: str | None, rank: int) -> StatusFile | None:
    """The file of this rank; None without a launcher on this machine, or where another object has it already."""
    if not folder:
        return None
    with contextlib.suppress(OSError):
        return StatusFile(status_file(Path(folder), rank))
    return None


def read_status(path: Path) -> Status | None:
    """What a rank has published last; None where it has not begun."""
    try:
        with open(path, "rb") as file:
            data = file.read(SIZE)
    except OSError:
        return None
    if len(data) < SIZE:
        return None
    magic, state, step, time, epoch, batch, batches, loss, samples, tokens, memory = (
        _STEP.unpack_from(data)
    )
    if magic != _MAGIC or state >= len(STATES):
        return None
    saved, length = _CHECKPOINT.unpack_from(data, _CHECKPOINT_AT)
    checkpoint = os.fsdecode(data[_PATH_AT : _PATH_AT + length])
    return Status(
        state, step, time, epoch, batch, batches, loss, samples, tokens, memory, checkpoint, saved
    )


def statuses(folder: Path) -> Iterator[tuple[int, Status]]:
    """The rank and the status of each rank that has begun, in order."""
    for path in sorted(folder.glob("rank_*.status")):
        status = read_status(path)
        if status is not None:
            yield int(path.stem.removeprefix("rank_")), status
