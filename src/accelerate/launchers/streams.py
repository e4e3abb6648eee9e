# SPDX-License-Identifier: Apache-2.0
"""The output of one rank on its way to the console: log file, rank prefix, delayed tracebacks."""

from __future__ import annotations

import errno
import os
import queue
import re
import sys
import threading
import time
from collections.abc import Callable
from typing import IO

TRACEBACK = b"Traceback (most recent call last):"
# With C++ stacks: what torch logs where the rank that hosts the store is gone, before the error becomes a traceback.
_DELAYED = re.escape(TRACEBACK) + rb"|\[c10d\] \w+ failed on SocketImpl"
# Seconds for which a traceback is delayed: by then it is known whether it ended the process, and which rank caused it.
# Shorter where the process continues to print, as it has only logged the error; longer where it has lost a connection.
DELAY = 5.0
DELAY_WHILE_PRINTING = 1.0
DELAY_LOST = 30.0
# Seconds for which an incomplete line waits for its end, so that lines of several ranks do not mix.
LINE_WAIT = 0.1
# Seconds for which a stream is waited for where only a thread can wait for it.
READ_WAIT = 0.02
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Bytes of the most recent output that are kept.
TAIL = 16384
# How a rank that another program has started (mpirun, srun) reports its failure.
_REPORT = b"accelerate: rank "
RANK_FAILED = _REPORT + rb"(\d+) ended, code (-?\d+)"


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


class _ThreadReader:
    """Reads a pipe where pipes cannot be waited for. Its thread closes the pipe at its end."""

    def __init__(self, source: int) -> None:
        self._pieces: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        threading.Thread(target=self._run, args=(source,), daemon=True).start()

    def _run(self, source: int) -> None:
        with open(source, "rb", buffering=0) as file:
            data = b" "
            while data:
                data = file.read(65536)
                self._pieces.put(data)

    def read(self) -> bytes:
        """Return what has come, nothing at the end. Raises BlockingIOError where there is nothing new."""
        try:
            return self._pieces.get(timeout=READ_WAIT)
        except queue.Empty:
            raise BlockingIOError from None


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
        self._threaded: _ThreadReader | None = None
        if sys.platform != "win32":
            os.set_blocking(source, False)
        else:
            self._threaded = _ThreadReader(source)
        self.sink = sink
        self.prefix: bytes = (prefix or "").encode()
        self.log = log
        self.delay_tracebacks = delay_tracebacks
        # A traceback and what followed it, whether it is delayed, and when it began.
        self.failing_output: bytes = b""
        self.is_delayed: bool = False
        self._delayed_since = 0.0
        self.tail: bytes = b""
        # The last output when the first rank under a starter had reported its failure.
        self.rank_failure: bytes = b""
        # Why output could not be written.
        self.lost: OSError | None = None
        self.open: bool = True
        # What writes to the console.
        self.show: Callable[[int, bytes], None] = write_all
        self.at_line_start: bool = True
        # The rank's other stream on the same console.
        self.other: Stream | None = None
        # When output came last.
        self._read_at = 0.0
        self._line = b""
        self._line_since = 0.0

    @property
    def failing_since(self) -> float | None:
        """When the traceback was written that is the last output of the process, delayed or shown."""
        if TRACEBACK in self.failing_output:
            return self._delayed_since
        return None

    @property
    def last_output(self) -> str:
        """The last output, from the traceback on where there is one."""
        text = self.tail
        if self.failing_since is not None:
            text = self.failing_output
        return text.decode(errors="replace")

    @property
    def delayed(self) -> str:
        """The delayed traceback with what followed it."""
        if self.is_delayed:
            return self.failing_output.decode(errors="surrogateescape")
        return ""

    def read(self) -> None:
        """Read what is available. At the end of the stream `open` becomes False."""
        try:
            if self._threaded is None:
                data = os.read(self.source, 65536)
            else:
                data = self._threaded.read()
        except BlockingIOError:
            return
        except OSError:
            # A pseudo terminal whose other side is closed ends with an error, not with an empty read.
            data = b""
        if not data:
            self.close()
            return
        if self.other is not None and not self.prefix:
            # A progress bar on standard error stays before what the rank prints on standard output after it.
            self.other.flush_line()
        if self.log is not None:
            self._deliver(write_all, self.log.fileno(), data)
        self._read_at = time.monotonic()
        self.tail = (self.tail + data)[-TAIL:]
        if _REPORT in self.tail and not self.rank_failure and re.search(RANK_FAILED, self.tail):
            self.rank_failure = self.tail
        if self.is_delayed:
            self.failing_output += data
        elif self.delay_tracebacks:
            self._emit(self._delay_traceback(data))
        else:
            self._emit(data)

    def _delay_traceback(self, data: bytes) -> bytes:
        """Delay what comes from a traceback on. Returns what comes before it."""
        # The incomplete line may contain the beginning of the header.
        data, self._line = self._line + data, b""
        header = re.search(_DELAYED, data)
        self.failing_output = b""
        if header is None:
            return data
        start = data.rfind(b"\n", 0, header.start()) + 1
        self.is_delayed = True
        self._delayed_since = time.monotonic()
        self.failing_output = data[start:]
        return data[:start]

    @property
    def pending(self) -> bool:
        """Whether there is output that is not shown yet."""
        return self.is_delayed or bool(self._line)

    def is_expired(self, is_caused_elsewhere: bool) -> bool:
        """Whether a traceback was delayed for long enough, or the process has printed more for a while."""
        delay = DELAY
        if is_caused_elsewhere:
            delay = DELAY_LOST
        elif self._read_at - self._delayed_since > DELAY_WHILE_PRINTING:
            delay = DELAY_WHILE_PRINTING
        return time.monotonic() - self._delayed_since > delay

    def flush(self) -> None:
        """Show all pending output."""
        if self.is_delayed:
            self.is_delayed = False
            self._emit(self.failing_output)
        self.flush_line()

    def drop_delayed(self, after: str = "") -> None:
        """Do not show the delayed traceback, but the output `after` it."""
        self.is_delayed = False
        self._emit(after.encode(errors="surrogateescape"))

    def close(self) -> None:
        """Close the source and the log file."""
        if self.open:
            self.open = False
            if self._threaded is None:
                os.close(self.source)
            if self.log is not None:
                self.log.close()

    def finish(self) -> None:
        """Show all pending output, complete a prefixed line and close."""
        self.flush()
        if self.prefix and not self.at_line_start:
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
        line, self._line = self._line, b""
        self._write(line)

    def flush_old_line(self) -> None:
        """Show an incomplete line that has waited for its end."""
        if time.monotonic() - self._line_since > LINE_WAIT:
            self.flush_line()

    def _write(self, data: bytes) -> None:
        if not data:
            return
        if self.prefix:
            data = self._prefixed(data)
        self.at_line_start = data.endswith(b"\n")
        self._deliver(self.show, self.sink, data)

    def _deliver(self, write: Callable[[int, bytes], None], sink: int, data: bytes) -> None:
        try:
            write(sink, data)
        except OSError as error:
            self.lost = error

    def _prefixed(self, data: bytes) -> bytes:
        marked = []
        at_start = self.at_line_start
        for line in data.splitlines(keepends=True):
            # torch itself prefixes the lines of a rank's traceback.
            if at_start and not line.startswith(self.prefix):
                marked.append(self.prefix)
            marked.append(line)
            at_start = line.endswith(b"\n")
        return b"".join(marked)
