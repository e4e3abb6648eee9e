# SPDX-License-Identifier: Apache-2.0
"""Figures that summarize the records of a run: where the time went, which rank was slow, and what stands out."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from textwrap import shorten
from typing import Any

import numpy as np

from .goodput import Goodput, goodput, sampled_waits, weighted_median
from .run import Run
from .slow_ranks import Straggler, slow_ranks
from .steps import Array
from .view import ALL_PHASES, WINDOW, View, view

# The event, a message, and the ranks.
Incident = tuple[str, str, tuple[int, ...]]
# Buckets of the range that is summarized.
_BUCKETS = 256
# Seconds that slow steps must have cost to be named, and those with which a process begins.
_LEAST_LOST = 5.0
_LEAST_WARM_UP = 1.0


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
    goodput: Goodput | None = None
    """Of the whole run."""
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
    incidents: tuple[Incident, ...] = ()
    """Hangs, and errors of memory."""
    stopped_by: Incident | None = None
    """The first incident after the last step."""

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
    is_end = stop is None or stop >= run.last_step
    with run.lock, warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore", RuntimeWarning)
        return _summary(run, view(run, start, stop, _BUCKETS), is_end)


def _summary(run: Run, shown: View, is_end: bool) -> Summary:
    weight = shown.weight
    recorded = np.flatnonzero(weight.any(axis=0))
    if not len(recorded):
        incidents = _incidents(run.events)
        return Summary(incidents=incidents, stopped_by=next(iter(incidents), None))
    first = int(shown.first[recorded[0]])
    last = int(shown.last[recorded[-1]])
    seconds = np.nan_to_num(shown.seconds) * weight
    bucket_seconds = seconds.max(axis=0)
    duration = float(seconds.sum(axis=1).max())
    slow = slow_ranks(run, shown)
    period, is_usual = _period(run, shown, slow)
    begin = float(shown.time[recorded[0]] - bucket_seconds[recorded[0]])
    end = float(shown.time[recorded[-1]])
    until = end
    if is_end:
        # What comes after the last step belongs to the newest steps.
        until = math.inf
    evaluations = _evaluations(run, begin, until)
    restarts = _restarts(run, begin, end)
    restarting = 0.0
    if restarts:
        restarting = max(0.0, end - begin - duration - sum(_evaluations(run, begin, end)))
    stopped_by = None
    if is_end:
        stopped_by = next(iter(_incidents(_events_after_steps(run))), None)
    waited, sampled, _ = sampled_waits(run, first, last).sum(axis=1).tolist()
    rate = _weighted_mean(shown.curves["throughput"].mean, bucket_seconds)
    if math.isnan(rate):
        rate = 0.0
    flops, utilization = _utilization(run, rate, shown)
    loss = shown.curves["loss"].mean
    finite_loss = loss[np.isfinite(loss)]
    loss_ends = (math.nan, math.nan)
    if len(finite_loss):
        loss_ends = (float(finite_loss[0]), float(finite_loss[-8:].mean()))
    bad_loss_ranks = np.flatnonzero(shown.bad_loss.any(axis=1))
    bad_loss = None
    if len(bad_loss_ranks):
        bad_loss = _first_bad_step(run, shown)
    memory = {}
    for kind, high in shown.memory.items():
        if np.isfinite(high).any():
            memory[kind] = float(np.nanmax(high))
    return Summary(
        first=first,
        last=last,
        ranks=len(shown.ranks),
        duration=duration,
        seconds=float(seconds.sum() / weight.sum()),
        typical=weighted_median(np.nanmean(shown.seconds, axis=0), weight.max(axis=0)),
        throughput=rate,
        unit=shown.unit,
        flops=flops,
        utilization=utilization,
        shares=_shares(shown, np.ones(len(shown.x), bool)),
        waiting=waited / max(sampled, 1e-9),
        period=period,
        usual_shares=_shares(shown, is_usual),
        evaluations=len(evaluations),
        evaluating=sum(evaluations),
        restarts=restarts,
        restarting=restarting,
        goodput=goodput(run),
        loss=loss_ends,
        lowest_loss=_lowest(shown),
        bad_loss=bad_loss,
        bad_loss_ranks=tuple(shown.ranks[row] for row in bad_loss_ranks),
        skipped=int(np.nansum(shown.skipped)),
        memory=memory,
        memory_growth=_growth(shown),
        stragglers=tuple(slow),
        incidents=_incidents([event for event in run.events if begin <= event["time"] <= until]),
        stopped_by=stopped_by,
    )


def _utilization(run: Run, rate: float, shown: View) -> tuple[float, float]:
    """FLOP/s of one device, and their share of its peak; NaN where they are not known.

    Args:
        run: whose `work` is declared for each token or sample.
        rate: tokens or samples of all ranks in a second.
        shown: has the unit of `rate`.
    """
    work = run.work or {}
    flops = work.get("flops")
    if not isinstance(flops, int | float) or f"{work.get('unit')}s" != shown.unit or not rate:
        return math.nan, math.nan
    flops_of_device = flops * rate / len(shown.ranks)
    peak = work.get("peak")
    if isinstance(peak, int | float) and peak > 0:
        return flops_of_device, flops_of_device / peak
    return flops_of_device, math.nan


def _shares(shown: View, where: Array) -> dict[str, float]:
    """For each phase its share of the time in some buckets."""
    weight = shown.weight[:, where]
    total = np.nansum(shown.seconds[:, where] * weight)
    if total == 0:
        return dict.fromkeys(ALL_PHASES, 0.0)
    return {
        phase: float(np.nansum(shown.phases[phase][:, where] * weight) / total)
        for phase in ALL_PHASES
    }


def _weighted_mean(values: Array, weight: Array) -> float:
    """The mean of the values that are known, NaN if none has a weight."""
    is_known = np.isfinite(values) & (weight > 0)
    if is_known.any():
        return float(np.average(values[is_known], weights=weight[is_known]))
    return math.nan


def _period(run: Run, shown: View, stragglers: Sequence[Straggler]) -> tuple[Period | None, Array]:
    """The neighbouring steps that were slow on all ranks and cost most, if they stand out; and the buckets without."""
    is_usual = np.ones(len(shown.x), bool)
    weight = shown.weight.max(axis=0)
    phases = {phase: _mean_over_ranks(shown.phases[phase]) for phase in ALL_PHASES}
    # Waiting has the cause in another rank, and checkpoints come back at intervals.
    phases["backward"] -= _mean_over_ranks(shown.waits)
    phases["backward"] += phases["communication"]
    checkpoint = phases.pop("checkpoint")
    seconds = _mean_over_ranks(shown.seconds) - checkpoint
    usual = weighted_median(seconds, weight)
    is_slow = (seconds > 1.4 * usual) & (weight > 0)
    slow = np.flatnonzero(is_slow)
    if not len(slow):
        return None, is_usual
    losses = (seconds - usual) * weight
    gaps = np.flatnonzero(np.diff(slow) > 1)
    periods = np.split(slow, gaps + 1)
    lost_in = [float(losses[period].sum()) for period in periods]
    lost = max(lost_in)
    buckets = periods[lost_in.index(lost)]
    first = int(shown.first[buckets[0]])
    last = int(shown.last[buckets[-1]])
    is_first = any(run.ranks[rank].begins_between(first, last) for rank in shown.ranks[:4])
    least = _LEAST_LOST
    if is_first:
        least = _LEAST_WARM_UP
    total = float(((seconds + checkpoint) * weight).sum())
    if lost < least or lost < 0.05 * total or lost < 0.5 * losses[slow].sum():
        return None, is_usual
    if weight[buckets].sum() > 0.5 * weight.sum():
        return None, is_usual
    for straggler in stragglers:
        begins_before = straggler.first - shown.width <= first
        if begins_before and last <= straggler.last + WINDOW + shown.width:
            # The sentences of slow ranks report it.
            return None, is_usual
    is_usual[buckets] = False
    usual_weight = np.where(is_usual, weight, 0)

    def excess(phase: str) -> float:
        inside = np.average(phases[phase][buckets], weights=weight[buckets])
        return float(inside - np.average(phases[phase], weights=usual_weight))

    mean = float(np.average(seconds[buckets], weights=weight[buckets]))
    slowest_phase = max(phases, key=excess)
    return Period(first, last, mean, usual, lost, slowest_phase, is_first), is_usual


def _mean_over_ranks(values: Array) -> Array:
    return np.asarray(np.nan_to_num(np.nanmean(values, axis=0)))


def _evaluations(run: Run, begin: float, end: float) -> list[float]:
    """The seconds of each evaluation, of the rank that evaluated longest."""
    seconds: dict[int, list[float]] = {}
    starts: dict[int, float] = {}
    for event in run.events:
        rank = event["rank"]
        if event["event"] == "evaluation_begin":
            starts[rank] = event["time"]
        elif event["event"] == "evaluation_end":
            start = starts.pop(rank, -1.0)
            if begin <= start <= event["time"] <= end:
                seconds.setdefault(rank, []).append(event["time"] - start)
    return max(seconds.values(), key=sum, default=[])


def _restarts(run: Run, begin: float, end: float) -> int:
    """How often a process has continued the run, at most on any rank."""
    has_started: set[int] = set()
    restarts = Counter[int]()
    for event in run.events:
        if event["event"] == "start":
            rank = event["rank"]
            if rank in has_started and begin <= event["time"] <= end:
                restarts[rank] += 1
            has_started.add(rank)
    return max(restarts.values(), default=0)


def _events_after_steps(run: Run) -> list[dict[str, Any]]:
    """The events of each rank after its newest step."""
    events = []
    for event in run.events:
        rank = run.ranks.get(event["rank"])
        if rank is None or rank.last is None or event["time"] >= rank.last["time"]:
            events.append(event)
    return events


def _incidents(events: Sequence[dict[str, Any]]) -> tuple[Incident, ...]:
    """Hangs, equal ones of several ranks together, and ranks whose memory was not enough: the newest."""
    ranks: dict[tuple[str, str], set[int]] = {}
    for event in events:
        kind = event["event"]
        if kind not in ("out_of_memory", "hang") or event.get("path") is not None:
            continue
        message = ""
        if kind == "hang":
            message = str(event.get("message", ""))
            message = shorten(message, 600, placeholder=" […]")
        members = ranks.setdefault((kind, message), set())
        members.add(event["rank"])
    incidents = []
    for (kind, message), members in ranks.items():
        incidents.append((kind, message, tuple(sorted(members))))
    return tuple(incidents[-4:])


def _first_bad_step(run: Run, shown: View) -> int:
    """The first step whose loss is not finite."""
    bucket = int(np.flatnonzero(shown.bad_loss.any(axis=0))[0])
    first = int(shown.first[bucket])
    last = int(shown.last[bucket])
    steps = view(run, first, last, shown.width)
    is_bad = steps.bad_loss.any(axis=0)
    if is_bad.any():
        return int(steps.first[is_bad][0])
    return first


def _lowest(shown: View) -> tuple[float, int]:
    """The lowest mean of the loss over neighbouring buckets, and about the step of it."""
    loss = shown.curves["loss"].mean
    is_finite = np.isfinite(loss)
    if not is_finite.any():
        return math.nan, 0
    loss = loss[is_finite]
    size = min(8, len(loss))
    means = np.convolve(loss, np.ones(size) / size, "valid")
    lowest = int(np.argmin(means))
    return float(means[lowest]), int(shown.x[is_finite][lowest + size // 2])


def _growth(shown: View) -> float:
    """Bytes of host memory in 1000 steps, if it grew in the second half by more than 5 % and almost always."""
    memory = shown.curves["host_memory"].mean
    buckets = np.flatnonzero(np.isfinite(memory))
    buckets = buckets[len(buckets) // 2 :]
    if len(buckets) < 16:
        return 0.0
    first = buckets[0]
    last = buckets[-1]
    parts = np.array_split(memory[buckets], 8)
    means = [part.mean() for part in parts]
    if memory[last] < 1.05 * memory[first] or np.diff(means).min() <= 0:
        return 0.0
    growth = memory[last] - memory[first]
    steps = shown.x[last] - shown.x[first]
    return float(growth / steps * 1000)
