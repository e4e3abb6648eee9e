# SPDX-License-Identifier: Apache-2.0
"""The output of one rank on its way to the console: log file, rank prefix, delayed tracebacks."""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Callable
from typing import IO, NamedTuple

TRACEBACK = b"Traceback (most recent call last):"
# With C++ stacks: what torch logs where the rank that hosts the store is gone, before the error becomes a traceback.
_DELAYED = re.escape(TRACEBACK) + rb"|\[c10d\] \w+ failed on SocketImpl"
# Seconds for which a traceback is delayed: by then it is known whether it ended the process, and which rank caused it.
# Shorter where the process continues to print: it has only logged the error.
DELAY = 5.0
DELAY_WHILE_PRINTING = 1.0
# Seconds for which an incomplete line waits for its end, so that lines of several ranks do not mix.
LINE_WAIT = 0.1
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Bytes of the most recent output that are kept.
TAIL = 16384
# How a rank that another program has started (mpirun, srun) reports its end; srun labels each line with its task.
_REPORT = b"accelerate: rank "
RANK_END = rb"(?<!\d)(?:\d{1,7}: )?" + _REPORT + rb"(\d+) ended, code (-?\d+)\r?\n"
_PARTIAL_RANK_END = rb"(?<!\d)(?:\d{1,7}: )?" + _REPORT + rb"[^\n]*\Z"


class RankEnd(NamedTuple):
    """The end of a rank as it was reported; `code` is negative for a signal."""

    rank: int
    code: int


def write_all(sink: int, data: bytes) -> None:
    """Write to a descriptor, as far as somebody reads it: a rank continues without its console.

    Raises OSError where the disk of a file is full.
    """
    try:
        while data:
            data = data[os.write(sink, data) :]
    except OSError as error:
        if error.errno in DISK_FULL:
            raise


class Stream:
    """One output stream of one rank.

    Args:
        source: descriptor to read from.
        sink: descriptor to write to.
        prefix: text before each line, or None.
        log: binary file that gets everything, or None.
        delay_tracebacks: wait with tracebacks until it is known whether the process survives them.
    """

    def __init__(
        self,
        source: int,
        sink: int,
        prefix: str | None,
        log: IO[bytes] | None,
        delay_tracebacks: bool,
    ) -> None:
        self.source = source
        self.sink = sink
        self.prefix: bytes | None = prefix.encode() if prefix else None
        self.log = log
        self.delay_tracebacks = delay_tracebacks
        # A delayed traceback with what followed it, and when it was written.
        self.delayed: bytes = b""
        self.delayed_since: float | None = None
        # The last traceback that was shown because the process seemed to survive it, and when it was written.
        self.shown: bytes = b""
        self.shown_since: float | None = None
        self.tail: bytes = b""
        # Ranks that have reported their ends, in that order, and the last output before the first one that failed.
        self.ends: list[RankEnd] = []
        self.before_failure: bytes = b""
        # Why output could not be written.
        self.lost: OSError | None = None
        self.open: bool = True
        # What writes to the console.
        self.show: Callable[[int, bytes], None] = write_all
        self.at_line_start: bool = True
        # The rank's other stream on the same console.
        self.other: Stream | None = None
        self._partial_report = b""
        self._line = b""
        self._line_since = 0.0

    def read(self) -> None:
        """Read what is available. At the end of the stream `open` becomes False."""
        try:
            data = os.read(self.source, 65536)
        except BlockingIOError:
            return
        except OSError:
            # A pseudo terminal whose other side is closed ends with an error, not with an empty read.
            data = b""
        if not data:
            self._process(self._partial_report)
            self.close()
            return
        if self.other is not None and self.prefix is None:
            # A progress bar on standard error stays before what the rank prints on standard output after it.
            self.other.flush_line()
        if self.log is not None:
            self._deliver(write_all, self.log.fileno(), data)
        self.feed(data)

    def feed(self, data: bytes) -> None:
        """Pass output on, without the reports of ended ranks, which are recorded."""
        data, self._partial_report = self._partial_report + data, b""
        if _REPORT not in data:
            self._process(data)
            return
        partial = re.compile(_PARTIAL_RANK_END).search(
            data, max(0, data.rfind(b"\n") + 1, len(data) - 100)
        )
        if partial is not None:
            data, self._partial_report = data[: partial.start()], partial.group()
        position = 0
        for report in re.finditer(RANK_END, data):
            self._process(data[position : report.start()])
            position = report.end()
            end = RankEnd(int(report[1]), int(report[2]))
            if end.code and not any(earlier.code for earlier in self.ends):
                self.before_failure = self.delayed or self.tail
            self.ends.append(end)
        self._process(data[position:])

    def _process(self, data: bytes) -> None:
        if not data:
            return
        self.tail = (self.tail + data)[-TAIL:]
        if not self.delay_tracebacks:
            self._emit(data)
        elif self.delayed_since is not None:
            self.delayed += data
            if time.monotonic() - self.delayed_since > DELAY_WHILE_PRINTING:
                self.flush()
        else:
            self._find_traceback(data)

    def _find_traceback(self, data: bytes) -> None:
        # The incomplete line may contain the beginning of the header.
        data, self._line = self._line + data, b""
        found = re.search(_DELAYED, data)
        if found is None:
            self._emit(data)
            return
        start = data.rfind(b"\n", 0, found.start()) + 1
        self._emit(data[:start])
        self.delayed, self.delayed_since = data[start:], time.monotonic()

    @property
    def pending(self) -> bool:
        """Whether there is output that `flush_expired` will show."""
        return bool(self.delayed or self._line)

    def flush_expired(self) -> None:
        """Show a traceback whose delay has passed: the process only logged it. Likewise an incomplete line."""
        now = time.monotonic()
        if self.delayed_since is not None and now - self.delayed_since > DELAY:
            self.flush()
        elif self._line and now - self._line_since > LINE_WAIT:
            self.flush_line()

    def flush(self) -> None:
        """Show all pending output."""
        if TRACEBACK in self.delayed:
            self.shown, self.shown_since = self.delayed, self.delayed_since
        self._emit(self.take_delayed())
        self.flush_line()

    @property
    def last_traceback(self) -> bytes:
        """The traceback that is the last output of the process, delayed or shown; empty where none is."""
        if TRACEBACK in self.delayed:
            return self.delayed
        shown = self.shown.rstrip()
        if shown and self.tail.rstrip().endswith(shown[-1024:]):
            return shown
        return b""

    @property
    def failing_since(self) -> float | None:
        """When the traceback was written that is the last output of the process; None where none is."""
        if TRACEBACK in self.delayed:
            return self.delayed_since
        if self.last_traceback:
            return self.shown_since
        return None

    def take_delayed(self) -> bytes:
        """Return the delayed traceback, which will not be shown."""
        data, self.delayed, self.delayed_since = self.delayed, b"", None
        return data

    def close(self) -> None:
        """Close the source and the log file."""
        if self.open:
            self.open = False
            os.close(self.source)
            if self.log is not None:
                self.log.close()

    def finish(self) -> None:
        """Show all pending output, complete a prefixed line and close."""
        self.flush()
        if self.prefix is not None and not self.at_line_start:
            # The next line on the console is another rank's.
            self._write(b"\n")
        self.close()

    def _emit(self, data: bytes) -> None:
        """Pass complete lines on. A carriage return also ends a line, for progress bars."""
        data = self._line + data
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        if not self._line:
            self._line_since = time.monotonic()
        complete, self._line = data[:end], data[end:]
        self._write(complete)

    def flush_line(self) -> None:
        """Show the incomplete line."""
        rest, self._line = self._line, b""
        self._write(rest)

    def _write(self, data: bytes) -> None:
        if not data:
            return
        if self.prefix is not None:
            data = self._prefixed(data)
        self.at_line_start = data.endswith(b"\n")
        self._deliver(self.show, self.sink, data)

    def _deliver(self, write: Callable[[int, bytes], None], sink: int, data: bytes) -> None:
        try:
            write(sink, data)
        except OSError as error:
            self.lost = error

    def _prefixed(self, data: bytes) -> bytes:
        lines = data.splitlines(keepends=True)
        starts = [self.at_line_start] + [line.endswith(b"\n") for line in lines[:-1]]
        prefix = self.prefix or b""
        # torch itself prefixes the lines of a rank's traceback.
        return b"".join(
            prefix + line if start and not line.startswith(prefix) else line
            for line, start in zip(lines, starts, strict=True)
        )
