# SPDX-License-Identifier: Apache-2.0
"""Writes the records and events of one rank in a background thread, and keeps the files bounded and complete."""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import math
import os
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import psutil

from ..core import env, memory
from ..core.errors import ConfigurationError
from ..runtime import hang_watch, marks
from .records import (
    HEADER_SIZE,
    STEP,
    events_file,
    header_bytes,
    read_header,
    steps_file,
)

logger: logging.Logger = logging.getLogger(__name__)

# Seconds between two writes, which is what a killed process loses, and between two looks at the memory.
INTERVAL = 0.2
_MEMORY_INTERVAL = 1.0
# Steps at which the older half of a file is merged pairwise, and most records that wait for a slow disk.
MOST_RECORDS = 1 << 18
_MOST_WAITING = 1 << 16
_ROW = struct.Struct("<d4I16f")
assert _ROW.size == STEP.itemsize

# What steps leave: the moment on the clock of `perf_counter`, step, steps, epoch, flags, seconds, the phases, longest,
# samples, tokens, loss, learning rate, and what is read later: None, the gradient norm on the host, or a function that
# returns loss and norm, which are on a device: None while they are not here, unless its argument is True.
Step = tuple[Any, ...]
# The place of the optimizer's seconds in it, less the moment.
_OPTIMIZER = 10
# Samples or tokens of a step in which none were counted: no sum of counts is negative.
NONE_READ = -0.0


class TelemetryWriter:
    """The two files of one rank. An error of the disk stops the recording, with one warning.

    Args:
        folder: of the run.
        rank: of this process.
        details: of the header, and `world_size`.
        device_memory: returns the bytes allocated on the device; None for the CPU.
        dump_memory: called with the folder and the rank when memory has run out; see `memory_dump`.
    """

    _open: ClassVar[dict[Path, TelemetryWriter]] = {}

    def __init__(
        self,
        folder: Path,
        rank: int,
        device_memory: Callable[[], float] | None = None,
        dump_memory: Callable[[Path, int], dict[str, Path]] | None = None,
        **details: Any,
    ) -> None:
        self.folder = folder
        self._rank = rank
        self._dump_memory = dump_memory
        self._steps_path = steps_file(folder, rank)
        self._events_path = events_file(folder, rank)
        self._header = header_bytes(rank, **details)
        self._device_memory = device_memory
        self._records: deque[Step] = deque(maxlen=_MOST_WAITING)
        self._held: Step | None = None  # the oldest, while the device computes its values
        self._events: deque[dict[str, Any]] = deque(maxlen=_MOST_WAITING)
        self.append: Callable[[Step], None] = self._records.append
        # Called at each interval, and before this is closed.
        self.before_write: list[weakref.WeakMethod[Callable[[], None]]] = []
        self.before_close: list[weakref.WeakMethod[Callable[[], None]]] = []
        self._users = 0
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._steps = self._events_fd = -1
        self._count = 0
        # Of the records so far, for those who publish them: samples and tokens of all, the loss of the last.
        self.samples: float = math.nan
        self.tokens: float = math.nan
        self.loss: float = math.nan
        self.memory: tuple[float, float] = (math.nan, math.nan)  # bytes on the device and on the host
        self._memory_at = -math.inf
        self._memory_info = psutil.Process().memory_info
        self._start()

    @classmethod
    def shared(cls, folder: Path, rank: int, **options: Any) -> TelemetryWriter:
        """The writer of this process for a folder: objects that record into one folder share it."""
        key = steps_file(folder.absolute(), rank)
        found = cls._open.get(key)
        if found is None or found._pid != os.getpid() or found.closed:
            found = cls._open[key] = cls(folder.absolute(), rank, **options)
        found._users += 1
        return found

    @property
    def closed(self) -> bool:
        """Whether nothing more is written."""
        return self._stop.is_set()

    def event(self, name: str, **fields: Any) -> None:
        """Record an event that happens now."""
        self._events.append({"time": time.time(), "event": name, **fields})

    def _hang(self, message: str) -> None:
        self.event("hang", message=message)

    def _out_of_memory(self, error: BaseException) -> None:
        self.event("out_of_memory", message=(str(error).splitlines() or [type(error).__name__])[0][:500])
        if self._dump_memory is not None:
            try:
                for name, path in self._dump_memory(self.folder, self._rank).items():
                    self.event("out_of_memory", message=f"{name} of rank {self._rank}", path=str(path))
            except Exception as failure:
                # What an allocator reports differs between devices and versions of torch.
                self.event("warning", message=f"the memory of rank {self._rank} cannot be written: {failure!r}"[:500])

    def release(self) -> None:
        """Write everything and close the files, when the last user releases them."""
        self._users -= 1
        if self._users <= 0:
            self.close()

    def close(self) -> None:
        """Write everything and close the files."""
        if self.closed or self._pid != os.getpid():
            return
        _call(self.before_close)
        self._stop.set()
        atexit.unregister(self.close)
        hang_watch.on_report.remove(self._hang)
        memory.exhausted_hooks.remove(self._out_of_memory)
        self.event("end", **self._process())
        self.flush(wait=True)
        with self._lock:
            self.append = _discard
            for descriptor in (self._steps, self._events_fd):
                if descriptor >= 0:
                    os.close(descriptor)
            self._steps = self._events_fd = -1
        for key in [key for key, writer in self._open.items() if writer is self]:
            del self._open[key]

    def flush(self, wait: bool = False) -> None:
        """Write what was recorded. `wait`: also records whose values a device still computes."""
        with self._lock:
            if self._steps < 0:
                return
            try:
                self._write_records(wait)
                self._write_events()
            except OSError as error:
                self._fail(error)

    # -- files

    def _start(self) -> None:
        try:
            self._steps_path.parent.mkdir(parents=True, exist_ok=True)
            self._open_steps()
            self._events_fd = os.open(self._events_path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
            _drop_incomplete_line(self._events_fd)
        except OSError as error:
            self._fail(error)
            return
        self.event("start", **self._process())
        hang_watch.on_report.append(self._hang)
        memory.exhausted_hooks.append(self._out_of_memory)
        threading.Thread(target=self._run, name="accelerate-telemetry", daemon=True).start()
        atexit.register(self.close)

    @staticmethod
    def _process() -> dict[str, Any]:
        return {"pid": os.getpid(), "restart": env.get_int("TORCHELASTIC_RESTART_COUNT") or 0}

    def _open_steps(self) -> None:
        path = self._steps_path
        if path.exists() and path.stat().st_size:
            try:
                fits = read_header(path)[1] == STEP
            except ConfigurationError:
                fits = False
            if not fits:
                # Of another version, or cut off in its header.
                os.replace(path, path.with_suffix(".steps.old"))
        self._steps = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        size = os.fstat(self._steps).st_size
        if not size:
            _write_all(self._steps, self._header)
            size = HEADER_SIZE
        self._count, rest = divmod(size - HEADER_SIZE, STEP.itemsize)
        if rest:
            os.ftruncate(self._steps, size - rest)

    def _run(self) -> None:
        while not self._stop.wait(INTERVAL):
            _call(self.before_write)
            self.flush()

    def _write_records(self, wait: bool) -> None:
        if not self._records and self._held is None:
            return
        self._measure_memory()
        if rows := self._take(wait):
            self._append_rows(b"".join(rows), len(rows))
        if self._count >= MOST_RECORDS:
            self._merge()

    def _take(self, wait: bool) -> list[bytes]:
        """The records that wait, up to the first whose values are not here."""
        # Without arrays: this is a few records each time, for which the step waits.
        rows = []
        clock = time.time() - time.perf_counter()
        while self._held is not None or self._records:
            found = self._held or self._records.popleft()
            self._held = None
            now, *fields, samples, tokens, loss, rate, late = found
            norm = math.nan
            if callable(late):
                values = late(wait)
                if values is None:
                    self._held = found
                    break
                loss = values[0] if loss != loss else loss
                norm = values[1]
            elif late is not None:
                norm = float(late)
            self.samples, samples = _added(self.samples, samples)
            self.tokens, tokens = _added(self.tokens, tokens)
            row = _packed(now + clock, *fields, samples, tokens, loss, norm, rate, *self.memory)
            rows.append(row)
            # Records in which no step is split into phases have no loss.
            if fields[_OPTIMIZER] == fields[_OPTIMIZER]:
                self.loss = float(loss)
        return rows

    def _append_rows(self, data: bytes, count: int) -> None:
        try:
            _write_all(self._steps, data)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._steps, HEADER_SIZE + self._count * STEP.itemsize)
            raise
        self._count += count

    def _merge(self) -> None:
        """Merge the older half of the records pairwise, and replace the file."""
        with open(self._steps_path, "rb") as file:
            header = file.read(HEADER_SIZE)
            rows = np.frombuffer(file.read(self._count * STEP.itemsize), STEP)
        half = len(rows) // 2
        rows = np.concatenate([merged(rows[:half]), rows[half:]])
        partial = self._steps_path.with_suffix(".steps.partial")
        with open(partial, "wb") as file:
            file.write(header)
            file.write(rows.tobytes())
        os.replace(partial, self._steps_path)
        os.close(self._steps)
        self._steps = os.open(self._steps_path, os.O_RDWR | os.O_APPEND)
        self._count = len(rows)

    def _write_events(self) -> None:
        lines = []
        while self._events:
            lines.append(json.dumps(self._events.popleft(), default=str) + "\n")
        if lines:
            size = os.fstat(self._events_fd).st_size
            try:
                _write_all(self._events_fd, "".join(lines).encode())
            except OSError:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._events_fd, size)
                raise

    def _measure_memory(self) -> None:
        now = time.monotonic()
        if now - self._memory_at < _MEMORY_INTERVAL:
            return
        self._memory_at = now
        device = math.nan if self._device_memory is None else self._device_memory()
        self.memory = (device, float(self._memory_info().rss))

    def _fail(self, error: OSError) -> None:
        """Stop the recording: training is worth more."""
        self._stop.set()
        self.append = _discard
        self._records.clear()
        self._events = deque(maxlen=0)
        self.samples = math.nan
        self.tokens = math.nan
        self.loss = math.nan
        for descriptor in (self._steps, self._events_fd):
            if descriptor >= 0:
                os.close(descriptor)
        self._steps = self._events_fd = -1
        atexit.unregister(self.close)
        if marks.is_first(f"telemetry/{self.folder}"):
            logger.warning(
                "telemetry: %s cannot be written (rank %d: %s): the run continues without records of this rank, "
                "and of others on this machine that cannot write",
                self.folder, self._rank, error,
            )  # fmt: skip


def merged(rows: np.ndarray[Any, np.dtype[Any]]) -> np.ndarray[Any, np.dtype[Any]]:
    """Steps with neighbours merged pairwise. A pair in which the steps are not ascending stays as it is."""
    if len(rows) < 2:
        return rows
    paired = rows[: len(rows) // 2 * 2].reshape(-1, 2)
    first, last = paired[:, 0], paired[:, 1]
    both = last.copy()
    both["steps"] = first["steps"] + last["steps"]
    both["flags"] = first["flags"] | last["flags"]
    for name in ("seconds", "data", "transfer", "forward", "backward", "communication", "optimizer", "checkpoint"):
        total = first[name].astype("f8") * first["steps"] + last[name].astype("f8") * last["steps"]
        both[name] = total / both["steps"]
    both["longest"] = np.fmax(first["longest"], last["longest"])
    for name in ("samples", "tokens"):
        both[name] = first[name] + last[name]
    fits = last["step"] > first["step"]
    pieces = [both] if fits.all() else [both[i : i + 1] if good else paired[i] for i, good in enumerate(fits)]
    return np.concatenate([*pieces, rows[len(paired) * 2 :]])


def _call(references: list[weakref.WeakMethod[Callable[[], None]]]) -> None:
    for reference in references:
        if (call := reference()) is not None:
            call()


def _added(total: float, counted: float) -> tuple[float, float]:
    """The total with what a record has counted, and that number, which is NaN if nothing was counted."""
    if counted == 0 and math.copysign(1.0, counted) < 0:
        return total, math.nan
    if counted != counted:
        return total, counted
    return (counted if total != total else total + counted), counted


def _packed(*fields: float) -> bytes:
    """A row. A number too large for single precision is infinite."""
    try:
        return _ROW.pack(*fields)
    except OverflowError:
        return _ROW.pack(*fields[:5], *np.asarray(fields[5:], "f4").tolist())


def _discard(record: Step) -> None:
    pass


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _drop_incomplete_line(descriptor: int) -> None:
    """Remove what a killed process has left of its last line."""
    size = os.fstat(descriptor).st_size
    start = max(0, size - (1 << 20))
    tail = os.pread(descriptor, size - start, start)
    if tail and not tail.endswith(b"\n"):
        os.ftruncate(descriptor, start + tail.rfind(b"\n") + 1)
