# SPDX-License-Identifier: Apache-2.0
"""The progress of a run for those who watch it: what the ranks of this machine publish, as figures and as one line."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from ..telemetry.status import EVALUATING, STATES, TRAINING, Status, statuses
from .spec import LaunchSpec

# Seconds over which rates are measured, and after which a rank that makes no step is shown, if that is also so many
# times the duration of its steps.
_WINDOW = 15.0
_STALLED = 10.0
_STALLED_STEPS = 10


class Figures(NamedTuple):
    """What is shown of a run. A number that is not known is NaN.

    Fields:
        step, epoch, loss: of the rank that has made most steps; the loss is the mean over the ranks.
        fraction: of the epoch.
        left: seconds to the end of the epoch.
        step_rate, sample_rate, token_rate: a second; the last two over all ranks here.
        memory: bytes of the rank that uses most.
        checkpoint: name of the last one, empty before the first; age: seconds since it was saved.
        ranks: the state of each rank, in words.
    """

    step: int
    epoch: int
    loss: float
    fraction: float
    left: float
    step_rate: float
    sample_rate: float
    token_rate: float
    memory: float
    checkpoint: str
    age: float
    ranks: Mapping[int, str]


class Progress:
    """Reads the states of the ranks of this machine.

    Args:
        spec: the launch.
        folder: where the ranks publish.
    """

    def __init__(self, spec: LaunchSpec, folder: Path) -> None:
        self.where: str = f"machine {spec.machine_rank} of {spec.num_machines}" if spec.num_machines > 1 else ""
        self._folder = folder
        self._history: deque[tuple[float, int, float, float]] = deque()

    def read(self, pids: Mapping[int, int], ended: Mapping[int, int]) -> Figures | None:
        """The figures now; None before the first step or evaluation of a rank.

        Args:
            pids: the process of each rank that runs here.
            ended: the exit code of each rank that has ended.
        """
        found = dict(statuses(self._folder))
        if not any(one.step or one.state == EVALUATING for one in found.values()):
            return None
        now = time.time()
        first = max(found.values(), key=lambda one: one.step)
        samples, tokens = (sum(getattr(one, name) for one in found.values()) for name in ("samples", "tokens"))
        rates = self._rates(now, first.step, samples, tokens)
        memory = [one.memory for one in found.values() if one.memory == one.memory]
        memory = memory or [size for pid in pids.values() if (size := _resident(pid))]
        losses = [one.loss for one in found.values() if one.loss == one.loss]
        saved = max(found.values(), key=lambda one: one.saved)
        fraction = first.batch / first.batches if first.batches and first.batch <= first.batches else math.nan
        return Figures(
            first.step,
            first.epoch,
            sum(losses) / len(losses) if losses else math.nan,
            fraction,
            self._left(first, rates[0]),
            *rates,
            max(memory, default=math.nan),
            os.path.basename(saved.checkpoint),
            now - saved.saved if saved.checkpoint else math.nan,
            {rank: _words(one, now, rates[0], ended.get(rank)) for rank, one in found.items()},
        )

    def _rates(self, now: float, step: int, samples: float, tokens: float) -> tuple[float, float, float]:
        history = self._history
        if history and step < history[-1][1]:
            history.clear()  # the ranks were restarted
        history.append((now, step, samples, tokens))
        while len(history) > 2 and now - history[1][0] >= _WINDOW:
            history.popleft()
        begin = history[0]
        seconds = now - begin[0]
        if seconds < 0.2 or step == begin[1]:
            return math.nan, math.nan, math.nan
        return (step - begin[1]) / seconds, (samples - begin[2]) / seconds, (tokens - begin[3]) / seconds

    def _left(self, status: Status, rate: float) -> float:
        """Seconds to the end of the epoch, at the rate of steps."""
        if not status.batches or not rate > 0 or status.state != TRAINING or not status.batch:
            return math.nan
        # Batches for each step since the start of the run.
        read = status.batches * status.epoch + status.batch
        return (status.batches - status.batch) * status.step / read / rate


def line(figures: Figures, where: str = "") -> str:
    """The figures in one line of a log."""
    words = [f"step {figures.step}", epoch_of(figures)]
    if figures.loss == figures.loss:
        words.append(f"loss {figures.loss:.4g}")
    words += rates_of(figures)
    if figures.left == figures.left:
        words.append(f"{duration(figures.left)} left in the epoch")
    if figures.memory == figures.memory:
        words.append(size_of(figures.memory))
    if figures.checkpoint:
        words.append(f"saved {figures.checkpoint} {duration(figures.age)} ago")
    others = [state for state in ranks_of(figures) if not state.endswith(" training")]
    return (f"{where}: " if where else "") + ", ".join([*words, *others])


def epoch_of(figures: Figures) -> str:
    """The epoch, and how much of it is done."""
    share = f" ({figures.fraction:.0%})" if figures.fraction == figures.fraction else ""
    return f"epoch {figures.epoch}{share}"


def rates_of(figures: Figures) -> list[str]:
    """The rates that are known; steps only where samples are not."""
    found = [
        f"{amount(rate)} {unit}/s"
        for rate, unit in ((figures.sample_rate, "samples"), (figures.token_rate, "tokens"))
        if rate == rate
    ]
    return found or ([f"{amount(figures.step_rate)} steps/s"] if figures.step_rate == figures.step_rate else [])


def ranks_of(figures: Figures) -> list[str]:
    """The states of the ranks; neighbours in the same state together."""
    found: list[tuple[int, int, str]] = []
    for rank, words in sorted(figures.ranks.items()):
        if found and found[-1][1] == rank - 1 and found[-1][2] == words:
            found[-1] = (found[-1][0], rank, words)
        else:
            found.append((rank, rank, words))
    return [f"rank {low} {words}" if low == high else f"ranks {low}-{high} {words}" for low, high, words in found]


def amount(number: float) -> str:
    """A number with three digits."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e4)):
        if number >= size:
            return f"{number / (1e3 if unit == 'k' else size):.3g}{unit}"
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}"


def size_of(size: float) -> str:
    """Bytes with a unit."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.3g} {unit}" if size < 1000 else f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def duration(seconds: float) -> str:
    """Seconds in the largest fitting unit, as 4:05 or 2:10:00."""
    total = max(0, round(seconds))
    minutes, rest = divmod(total, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _words(status: Status, now: float, rate: float, code: int | None) -> str:
    if code is not None:
        return "ended" if code == 0 else f"failed ({code})"
    quiet = now - status.time
    limit = max(_STALLED, _STALLED_STEPS / rate if rate > 0 else _STALLED)
    if status.state == TRAINING and quiet > limit:
        return f"no step for {duration(quiet)}"
    return STATES[status.state]


def _resident(pid: int) -> int:
    """Bytes resident of a process; 0 where that is not known."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0
