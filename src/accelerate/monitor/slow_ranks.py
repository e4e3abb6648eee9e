# SPDX-License-Identifier: Apache-2.0
"""Which ranks of a run were slow, when, by how much, and in which phase of the step."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from .run import Run
from .steps import Array
from .view import ALL_PHASES, EXCESS, WINDOW, View, view

# A rank that is slow in a smaller share of the steps is named only for a time without interruption.
LEAST_SHARE = 0.05
# Windows of such a time, with few steps and with many, and its least length in windows of the straggler rule.
_SHORT = 3
_SHORT_WIDE = 2
_WIDE = 64
# Most buckets in which short times are looked for: of one rank, and of all together.
_FINE_BUCKETS = 4096
_FINE_VALUES = 200_000
# A rank that is slow in a smaller share than the second is named only if that took so many seconds.
_LEAST_SECONDS = 10.0
_CONSIDERABLE = 0.3
# Most segments of the time in which a rank is slow, and the least mean of what it loses there, in standard errors.
_MOST_SEGMENTS = 16
_LEAST_ERRORS = 4.0


@dataclass(frozen=True)
class Straggler:
    """A rank that was slow, and the phase of the step in which it lost most."""

    rank: int
    host: str
    first: int
    last: int
    """The steps between which it was slow."""
    share: float
    """The share of the summarized steps in which it was slow."""
    excess: float
    """Seconds that its own work takes in a step above the median of all ranks, while it was slow."""
    ratio: float
    """Its own time / the median."""
    phase: str
    phase_excess: float
    waiting: float
    """Seconds by which the others communicate and wait longer in a step than it does, on average."""


def slow_ranks(run: Run, shown: View) -> list[Straggler]:
    """The ranks that were slow in many of the steps, and then those that were slow for a short time."""
    slow = _often_slow(run, shown)
    fine = shown
    buckets = _FINE_VALUES // max(1, len(shown.ranks))
    if shown.width > 1 and buckets >= 2 * len(shown.x):
        fine = view(run, int(shown.first[0]), int(shown.last[-1]), min(_FINE_BUCKETS, buckets))
    named = {straggler.rank for straggler in slow}
    brief = _briefly_slow(run, fine)
    return slow + [straggler for straggler in brief if straggler.rank not in named]


def _often_slow(run: Run, shown: View) -> list[Straggler]:
    """The ranks that were slow in a considerable share of a view, those first that cost most."""
    slow = []
    counts = np.sort(shown.slow.sum(axis=1))
    usual = 0
    if len(counts):
        usual = counts[(len(counts) - 1) // 2]
    # Ranks that are slow now and then, each about as often as the others, are a busy machine.
    often = 2 * usual + 4 * math.sqrt(usual)
    windows = _windows(shown)
    for row, buckets in _rows(shown):
        count = len(buckets)
        if count < max(1, LEAST_SHARE * windows):
            continue
        is_long = count >= _CONSIDERABLE * windows
        if not is_long and _seconds(shown, row, buckets) < _LEAST_SECONDS:
            continue
        if count > often or _is_slow_between(shown, row, buckets):
            slow.append(_straggler(run, shown, row, buckets))
    return sorted(slow, key=lambda straggler: -straggler.excess * straggler.share)


def _briefly_slow(run: Run, shown: View) -> list[Straggler]:
    """The ranks that were slow for a short time without interruption, in a view with narrow buckets."""
    if shown.width >= _WIDE:
        least = _SHORT_WIDE
    else:
        least = max(_SHORT, math.ceil(_SHORT * WINDOW / shown.width))
    longest = {}
    for row, buckets in _rows(shown):
        gaps = np.flatnonzero(np.diff(buckets) > 1)
        times = np.split(buckets, gaps + 1)
        longest[row] = max(times, key=len)
    lengths = sorted(len(longest.get(row, ())) for row in range(len(shown.ranks)))
    often = 0
    if lengths:
        often = 3 * lengths[(len(lengths) - 1) // 2]
    return [
        _straggler(run, shown, row, buckets)
        for row, buckets in longest.items()
        if len(buckets) >= least
        and len(buckets) > often
        and _seconds(shown, row, buckets) >= _LEAST_SECONDS
        and not _is_chance(shown, row, buckets)
    ]


def _rows(shown: View) -> list[tuple[int, Array]]:
    """The rows of slow ranks, and the buckets in which they are slow."""
    rows = []
    for row, slow in enumerate(shown.slow):
        buckets = np.flatnonzero(slow)
        if len(buckets) and not _is_chance(shown, row, buckets):
            rows.append((row, buckets))
    return rows


def _windows(shown: View) -> int:
    """The buckets with which a window ends that has enough steps."""
    most = shown.weight.max(axis=0, initial=0)
    return max(1, int(((most > 0) & (np.cumsum(most) >= WINDOW)).sum()))


def _seconds(shown: View, row: int, buckets: Array) -> float:
    """How long some steps took."""
    return float(np.nansum(shown.seconds[row, buckets] * shown.weight[row, buckets]))


def _above(row: int, values: Array) -> Array:
    """By how much a row is above the lower median of all rows."""
    numbers = np.nan_to_num(values)
    return np.asarray(numbers[row] - np.sort(numbers, axis=0)[(len(numbers) - 1) // 2])


def _is_chance(shown: View, row: int, buckets: Array) -> bool:
    """Whether a few long steps explain what a rank has lost: a first step, or noise with rare peaks.

    What a slow rank loses is spread over the time in which it is slow. So the mean of that over segments of it is
    several times its standard error.
    """
    # A window ends with its bucket: what it saw may be before the first.
    begin = max(0, buckets[0] - math.ceil(WINDOW / shown.width) + 1)
    around = slice(begin, buckets[-1] + 1)
    weight = shown.weight[row, around]
    lost = _above(row, shown.own[:, around]) * weight
    lost = lost[weight > 0]
    count = min(_MOST_SEGMENTS, len(lost) // 2)
    if count < 2:
        return False
    segments = np.array_split(lost, count)
    means = np.array([segment.mean() for segment in segments])
    standard_error = means.std(ddof=1) / math.sqrt(count)
    return bool(means.mean() <= _LEAST_ERRORS * standard_error)


def _is_slow_between(shown: View, row: int, buckets: Array) -> bool:
    """Whether a rank is slow on average from the first to the last of its slow windows."""
    between = slice(buckets[0], buckets[-1] + 1)
    weight = shown.weight[:, between]
    mean = np.nansum(shown.own[:, between] * weight, axis=1) / weight.sum(axis=1)
    median = np.sort(mean)[(len(mean) - 1) // 2]
    return bool(mean[row] > (1 + EXCESS) * median)


def _straggler(run: Run, shown: View, row: int, buckets: Array) -> Straggler:
    weight = shown.weight[row, buckets]

    def excess_of(values: Array) -> float:
        return float(np.average(_above(row, values[:, buckets]), weights=weight))

    excess = {phase: excess_of(shown.phases[phase]) for phase in ALL_PHASES}
    communication = np.nan_to_num(shown.phases["communication"])
    excess["backward"] = excess_of(shown.phases["backward"] - (shown.waits - communication))
    del excess["communication"]
    phase = max(excess, key=excess.__getitem__)
    own_excess = excess_of(shown.own)
    own = np.nan_to_num(shown.own[row, buckets])
    usual = float(np.average(own, weights=weight)) - own_excess
    ratio = math.inf
    if usual > 0:
        ratio = 1 + own_excess / usual
    # Ranks that are slow too wait less.
    is_other = ~shown.slow[:, buckets].any(axis=1)
    if not is_other.any():
        is_other = np.arange(len(shown.ranks)) != row
    waits = shown.waits[:, buckets]
    longer = waits[is_other].mean(axis=0) - waits[row]
    # The first window of the view ends behind its first step.
    first = buckets[0]
    steps = np.cumsum(shown.weight[row])
    if first <= np.searchsorted(steps, WINDOW):
        first = 0
    rank = shown.ranks[row]
    return Straggler(
        rank,
        run.ranks[rank].header.host,
        int(shown.first[first]),
        int(shown.last[buckets[-1]]),
        len(buckets) / _windows(shown),
        own_excess,
        ratio,
        phase,
        excess[phase],
        float(np.average(longer, weights=weight)),
    )
