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
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import psutil
import torch

from ..core import devices, env
from ..core.errors import ConfigurationError
from ..core.files import open_regular
from ..runtime import hang_watch, marks
from .records import (
    HEADER_SIZE,
    PHASES,
    STEP,
    events_file,
    header_bytes,
    read_header,
    steps_file,
)

logger: logging.Logger = logging.getLogger(__name__)

# Seconds between two writes, which is what a killed process loses.
INTERVAL = 0.2
# Steps at which the older half of a file is merged pairwise, and most records that wait for a slow disk.
MOST_RECORDS = 1 << 18
_MOST_WAITING = 1 << 16
_ROW = struct.Struct("<d4I16f")
assert _ROW.size == STEP.itemsize
_LOSS, _NORM = (list(STEP.fields or ()).index(name) for name in ("loss", "gradient_norm"))


class DeviceValues:
    """Copies numbers of a step from a device to the host without waiting for them.

    Args:
        device: of the run. If it has no streams, its numbers are not known: to read them would wait.
        values: numbers, and tensors of one element.
    """

    def __init__(self, device: torch.device, *values: float | torch.Tensor | None) -> None:
        module: Any = devices.module_of(device)
        has_streams = hasattr(module, "current_stream")
        self._values: list[float | torch.Tensor | None] = []
        for value in values:
            if isinstance(value, torch.Tensor):
                # Such a copy goes to pinned memory.
                value = value.to("cpu", non_blocking=True) if has_streams else None
            self._values.append(value)
        self._done: Any = None
        if has_streams:
            self._done = module.current_stream(device).record_event()

    def is_ready(self) -> bool:
        """Whether all are on the host."""
        return self._done is None or bool(self._done.query())

    def read(self) -> list[float]:
        """The numbers, after waiting for them; NaN for None."""
        if self._done is not None:
            self._done.synchronize()
        return [math.nan if value is None else float(value) for value in self._values]


class TelemetryWriter:
    """The two files of one rank. An error of the disk stops the recording, with one warning.

    Args:
        folder: of the run.
        rank: of this process.
        details: of the header, and `world_size`.
    """

    _open: ClassVar[dict[Path, TelemetryWriter]] = {}

    def __init__(self, folder: Path, rank: int, **details: Any) -> None:
        self.folder = folder
        self._rank = rank
        self._steps_path = steps_file(folder, rank)
        self._events_path = events_file(folder, rank)
        self._header = header_bytes(rank, **details)
        self._records: deque[tuple[list[float], DeviceValues | None]] = deque(maxlen=_MOST_WAITING)
        self._events: deque[dict[str, Any]] = deque(maxlen=_MOST_WAITING)
        # Called with `wait` at each write.
        self.also_write: list[Callable[[bool], None]] = []
        self._users = 0
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._steps = self._events_fd = -1
        self._count = 0
        self._start()

    @classmethod
    def shared(cls, folder: Path, rank: int, **options: Any) -> TelemetryWriter:
        """The writer of this process for a folder: objects that record into one folder share it."""
        key = steps_file(folder.absolute(), rank)
        writer = cls._open.get(key)
        if writer is None or writer._pid != os.getpid() or writer.closed:
            writer = cls(folder.absolute(), rank, **options)
            cls._open[key] = writer
        writer._users += 1
        return writer

    @property
    def closed(self) -> bool:
        """Whether nothing more is written."""
        return self._stop.is_set()

    def append(self, record: list[float], values: DeviceValues | None = None) -> None:
        """Write the fields of `STEP`. `values`: loss and gradient norm, if a device still computes them."""
        if not self.closed:
            self._records.append((record, values))

    def event(self, name: str, **fields: Any) -> None:
        """Record an event that happens now."""
        if not self.closed:
            self._events.append({"time": time.time(), "event": name, **fields})

    def _hang(self, message: str) -> None:
        self.event("hang", message=message)

    def release(self) -> None:
        """Write everything and close the files, when the last user releases them."""
        self._users -= 1
        if self._users <= 0:
            self.close()

    def close(self) -> None:
        """Write everything and close the files."""
        if self.closed or self._pid != os.getpid():
            return
        atexit.unregister(self.close)
        hang_watch.on_report.remove(self._hang)
        self.event("end", **self._process())
        self._stop.set()
        self.flush(wait=True)
        with self._lock:
            self._close_files()
        if self._open.get(self._steps_path) is self:
            del self._open[self._steps_path]

    def _close_files(self) -> None:
        for descriptor in (self._steps, self._events_fd):
            if descriptor >= 0:
                os.close(descriptor)
        self._steps = self._events_fd = -1

    def flush(self, wait: bool = False) -> None:
        """Write what was recorded. `wait`: also records whose values a device still computes."""
        with self._lock:
            if self._steps < 0:
                return
            try:
                self._write_records(wait)
                self._write_events()
                for write in self.also_write:
                    write(wait)
            except OSError as error:
                self._fail(error)

    # -- files

    def _start(self) -> None:
        try:
            self._steps_path.parent.mkdir(parents=True, exist_ok=True)
            self._open_steps()
            self._events_fd = open_regular(self._events_path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
            _drop_incomplete_line(self._events_fd)
        except OSError as error:
            self._fail(error)
            return
        self.event("start", seconds=round(_process_age(), 3), **self._process())
        hang_watch.on_report.append(self._hang)
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
        self._steps = open_regular(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        size = os.fstat(self._steps).st_size
        if not size:
            append_all(self._steps, self._header)
            size = HEADER_SIZE
        self._count, incomplete = divmod(size - HEADER_SIZE, STEP.itemsize)
        if incomplete:
            os.ftruncate(self._steps, size - incomplete)

    def _run(self) -> None:
        while not self._stop.wait(INTERVAL):
            self.flush()

    def _write_records(self, wait: bool) -> None:
        rows = []
        while self._records:
            record, values = self._records[0]
            if values is not None:
                if not (wait or values.is_ready()):
                    break
                record[_LOSS], record[_NORM] = values.read()
            self._records.popleft()
            rows.append(_packed(record))
        if rows:
            append_all(self._steps, b"".join(rows))
            self._count += len(rows)
        if self._count >= MOST_RECORDS:
            self._merge()

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
        os.close(self._steps)
        self._steps = -1
        # Windows replaces no file that a monitor reads at this moment. The next call merges it.
        with contextlib.suppress(PermissionError):
            os.replace(partial, self._steps_path)
            self._count = len(rows)
        self._steps = open_regular(self._steps_path, os.O_RDWR | os.O_APPEND)

    def _write_events(self) -> None:
        lines = []
        while self._events:
            lines.append(json.dumps(self._events.popleft(), default=str) + "\n")
        if lines:
            append_all(self._events_fd, "".join(lines).encode())

    def _fail(self, error: OSError) -> None:
        """Stop the recording: training is worth more."""
        self._stop.set()
        self._records.clear()
        self._events.clear()
        self._close_files()
        atexit.unregister(self.close)
        if marks.is_first(f"telemetry/{self.folder}"):
            logger.warning(
                "telemetry: %s cannot be written (rank %d: %s): the run continues without "
                "records from this rank and from others on this machine that cannot write",
                self.folder, self._rank, error,
            )  # fmt: skip


def merged(rows: np.ndarray[Any, np.dtype[Any]]) -> np.ndarray[Any, np.dtype[Any]]:
    """Steps with neighbors merged pairwise. A pair in which the steps are not ascending stays as it is."""
    if len(rows) < 2:
        return rows
    paired = rows[: len(rows) // 2 * 2].reshape(-1, 2)
    first, last = paired[:, 0], paired[:, 1]
    both = last.copy()
    both["steps"] = first["steps"] + last["steps"]
    both["flags"] = first["flags"] | last["flags"]
    for name in ("seconds", *PHASES):
        first_total = first[name].astype("f8") * first["steps"]
        last_total = last[name].astype("f8") * last["steps"]
        both[name] = (first_total + last_total) / both["steps"]
    both["longest"] = np.fmax(first["longest"], last["longest"])
    for name in ("samples", "tokens"):
        both[name] = first[name] + last[name]
    fits = last["step"] > first["step"]
    pieces = [both]
    if not fits.all():
        pieces = [both[i : i + 1] if ascends else paired[i] for i, ascends in enumerate(fits)]
    return np.concatenate([*pieces, rows[len(paired) * 2 :]])


def _packed(record: Sequence[float]) -> bytes:
    """A row. A number too large for single precision is infinite."""
    try:
        return _ROW.pack(*record)
    except OverflowError:
        return _ROW.pack(*record[:5], *np.asarray(record[5:], "f4").tolist())


def append_all(descriptor: int, data: bytes) -> None:
    """Write all of the data, or nothing where the disk is full."""
    size = os.fstat(descriptor).st_size
    try:
        while data:
            data = data[os.write(descriptor, data) :]
    except OSError:
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, size)
        raise


def _process_age() -> float:
    """Seconds since this process was started; 0 in an interactive one, where the run may be much younger."""
    if hasattr(sys, "ps1"):
        return 0.0
    process = psutil.Process()
    if sys.platform == "linux":
        # The time of the boot, which `create_time` adds, is a whole number of seconds.
        since_boot = time.clock_gettime(time.CLOCK_BOOTTIME)
        return since_boot - (process.create_time() - psutil.boot_time())
    return time.time() - process.create_time()


def _drop_incomplete_line(descriptor: int) -> None:
    """Remove what a killed process has left of its last line."""
    size = os.fstat(descriptor).st_size
    start = max(0, size - (1 << 20))
    os.lseek(descriptor, start, os.SEEK_SET)
    tail = os.read(descriptor, size - start)
    if tail and not tail.endswith(b"\n"):
        os.ftruncate(descriptor, start + tail.rfind(b"\n") + 1)
