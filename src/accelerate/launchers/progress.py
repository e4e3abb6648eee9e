# SPDX-License-Identifier: Apache-2.0
"""The progress of a run, from what the ranks of this machine publish: as words for a line or for a panel."""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import psutil

from ..core.objects import by_text
from ..telemetry.status import EVALUATING, STATES, TRAINING, Status, statuses
from .spec import LaunchSpec

# Seconds over which rates are measured, and after which a rank that makes no step is shown, if that is also so many
# times the duration of its steps.
_WINDOW = 15.0
_STALLED = 10.0
_STALLED_STEPS = 10


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
