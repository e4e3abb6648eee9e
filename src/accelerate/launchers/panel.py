# SPDX-License-Identifier: Apache-2.0
"""The progress of a run at the bottom of the terminal. The output of the ranks scrolls in the lines above it.

The terminal's scrolling region is set to the lines above, so that the output is passed on unchanged, also in the
middle of a line. The cursor is saved and restored around each change of the panel. A launcher that is killed cannot
give the lines back: a shell that waits for its end does.
"""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import time
from pathlib import Path

from .progress import Figures, Progress, duration, epoch_of, line, ranks_of, rates_of, size_of
from .spec import LaunchSpec

# Seconds between two changes of the panel, and between the first sign of a run and the panel.
_REFRESH = 0.25
_DELAY = 0.5
_HEIGHT = 4
# A smaller terminal shows no panel.
_LEAST_LINES, _LEAST_COLUMNS = 12, 40
# `read` fails at the end of the pipe, which is that of this process, and not if it gets a line.
_GUARD = r"read -r line || printf '\0337\033[r\0338\033[J' >&2"


class Display:
    """Shows the progress of a launch: a panel on a terminal, otherwise a line every so many seconds.

    Args:
        spec: the launch.
        folder: where the ranks publish their states.
        terminal: whether standard error is a terminal that can show a panel.
    """

    def __init__(self, spec: LaunchSpec, folder: Path, terminal: bool) -> None:
        self.progress: Progress = Progress(spec, folder)
        plural = "es" if spec.num_processes > 1 else ""
        self._title = f"{os.path.basename(spec.program.name)} · {spec.num_processes} process{plural}"
        self._interval = spec.progress_interval
        self._panel = Panel() if terminal else None
        self._first: float | None = None
        self._shown = self._looked = time.monotonic()
        self._last_step = -1

    @property
    def wait(self) -> float:
        """The most seconds until `tick` is to be called."""
        return _REFRESH if self._first is not None and self._panel is not None else 1.0

    def tick(self, pids: dict[int, int], ended: dict[int, int]) -> str | None:
        """Update what is shown. Returns a line that is to be printed, if any.

        Args:
            pids: the process of each rank that runs here.
            ended: the exit code of each rank that has ended.
        """
        now = time.monotonic()
        if now - self._looked < min(self.wait, self._interval):
            return None
        self._looked = now
        figures = self.progress.read(pids, ended)
        if figures is None:
            return None
        if self._first is None:
            self._first = now
        if self._panel is not None and self._panel.fits():
            if now - self._first >= _DELAY:
                self._panel.draw(lines_of(figures, self._title, self.progress.where, self._panel.columns))
            return None
        # A terminal that has become too small shows lines.
        self.hide()
        if now - self._shown < self._interval or figures.step == self._last_step:
            return None
        self._shown, self._last_step = now, figures.step
        return f"accelerate launch: {line(figures, self.progress.where)}"

    def hide(self) -> None:
        """Remove the panel."""
        if self._panel is not None:
            self._panel.remove()


class Panel:
    """Lines at the bottom of the terminal of standard error."""

    def __init__(self) -> None:
        self._size: tuple[int, int] | None = None  # columns and lines, while it is shown
        self._guard: subprocess.Popen[bytes] | None = None

    @property
    def columns(self) -> int:
        """The width of the terminal."""
        return _terminal_size()[0]

    def fits(self) -> bool:
        """Whether the terminal is large enough for it."""
        columns, lines = _terminal_size()
        return columns >= _LEAST_COLUMNS and lines >= _LEAST_LINES

    def draw(self, text: list[str]) -> None:
        """Show lines, at most `_HEIGHT`."""
        size = _terminal_size()
        found = ""
        if self._size is None:
            self._guard = _start_guard()
        if size != self._size:
            found = self._region(size)
            self._size = size
        top = size[1] - _HEIGHT + 1
        padded = [*text, *[""] * _HEIGHT][:_HEIGHT]
        rows = "".join(f"\x1b[{top + row};1H{words}\x1b[0m\x1b[K" for row, words in enumerate(padded))
        # The colours that the output has set are saved with the cursor.
        _write(f"{found}\x1b7\x1b[0m{rows}\x1b8")

    def _region(self, size: tuple[int, int]) -> str:
        """Reserve the lines of the panel, and keep the cursor above them."""
        before = "" if self._size is None else self._released(size)
        # Down without a change of the column, as scrolling needs it. Setting the region moves the cursor to the top.
        down = "\x1bD" * _HEIGHT
        return f"{before}{down}\x1b[{_HEIGHT}A\x1b7\x1b[1;{size[1] - _HEIGHT}r\x1b8"

    def _released(self, size: tuple[int, int]) -> str:
        """Clear the panel, and give its lines back to the output."""
        released = "\x1b7\x1b[r\x1b8"
        if size != self._size:
            # Some terminals have moved its lines, but all of them are below the cursor.
            return f"{released}\x1b[J"
        return f"{released}\x1b7\x1b[{size[1] - _HEIGHT + 1};1H\x1b[J\x1b8"

    def remove(self) -> None:
        """Clear the lines, and give them back to the output."""
        if self._size is not None:
            _write(self._released(_terminal_size()))
            self._size = None
        if self._guard is not None:
            self._guard.communicate(b"\n")
            self._guard = None


def _start_guard() -> subprocess.Popen[bytes] | None:
    """A process that gives the lines back when this one is killed; in its own session, to outlive its group."""
    command = ["/bin/sh", "-c", _GUARD]
    try:
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True)
    except OSError:
        return None  # a system without this shell shows the panel all the same


def lines_of(figures: Figures, title: str, where: str, columns: int) -> list[str]:
    """The lines of the panel, with the terminal's colours."""
    from rich.console import Console
    from rich.progress_bar import ProgressBar
    from rich.rule import Rule
    from rich.table import Table
    from rich.text import Text

    console = Console(file=io.StringIO(), force_terminal=True, width=columns, height=_HEIGHT, highlight=False)
    note = f" · {where}, its ranks only" if where else ""
    head = Rule(Text(title + note, style="bold"), align="left", style="dim")
    bar = Table.grid(padding=(0, 2), expand=True)
    known = figures.fraction == figures.fraction
    cells: list[Text | ProgressBar] = [Text(f"step {figures.step:,}", style="bold"), Text(epoch_of(figures))]
    bar.add_column(no_wrap=True)
    bar.add_column(no_wrap=True)
    if known:
        bar.add_column(ratio=1)
        cells.append(ProgressBar(total=1.0, completed=figures.fraction))
    if figures.left == figures.left:
        bar.add_column(no_wrap=True)
        cells.append(Text(f"{duration(figures.left)} left"))
    if not known:
        bar.add_column(ratio=1)
        cells.append(Text(""))
    bar.add_row(*cells)
    words = [f"loss {figures.loss:.4g}"] if figures.loss == figures.loss else []
    words += rates_of(figures)
    if figures.memory == figures.memory:
        words.append(f"memory {size_of(figures.memory)}")
    if figures.checkpoint:
        words.append(f"saved {figures.checkpoint} {duration(figures.age)} ago")
    states = Text()
    for state in ranks_of(figures):
        style = "red" if "failed" in state or "no step" in state else "dim"
        states.append(f"{state}   ", style=style)
    for part in (head, bar, Text("   ".join(words)), states):
        console.print(part, no_wrap=True, overflow="ellipsis")
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined,no-any-return]


def _terminal_size() -> tuple[int, int]:
    try:
        size = os.get_terminal_size(2)
    except OSError:
        return 0, 0
    return size.columns, size.lines


def _write(text: str) -> None:
    # A terminal that is gone must not change how the run ends.
    with contextlib.suppress(OSError):
        data = text.encode()
        while data:
            data = data[os.write(2, data) :]
