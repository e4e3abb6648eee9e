# SPDX-License-Identifier: Apache-2.0
"""Figures that summarize the records of a run: where the time went, which rank was slow, and what stands out."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from textwrap import shorten

import numpy as np

from .run import Run
from .slow_ranks import Straggler, briefly_slow_ranks, slow_ranks
from .steps import Array
from .view import ALL_PHASES, WINDOW, View, view

# Buckets of the range that is summarized, and most for what is short: of one rank, and of all together.
_BUCKETS = 256
_FINE_BUCKETS, _FINE_VALUES = 4096, 200_000
# Seconds that slow steps must have cost to be named, and those with which a process begins.
_LEAST_LOST, _LEAST_WARM_UP = 5.0, 1.0
# The wait for others is read step by step, in samples of the range: most samples, and the steps of each.
_MOST_SAMPLES, _SAMPLE_STEPS = 8, 64


@dataclass(frozen=True)
class Period:
    """Steps that were slow on all ranks, unlike those before and after them."""

    first: int
    last: int
    seconds: float
    """Of a step, the mean."""
    usual: float
    """Of a step otherwise."""
    lost: float
    """Seconds above the usual."""
    phase: str
    """In which most of that was lost."""
    is_first: bool
    """Whether a process began with it."""


@dataclass(frozen=True)
class Summary:
    """Figures of a range of steps; the defaults are those of a run without a step."""

    first: int = 0
    last: int = 0
    ranks: int = 0
    duration: float = 0.0
    """Seconds that the steps took."""
    seconds: float = math.nan
    """Seconds of a step, the mean."""
    typical: float = math.nan
    """The median over buckets of steps."""
    throughput: float = 0.0
    unit: str = "steps"
    flops: float = math.nan
    """Floating point operations of one device in a second, as declared by the run; NaN where they are not known."""
    utilization: float = math.nan
    """`flops` as a share of the device's peak (MFU); NaN where it is not known."""
    shares: dict[str, float] = field(default_factory=dict)
    """For each of `ALL_PHASES` its share of the time."""
    waiting: float = 0.0
    """The share of the time in which ranks wait for slower ones, about."""
    period: Period | None = None
    """The steps that cost most time of those that were unusually slow, if they cost much."""
    usual_shares: dict[str, float] = field(default_factory=dict)
    """The shares outside of these steps."""
    evaluations: int = 0
    evaluating: float = 0.0
    """Seconds of evaluations, which are in no step."""
    restarts: int = 0
    restarting: float = 0.0
    """Seconds that restarts have cost, steps that were made again included."""
    loss: tuple[float, float] = (math.nan, math.nan)
    """At the beginning and at the end."""
    lowest_loss: tuple[float, int] = (math.nan, 0)
    """The lowest, as a mean over neighbouring steps, and about when that was."""
    bad_loss: int | None = None
    """The first step at which the loss is not finite."""
    bad_loss_ranks: tuple[int, ...] = ()
    skipped: int = 0
    memory: dict[str, float] = field(default_factory=dict)
    """The most bytes of any rank, for `device` and `host`."""
    memory_growth: float = 0.0
    """Bytes by which the host memory grows in 1000 steps, if it grows all the time."""
    stragglers: tuple[Straggler, ...] = ()
    incidents: tuple[tuple[str, str, tuple[int, ...]], ...] = ()
    """Hangs, and errors of memory: the event, a message, and the ranks."""

    @property
    def steps(self) -> int:
        """The number of steps."""
        return self.last - self.first + 1

    @property
    def elapsed(self) -> float:
        """Seconds from the first step to the last, with what happened between steps."""
        return self.duration + self.evaluating + self.restarting


def summarize(run: Run, start: int | None = None, stop: int | None = None) -> Summary:
    """Summarize a range of steps, by default all of them."""
    with run.lock, warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore", RuntimeWarning)
        return _summary(
            run, view(run, start, stop, _BUCKETS), is_end=stop is None or stop >= run.last_step
        )


def _summary(run: Run, shown: View, is_end: bool) -> Summary:
    weight = shown.weight
    recorded = np.flatnonzero((weight > 0).any(axis=0))
    if not len(recorded):
        return Summary(incidents=_incidents(run, 0, math.inf))
    first, last = int(shown.first[recorded[0]]), int(shown.last[recorded[-1]])
    seconds = np.nan_to_num(shown.seconds) * weight
    duration = float(seconds.sum(axis=1).max())
    stragglers = slow_ranks(run, shown)
    if len(shown.ranks) > 1:
        pixels = max(_BUCKETS, min(_FINE_BUCKETS, _FINE_VALUES // len(shown.ranks)))
        if shown.width == 1:
            fine = shown
        else:
            fine = view(run, first, last, pixels)
        named = {straggler.rank for straggler in stragglers}
        stragglers += [
            straggler for straggler in briefly_slow_ranks(run, fine) if straggler.rank not in named
        ]
    period, is_usual = _period(run, shown, stragglers)
    begin = float(shown.time[recorded[0]] - seconds[:, recorded[0]].max())
    end = float(shown.time[recorded[-1]])
    # What comes after the last step belongs to the newest steps.
    evaluations, evaluating = _evaluations(run, begin, math.inf if is_end else end)
    restarts = _restarts(run, begin, end)
    loss = shown.curves["loss"].mean
    finite = loss[np.isfinite(loss)]
    has_bad_loss = np.asarray(shown.bad_loss.any(axis=1))
    throughput, lengths = shown.curves["throughput"].mean, seconds.max(axis=0)
    has_rate = np.isfinite(throughput) & (lengths > 0)
    if has_rate.any():
        rate = float(np.average(throughput[has_rate], weights=lengths[has_rate]))
    else:
        rate = 0.0
    flops, utilization = _utilization(run, rate, shown)
    return Summary(
        first=first,
        last=last,
        ranks=len(shown.ranks),
        duration=duration,
        seconds=float(seconds.sum() / weight.sum()),
        typical=_weighted_median(np.nanmean(shown.seconds, axis=0), weight.max(axis=0)),
        throughput=rate,
        unit=shown.unit,
        flops=flops,
        utilization=utilization,
        shares=_shares(shown, np.ones(len(shown.x), bool)),
        waiting=_waiting(run, first, last),
        period=period,
        usual_shares=_shares(shown, is_usual),
        evaluations=evaluations,
        evaluating=evaluating,
        restarts=restarts,
        restarting=max(0.0, end - begin - duration - _evaluations(run, begin, end)[1])
        if restarts
        else 0.0,
        loss=(float(finite[0]), float(finite[-8:].mean())) if len(finite) else (math.nan, math.nan),
        lowest_loss=_lowest(shown),
        bad_loss=_first_bad_step(run, shown) if has_bad_loss.any() else None,
        bad_loss_ranks=tuple(itertools.compress(shown.ranks, has_bad_loss.tolist())),
        skipped=int(np.nansum(shown.skipped)),
        memory={
            kind: float(np.nanmax(high))
            for kind, high in shown.memory.items()
            if np.isfinite(high).any()
        },
        memory_growth=_growth(shown),
        stragglers=tuple(stragglers),
        incidents=_incidents(run, begin, math.inf if is_end else end),
    )


def _utilization(run: Run, rate: float, shown: View) -> tuple[float, float]:
    """FLOP/s of one device, and their share of its peak; NaN where they are not known.

    Args:
        run: whose `work` is declared for each token or sample.
        rate: tokens or samples of all ranks in a second.
        shown: has the unit of `rate`.
    """
    work = run.work or {}
    flops, peak = (
        value if isinstance(value := work.get(name), int | float) else math.nan
        for name in ("flops", "peak")
    )
    if f"{work.get('unit')}s" != shown.unit or not rate:
        return math.nan, math.nan
    of_device = flops * rate / len(shown.ranks)
    return of_device, of_device / peak if peak > 0 else math.nan


def _shares(shown: View, where: Array) -> dict[str, float]:
    """For each phase its share of the time in some buckets."""
    weight = shown.weight[:, where]
    total = np.nansum(shown.seconds[:, where] * weight)
    return {
        phase: float(np.nansum(shown.phases[phase][:, where] * weight) / total)
        if total > 0
        else 0.0
        for phase in ALL_PHASES
    }


def _weighted_median(values: Array, weight: Array) -> float:
    is_known = np.isfinite(values) & (weight > 0)
    values, weight = values[is_known], weight[is_known]
    order = np.argsort(values)
    middle = np.searchsorted(np.cumsum(weight[order]), weight.sum() / 2)
    if len(order):
        return float(values[order][middle])
    return math.nan


def _waiting(run: Run, first: int, last: int) -> float:
    """The share of the time in which ranks wait for slower ones, in a sample: a mean over steps does not show it."""
    samples = max(1, min(_MOST_SAMPLES, _BUCKETS // max(1, len(run.ranks))))
    waited = total = 0.0
    for start in np.unique(
        np.linspace(first, max(first, last - _SAMPLE_STEPS + 1), samples).astype(int)
    ).tolist():
        shown = view(run, start, min(last, start + _SAMPLE_STEPS - 1), _SAMPLE_STEPS)
        if len(shown.ranks) < 2:
            return 0.0
        # The fastest communication has no wait.
        waits = shown.waits - np.nan_to_num(shown.phases["communication"]).min(axis=0)
        waited += float(np.nansum(waits * shown.weight))
        total += float(np.nansum(shown.seconds * shown.weight))
    if total > 0:
        return waited / total
    return 0.0


def _period(run: Run, shown: View, stragglers: Sequence[Straggler]) -> tuple[Period | None, Array]:
    """The neighbouring steps that were slow on all ranks and cost most, if they stand out; and the buckets without."""
    all_buckets = np.ones(len(shown.x), bool)
    weight = shown.weight.max(axis=0)
    phases = {phase: np.nan_to_num(np.nanmean(shown.phases[phase], axis=0)) for phase in ALL_PHASES}
    # Waiting has the cause in another rank, and checkpoints come back at intervals.
    phases["backward"] -= np.nan_to_num(np.nanmean(shown.waits, axis=0) - phases["communication"])
    checkpoint = phases.pop("checkpoint")
    seconds = np.nan_to_num(np.nanmean(shown.seconds, axis=0)) - checkpoint
    usual = _weighted_median(seconds, weight)
    slow = np.flatnonzero((seconds > 1.4 * usual) & (weight > 0))
    if not len(slow):
        return None, all_buckets
    losses = (seconds - usual) * weight
    pieces = np.split(slow, np.flatnonzero(np.diff(slow) > 1) + 1)
    buckets = max(pieces, key=lambda piece: float(losses[piece].sum()))
    lost, first, last = (
        float(losses[buckets].sum()),
        int(shown.first[buckets[0]]),
        int(shown.last[buckets[-1]]),
    )
    total = float(((seconds + checkpoint) * weight).sum())
    is_first = any(run.ranks[rank].begins_between(first, last) for rank in shown.ranks[:4])
    if (
        lost
        < max(0.05 * total, 0.5 * losses[slow].sum(), _LEAST_WARM_UP if is_first else _LEAST_LOST)
        or weight[buckets].sum() > 0.5 * weight.sum()
        # The sentences of slow ranks report it.
        or any(
            one.first - shown.width <= first and last <= one.last + WINDOW + shown.width
            for one in stragglers
        )
    ):
        return None, all_buckets
    is_usual = all_buckets.copy()
    is_usual[buckets] = False
    otherwise = is_usual & (weight > 0)

    def excess(phase: str) -> float:
        inside = np.average(phases[phase][buckets], weights=weight[buckets])
        return float(inside - np.average(phases[phase][otherwise], weights=weight[otherwise]))

    mean = float(np.average(seconds[buckets], weights=weight[buckets]))
    return Period(first, last, mean, usual, lost, max(phases, key=excess), is_first), is_usual


def _evaluations(run: Run, begin: float, end: float) -> tuple[int, float]:
    """The number of evaluations, and the seconds of the rank that evaluated longest."""
    seconds: dict[int, list[float]] = {}
    starts: dict[int, float] = {}
    for event in run.events:
        rank, time = event["rank"], event["time"]
        if event["event"] == "evaluation_begin":
            starts[rank] = time
        elif (
            event["event"] == "evaluation_end"
            and begin <= (start := starts.pop(rank, -1.0)) <= time <= end
        ):
            seconds.setdefault(rank, []).append(time - start)
    longest = max(seconds.values(), key=sum, default=[])
    return len(longest), sum(longest)


def _restarts(run: Run, begin: float, end: float) -> int:
    """How often a process has continued the run, at most on any rank."""
    starts: dict[int, list[float]] = {}
    for event in run.events:
        if event["event"] == "start":
            starts.setdefault(event["rank"], []).append(event["time"])
    return max(
        (sum(begin <= time <= end for time in times[1:]) for times in starts.values()), default=0
    )


def _incidents(run: Run, begin: float, end: float) -> tuple[tuple[str, str, tuple[int, ...]], ...]:
    """Hangs, equal ones of several ranks together, and ranks whose memory was not enough: the newest."""
    ranks: dict[tuple[str, str], set[int]] = {}
    for event in run.events:
        kind = event["event"]
        is_incident = kind in ("out_of_memory", "hang") and event.get("path") is None
        if is_incident and begin <= event["time"] <= end:
            if kind == "hang":
                message = shorten(str(event.get("message", "")), 600, placeholder=" […]")
            else:
                message = ""
            ranks.setdefault((kind, message), set()).add(event["rank"])
    return tuple(
        (kind, message, tuple(sorted(found))) for (kind, message), found in list(ranks.items())[-4:]
    )


def _first_bad_step(run: Run, shown: View) -> int:
    """The first step whose loss is not finite."""
    bucket = int(np.flatnonzero(shown.bad_loss.any(axis=0))[0])
    first, last = int(shown.first[bucket]), int(shown.last[bucket])
    steps = view(run, first, last, shown.width)
    is_bad = steps.bad_loss.any(axis=0)
    if is_bad.any():
        return int(steps.first[is_bad][0])
    return first


def _lowest(shown: View) -> tuple[float, int]:
    """The lowest mean of the loss over neighbouring buckets, and about the step of it."""
    loss = shown.curves["loss"].mean
    buckets = np.flatnonzero(np.isfinite(loss))
    if not len(buckets):
        return math.nan, 0
    size = min(8, len(buckets))
    means = np.convolve(loss[buckets], np.ones(size) / size, "valid")
    lowest = int(np.argmin(means))
    return float(means[lowest]), int(shown.x[buckets[lowest + size // 2]])


def _growth(shown: View) -> float:
    """Bytes of host memory in 1000 steps, if it grew in the second half by more than 5 % and almost always."""
    memory = shown.curves["host_memory"].mean
    buckets = np.flatnonzero(np.isfinite(memory))
    buckets = buckets[len(buckets) // 2 :]
    if len(buckets) < 16 or memory[buckets[-1]] < 1.05 * memory[buckets[0]]:
        return 0.0
    means = [piece.mean() for piece in np.array_split(memory[buckets], 8)]
    if any(later <= earlier for earlier, later in itertools.pairwise(means)):
        return 0.0
    ends = buckets[[0, -1]]
    return float(np.diff(memory[ends])[0] / np.diff(shown.x[ends])[0] * 1000)
