# SPDX-License-Identifier: Apache-2.0
"""A rank's output on its way to the console: kept in a log file, marked with the rank, tracebacks held back."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from typing import IO, ClassVar

TRACEBACK = b"Traceback (most recent call last):"
# Seconds a traceback is held back: whether it ended the process, and whose fault it was, is known by then. Where only
# one rank has written one, or the process goes on printing, a shorter time will do: it was logged, and survived.
HOLD = 5.0
HOLD_ALONE = 1.5
HOLD_WHILE_PRINTING = 1.0
# Seconds a line without its end waits for the rest, so that lines of several ranks do not run into each other.
LINE_WAIT = 0.1
TAIL = 16384


class Modes:
    """Modes of a terminal that a program sets and takes back: the cursor, the other screen, the mouse, pasting."""

    # mode -> whether a program that is killed leaves it set (h) or reset (l)
    CHANGED: ClassVar = {b"25": b"l", b"1049": b"h", b"1000": b"h", b"1006": b"h", b"2004": b"h"}
    _SEQUENCE = re.compile(rb"\x1b\[\?(\d+)([hl])")

    def __init__(self) -> None:
        self._changed: dict[bytes, bytes] = {}

    def note(self, data: bytes) -> None:
        """Take in what a process writes."""
        if b"\x1b[?" not in data:
            return
        for mode, letter in self._SEQUENCE.findall(data):
            if self.CHANGED.get(mode) == letter:
                self._changed[mode] = letter
            else:
                self._changed.pop(mode, None)

    def undoing(self) -> bytes:
        """What brings the terminal back; empty where nothing is left changed."""
        opposite = {b"h": b"l", b"l": b"h"}
        back = b"".join(b"\x1b[?" + mode + opposite[letter] for mode, letter in self._changed.items())
        return back + b"\x1b[0m" if back else b""


class Stream:
    """One stream of one rank.

    source: descriptor to read from. sink: descriptor to write to. mark: what stands before each line, or None.
    holding: tracebacks wait until it is known whether the process survives them.
    """

    def __init__(self, source: int, sink: int, mark: str | None, log: IO[bytes] | None, holding: bool) -> None:
        self.source = source
        self.sink = sink
        self.mark = mark.encode() if mark else None
        self.log = log
        self.holding = holding
        self.held = b""
        self.held_since: float | None = None
        # The last traceback that was shown because the process seemed to survive it, and when it was written.
        self.shown = b""
        self.shown_since: float | None = None
        # Asked before a traceback is shown; what it returns is shown in its place.
        self.before_showing: Callable[[bytes], bytes] | None = None
        self.tail = b""
        self.open = True
        # What the process has done to the console that a killed one does not undo.
        self.modes = Modes()
        self._at_line_start = True
        self._line = b""
        self._line_since = 0.0

    def read(self) -> None:
        """Take what there is. At the end of the stream `open` is False."""
        try:
            data = os.read(self.source, 65536)
        except BlockingIOError:
            return
        except OSError:
            # A pseudo terminal whose other side is closed ends with an error, not with an empty read.
            data = b""
        if not data:
            self.close()
            return
        if self.log is not None:
            self.log.write(data)
            self.log.flush()
        self.tail = (self.tail + data)[-TAIL:]
        self.modes.note(data)
        self._take(data)

    def _take(self, data: bytes) -> None:
        if not self.holding:
            self._emit(data)
        elif self.held_since is not None:
            self.held += data
            if time.monotonic() - self.held_since > HOLD_WHILE_PRINTING:
                self.release()
        else:
            self._look_for_traceback(data)

    def _look_for_traceback(self, data: bytes) -> None:
        # The line that is waiting for its end may hold the beginning of the words looked for.
        data, self._line = self._line + data, b""
        found = data.find(TRACEBACK)
        if found < 0:
            self._emit(data)
            return
        start = data.rfind(b"\n", 0, found) + 1
        self._emit(data[:start])
        self.held, self.held_since = data[start:], time.monotonic()

    @property
    def waiting(self) -> bool:
        """Whether something is kept back that a moment's time will release."""
        return bool(self.held or self._line)

    def release_if_old(self, alone: bool = False) -> None:
        """A process that goes on after its traceback only reported it: show what was held. The same for half lines.

        alone: whether no other rank's traceback is held back.
        """
        now = time.monotonic()
        if self.held_since is not None and now - self.held_since > (HOLD_ALONE if alone else HOLD):
            self.release()
        elif self._line and now - self._line_since > LINE_WAIT:
            self._flush()

    def release(self) -> None:
        """Show all that is kept back."""
        if self.held:
            self.shown, self.shown_since = self.held, self.held_since
        held = self.drop()
        if held and self.before_showing is not None:
            held = self.before_showing(held)
        self._emit(held)
        self._flush()

    @property
    def last_traceback(self) -> bytes:
        """The traceback that is the last thing the process has written, held back or shown; empty where none is."""
        if self.held:
            return self.held
        shown = self.shown.rstrip()
        return shown if shown and self.tail.rstrip().endswith(shown[-1024:]) else b""

    @property
    def trouble_since(self) -> float | None:
        """When the traceback was written that is the last thing the process has written; None where none is."""
        if self.held_since is not None:
            return self.held_since
        return self.shown_since if self.last_traceback else None

    def drop(self) -> bytes:
        """What was held, no longer to be shown."""
        data, self.held, self.held_since = self.held, b"", None
        return data

    def close(self) -> None:
        if self.open:
            self.open = False
            os.close(self.source)
            if self.log is not None:
                self.log.close()

    def _emit(self, data: bytes) -> None:
        """Pass whole lines on; a carriage return ends one too, as progress bars need it."""
        data = self._line + data
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        if not self._line:
            self._line_since = time.monotonic()
        whole, self._line = data[:end], data[end:]
        self._write(whole)

    def _flush(self) -> None:
        rest, self._line = self._line, b""
        self._write(rest)

    def _write(self, data: bytes) -> None:
        if self.mark is not None and data:
            data = self._marked(data)
        try:
            while data:
                data = data[os.write(self.sink, data) :]
        except OSError:
            # Nobody reads the console any more; the rank itself goes on, and its log file is complete.
            return

    def _marked(self, data: bytes) -> bytes:
        lines = data.splitlines(keepends=True)
        starts = [self._at_line_start] + [line.endswith(b"\n") for line in lines[:-1]]
        self._at_line_start = lines[-1].endswith(b"\n")
        mark = self.mark or b""
        # torch marks a rank's traceback itself.
        return b"".join(
            mark + line if start and not line.startswith(mark) else line
            for line, start in zip(lines, starts, strict=True)
        )
