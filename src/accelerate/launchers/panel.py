# SPDX-License-Identifier: Apache-2.0
"""The progress of a run: a panel of `rich.live` below the output of a terminal, elsewhere a line every so often."""

from __future__ import annotations

import codecs
import math
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from .progress import Figures, Progress
from .spec import LaunchSpec
from .streams import write_all

if TYPE_CHECKING:
    from rich.console import Group
    from rich.live import Live

# Seconds between two changes of the panel.
_REFRESH = 0.25


class Display:
    """Shows the progress of a launch, and passes the output of the ranks on above it.

    Args:
        spec: the launch.
        folder: where the ranks publish their states.
        terminal: whether standard error is a terminal that can show a panel.
    """

    def __init__(self, spec: LaunchSpec, folder: Path, terminal: bool) -> None:
        self.progress: Progress = Progress(spec, folder)
        plural = "es" if spec.num_processes > 1 else ""
        if self.progress.machine:
            note = f" · {self.progress.machine}, its ranks only"
        else:
            note = ""
        self._title = (
            f"{os.path.basename(spec.program.name)} · {spec.num_processes} process{plural}{note}"
        )
        self._interval = spec.progress_interval
        self._terminal = terminal
        self._live: Live | None = None
        self._figures: Figures | None = None
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        # The beginning of a line whose end has not been written yet, as of a progress bar.
        self._unfinished = ""
        self._printed = self._looked = time.monotonic()
        self._last_step = -1

    @property
    def wait(self) -> float:
        """The most seconds until `tick` is to be called."""
        if self._live is not None:
            return _REFRESH
        return 1.0

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
        self._figures = figures = self.progress.read(pids, ended) or self._figures
        if figures is None:
            return None
        if self._terminal:
            if self._live is None:
                self._start_panel()
            else:
                self._live.refresh()
            return None
        if now - self._printed < self._interval or figures.step == self._last_step:
            return None
        self._printed, self._last_step = now, figures.step
        if self.progress.machine:
            machine = f"{self.progress.machine}: "
        else:
            machine = ""
        return f"accelerate: {machine}{figures.line()}"

    def write(self, sink: int, data: bytes) -> None:
        """Show output of a rank: above the panel where there is one."""
        if self._live is None or not os.isatty(sink):
            write_all(sink, data)
            return
        *lines, self._unfinished = (self._unfinished + self._decoder.decode(data)).split("\n")
        if lines:
            # What follows the last carriage return is what a terminal shows of a line.
            shown = (line.rstrip("\r").rpartition("\r")[2] for line in lines)
            self._live.console.out("\n".join(shown), highlight=False)
        self._live.refresh()

    def _start_panel(self) -> None:
        from rich.console import Console
        from rich.live import Live

        console = Console(stderr=True)
        self._live = Live(
            console=console, get_renderable=self._panel, auto_refresh=False, transient=True,
            redirect_stdout=False, redirect_stderr=False,
        )  # fmt: skip
        self._live.start(refresh=True)
        # The cursor stays visible, as a launcher that is killed could not bring it back.
        console.show_cursor(True)

    def _panel(self) -> Group:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.rule import Rule
        from rich.table import Table
        from rich.text import Text

        figures = self._figures
        assert figures is not None
        step = Table.grid(padding=(0, 2), expand=True)
        for ratio in (None, None, 1, None):
            step.add_column(no_wrap=True, ratio=ratio)
        bar = (
            ""
            if math.isnan(figures.fraction)
            else ProgressBar(total=1.0, completed=figures.fraction)
        )
        step.add_row(Text(f"step {figures.step:,}", style="bold"), figures.epoch, bar, figures.left)
        ranks = Text(no_wrap=True, overflow="ellipsis")
        for state in figures.ranks:
            ranks.append(
                f"{state}   ", style="red" if "failed" in state or "no step" in state else "dim"
            )
        unfinished = self._unfinished.rstrip("\r").rpartition("\r")[2]
        return Group(
            *(
                [Text.from_ansi(unfinished, no_wrap=True, overflow="ellipsis")]
                if unfinished
                else []
            ),
            Rule(Text(self._title, style="bold"), align="left", style="dim"),
            step,
            Text("   ".join(figures.measures), no_wrap=True, overflow="ellipsis"),
            ranks,
        )

    def hide(self) -> None:
        """Remove the panel."""
        if self._live is not None:
            self._live.stop()
            self._live = None
            write_all(2, self._unfinished.encode())
