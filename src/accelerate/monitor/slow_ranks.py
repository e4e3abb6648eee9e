# SPDX-License-Identifier: Apache-2.0
"""Which ranks of a run were slow, when, by how much, and in which phase of the step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from .run import Run
from .steps import Array
from .view import ALL_PHASES, EXCESS, WINDOW, View

# A rank that is slow in a smaller share of the steps is named only for a time without interruption.
LEAST_SHARE = 0.05
# Windows of such a time, with few steps and with many, and its least length in windows of the straggler rule.
_SHORT, _SHORT_WIDE, _WIDE = 3, 2, 64
# A rank that is slow in a smaller share than the second is named only if that took so many seconds.
_LEAST_SECONDS, _CONSIDERABLE = 10.0, 0.3
# Most segments of the time in which a rank is slow, and the least mean of what it loses there, in standard errors.
_MOST_SEGMENTS, _LEAST_ERRORS = 16, 4.0


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
    """The ranks that were slow in a considerable share of a view, those first that cost most."""
    slow = []
    counts = shown.slow.sum(axis=1)
    if len(counts):
        usual = np.sort(counts)[(len(counts) - 1) // 2]
    else:
        usual = 0
    # Ranks that are slow now and then, each about as often as the others, are a busy machine.
    often = 2 * usual + 4 * math.sqrt(usual)
    for row, at in _rows(shown):
        if len(at) < max(1, LEAST_SHARE * _windows(shown)):
            continue
        is_long = (
            len(at) >= _CONSIDERABLE * _windows(shown) or _seconds(shown, row, at) >= _LEAST_SECONDS
        )
        if is_long and (len(at) > often or _is_slow_between(shown, row, at)):
            slow.append(_straggler(run, shown, row, at))
    return sorted(slow, key=lambda straggler: -straggler.excess * straggler.share)


def briefly_slow_ranks(run: Run, shown: View) -> list[Straggler]:
    """The ranks that were slow for a short time without interruption, in a view with narrow buckets."""
    if shown.width >= _WIDE:
        need = _SHORT_WIDE
    else:
        need = max(_SHORT, math.ceil(_SHORT * WINDOW / shown.width))
    longest = {
        row: max(np.split(at, np.flatnonzero(np.diff(at) > 1) + 1), key=len)
        for row, at in _rows(shown)
    }
    usual = sorted([*map(len, longest.values()), *[0] * len(shown.ranks)][: len(shown.ranks)])
    often = 3 * usual[(len(usual) - 1) // 2] if usual else 0
    return [
        _straggler(run, shown, row, at)
        for row, at in longest.items()
        if len(at) >= need
        and len(at) > often
        and _seconds(shown, row, at) >= _LEAST_SECONDS
        and not _is_chance(shown, row, at)
    ]


def _rows(shown: View) -> list[tuple[int, Array]]:
    """The rows of slow ranks, and the buckets in which they are slow."""
    rows = [(row, np.flatnonzero(slow)) for row, slow in enumerate(shown.slow)]
    return [(row, at) for row, at in rows if len(at) and not _is_chance(shown, row, at)]


def _windows(shown: View) -> int:
    """The buckets with which a window ends that has enough steps."""
    most = shown.weight.max(axis=0, initial=0)
    return max(1, int(((most > 0) & (np.cumsum(most) >= WINDOW)).sum()))


def _seconds(shown: View, row: int, at: Array) -> float:
    """How long some steps took."""
    return float(np.nansum(shown.seconds[row, at] * shown.weight[row, at]))


def _above(row: int, values: Array) -> Array:
    """By how much a row is above the lower median of all rows."""
    known = np.nan_to_num(values)
    return np.asarray(known[row] - np.sort(known, axis=0)[(len(known) - 1) // 2])


def _is_chance(shown: View, row: int, at: Array) -> bool:
    """Whether a few long steps explain what a rank has lost: a first step, or noise with rare peaks.

    What a slow rank loses is spread over the time in which it is slow. So the mean of that over segments of it is
    several times its standard error.
    """
    # A window ends with its bucket: what it saw may be before the first.
    around = np.arange(max(0, at[0] - math.ceil(WINDOW / shown.width) + 1), at[-1] + 1)
    weight = shown.weight[row, around]
    around, weight = around[weight > 0], weight[weight > 0]
    lost = _above(row, shown.own[:, around]) * weight
    segments = min(_MOST_SEGMENTS, len(around) // 2)
    if segments < 2:
        return False
    means = np.array([segment.mean() for segment in np.array_split(lost, segments)])
    return bool(means.mean() <= _LEAST_ERRORS * means.std(ddof=1) / math.sqrt(segments))


def _is_slow_between(shown: View, row: int, at: Array) -> bool:
    """Whether a rank is slow on average from the first to the last of its slow windows."""
    own, weight = (values[:, at[0] : at[-1] + 1] for values in (shown.own, shown.weight))
    mean = np.nansum(own * weight, axis=1) / weight.sum(axis=1)
    return bool(mean[row] > (1 + EXCESS) * np.sort(mean)[(len(mean) - 1) // 2])


def _straggler(run: Run, shown: View, row: int, at: Array) -> Straggler:
    weight = shown.weight[row, at]

    def over(values: Array) -> float:
        return float(np.average(_above(row, values), weights=weight))

    own = shown.own[:, at]
    seconds: dict[str, Any] = {
        phase: shown.phases[phase][:, at] for phase in ALL_PHASES if phase != "communication"
    }
    seconds["backward"] = (
        seconds["backward"] - (shown.waits - np.nan_to_num(shown.phases["communication"]))[:, at]
    )
    above = {phase: over(values) for phase, values in seconds.items()}
    phase = max(above, key=above.__getitem__)
    excess = over(own)
    others = np.delete(np.arange(len(own)), row)
    # Ranks that are slow too wait less.
    fast = others[~shown.slow[others][:, at].any(axis=1)]
    waits = shown.waits[:, at][fast if len(fast) else others].mean(axis=0) - shown.waits[row, at]
    usual = float(np.average(np.nan_to_num(own[row]), weights=weight)) - excess
    # The first window of the view ends behind its first step.
    is_first = at[0] <= np.searchsorted(np.cumsum(shown.weight[row]), WINDOW)
    rank = shown.ranks[row]
    return Straggler(
        rank,
        run.ranks[rank].header.host,
        int(shown.first[0 if is_first else at[0]]),
        int(shown.last[at[-1]]),
        len(at) / _windows(shown),
        excess,
        1 + excess / usual if usual > 0 else math.inf,
        phase,
        above[phase],
        float(np.average(waits, weights=weight)),
    )
