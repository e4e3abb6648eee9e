# SPDX-License-Identifier: Apache-2.0
"""The progress of a run: a panel of `rich.live` below the output of a terminal, elsewhere a line every so often."""

from __future__ import annotations

import codecs
import math
import os
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import psutil

from ..core.objects import by_text, counted
from ..telemetry.status import EVALUATING, STATES, TRAINING, Status, statuses
from .spec import LaunchSpec
from .streams import write_all

if TYPE_CHECKING:
    from rich.console import Group
    from rich.live import Live

# Seconds over which rates are measured, and after which a rank that makes no step is shown, if that is also so many
# times the duration of its steps.
_WINDOW = 15.0
_STALLED = 10.0
_STALLED_STEPS = 10
# Seconds between two changes of the panel.
_REFRESH = 0.25


class Figures(NamedTuple):
    """What is shown of a run, in words but for the step and the fraction of the epoch (NaN where not known)."""

    step: int
    fraction: float
    epoch: str
    left: str
    measures: list[str]
    ranks: list[str]

    def line(self) -> str:
        """The figures in one line of a log; ranks that train as usual are left out."""
        left = [self.left] if self.left else []
        others = [state for state in self.ranks if not state.endswith(" training")]
        return ", ".join([f"step {self.step}", self.epoch, *self.measures, *left, *others])


class Progress:
    """Reads the states of the ranks of this machine.

    Args:
        spec: the launch.
        folder: where the ranks publish.
    """

    def __init__(self, spec: LaunchSpec, folder: Path) -> None:
        self.machine: str = (
            f"machine {spec.machine_rank} of {spec.num_machines}" if spec.num_machines > 1 else ""
        )
        self._folder = folder
        self._history: deque[tuple[float, int, float, float]] = deque()

    def read(self, pids: Mapping[int, int], ended: Mapping[int, int]) -> Figures | None:
        """The figures now; None before the first step or evaluation of a rank.

        Args:
            pids: the process of each rank that runs here.
            ended: the exit code of each rank that has ended.
        """
        published = dict(statuses(self._folder))
        states = published.values()
        if not any(status.step or status.state == EVALUATING for status in states):
            return None
        now = time.time()
        first = max(states, key=lambda status: status.step)
        totals = sum(status.samples for status in states), sum(status.tokens for status in states)
        step_rate, sample_rate, token_rate = self._rates(now, first.step, *totals)
        fraction = math.nan
        epoch = f"epoch {first.epoch}"
        if first.batches and first.batch <= first.batches:
            fraction = first.batch / first.batches
            epoch += f" ({fraction:.0%})"
        left = ""
        if first.batch and first.batches and step_rate > 0 and first.state == TRAINING:
            steps_per_batch = first.step / (first.batches * first.epoch + first.batch)
            seconds = (first.batches - first.batch) * steps_per_batch / step_rate
            left = f"{duration(seconds)} to the end of the epoch"
        measures = []
        losses = [status.loss for status in states if not math.isnan(status.loss)]
        if losses:
            measures.append(f"loss {sum(losses) / len(losses):.4g}")
        rates = {"samples/s": sample_rate, "tokens/s": token_rate}
        if math.isnan(sample_rate) and math.isnan(token_rate):
            rates = {"steps/s": step_rate}
        for unit, rate in rates.items():
            if not math.isnan(rate):
                measures.append(f"{amount(rate)} {unit}")
        sizes = [status.memory for status in states if not math.isnan(status.memory)]
        if not sizes:
            resident = [_resident(pid) for pid in pids.values()]
            sizes = [float(size) for size in resident if size]
        if sizes:
            measures.append(f"memory {max(sizes) / 2**20:,.0f} MiB")
        saved = max(states, key=lambda status: status.saved)
        if saved.checkpoint:
            name = os.path.basename(saved.checkpoint)
            measures.append(f"saved {name} {duration(now - saved.saved)} ago")
        words = {}
        for rank, status in published.items():
            words[rank] = _words(status, now, step_rate, ended.get(rank))
        ranks = [f"{members} {state}" for members, state in by_text(words)]
        return Figures(first.step, fraction, epoch, left, measures, ranks)

    def _rates(
        self, now: float, step: int, samples: float, tokens: float
    ) -> tuple[float, float, float]:
        """Steps, samples and tokens a second; NaN where not known."""
        history = self._history
        if history and step < history[-1][1]:
            history.clear()  # the ranks were restarted
        history.append((now, step, samples, tokens))
        while len(history) > 2 and now - history[1][0] >= _WINDOW:
            history.popleft()
        began, first_step, first_samples, first_tokens = history[0]
        seconds = now - began
        if seconds < 0.2 or step == first_step:
            return math.nan, math.nan, math.nan
        return (
            (step - first_step) / seconds,
            (samples - first_samples) / seconds,
            (tokens - first_tokens) / seconds,
        )


def amount(number: float) -> str:
    """A number with three digits."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e4)):
        if number >= size:
            return f"{number / (1e3 if unit == 'k' else size):.3g}{unit}"
    if number >= 100:
        return f"{number:.0f}"
    return f"{number:.3g}"


def duration(seconds: float) -> str:
    """Seconds as 4:05 or 2:10:00."""
    minutes, seconds = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02d}:{seconds:02d}"
    return f"{minutes}:{seconds:02d}"


def _words(status: Status, now: float, rate: float, code: int | None) -> str:
    if code is not None:
        if code == 0:
            return "ended"
        return f"failed ({code})"
    quiet = now - status.time
    if status.state == TRAINING and quiet > max(
        _STALLED, _STALLED_STEPS / rate if rate > 0 else _STALLED
    ):
        return f"no step for {duration(quiet)}"
    return STATES[status.state]


def _resident(pid: int) -> int:
    """Bytes resident of a process; 0 where that is not known."""
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0


class Display:
    """Shows the progress of a launch, and passes the output of the ranks on above it.

    Args:
        spec: the launch.
        folder: where the ranks publish their states.
        terminal: whether standard error is a terminal that can show a panel.
    """

    def __init__(self, spec: LaunchSpec, folder: Path, terminal: bool) -> None:
        self.progress: Progress = Progress(spec, folder)
        if self.progress.machine:
            note = f" · {self.progress.machine}, its ranks only"
        else:
            note = ""
        processes = counted(spec.num_processes, "process")
        self._title = f"{os.path.basename(spec.program.name)} · {processes}{note}"
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
            console=console,
            get_renderable=self._panel,
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
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
