# SPDX-License-Identifier: Apache-2.0
"""Which share of the time of a run went into steps that count (goodput), and where the rest went (badput)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np

from .lines import number_of
from .run import LEAD, Run
from .steps import LONGEST, Array, RankSteps, reduce_steps
from .view import bucket_width, view

# The causes of badput, in the order in which they are shown, in words.
BADPUT = {
    "start": "starting",
    "compile": "compiling and warming up",
    "data": "waiting for data",
    "save": "saving",
    "load": "loading checkpoints",
    "evaluation": "evaluation",
    "waiting": "waiting for other ranks",
    "repeated": "steps that were lost and repeated",
    "restart": "time between the end of a process and the next start",
    "other": "unknown",
}
# What the event at the end of something adds to.
_CAUSES = {"save": "save", "resume": "load", "evaluation_end": "evaluation"}
# The usual time of a step is the median over so many ranges of steps.
_BUCKETS = 256
# First steps of a process that may be longer than usual, and by how much they then are.
_WARM_UP_STEPS = 8
_LONGER = 1.4
# The wait for others is read step by step, in samples of the range: most samples, and the steps of each.
_MOST_SAMPLES = 8
_SAMPLE_STEPS = 64


@dataclass(frozen=True)
class Goodput:
    """Where the time of a run went, as rank 0 has spent it. All shares add up to 1."""

    seconds: float
    """From the first launch to the end of the run, or to what is newest of it."""
    share: float
    """The share of steps that count."""
    badput: dict[str, float]
    """The other shares, for each of `BADPUT`."""


def goodput(run: Run) -> Goodput | None:
    """The goodput of a whole run; None before the first step, and where nothing of rank 0 is recorded."""
    lead = run.ranks.get(LEAD)
    if lead is None or lead.last is None:
        return None
    spent = dict.fromkeys(BADPUT, 0.0)
    elapsed = _add_timeline(spent, run, lead)
    first = lead.first_step
    last = lead.last_step
    width = bucket_width(last - first + 1, _BUCKETS)
    buckets = reduce_steps([lead], first, last, width)
    seconds = buckets.sum("seconds")
    data = buckets.sum("data")
    saving = buckets.sum("checkpoint")
    weight = buckets.steps("seconds")
    saved = float(saving.sum())
    spent["data"] = float(data.sum())
    spent["save"] = max(spent["save"], saved)
    spent["repeated"] = lead.repeated
    work = seconds - data - saving
    with np.errstate(all="ignore"):
        usual = weighted_median((work / weight)[0], weight[0])
    spent["compile"] = _warm_up(lead, usual)
    # The wait for others who warm up is part of the warm-up.
    first = min(first + _WARM_UP_STEPS, last)
    waits = sampled_waits(run, first, last)
    waited, _, sampled = waits[:, 0]
    steps = float(weight.sum())
    spent["waiting"] = float(waited / sampled) * steps
    good = float(work.sum())
    good -= spent["compile"]
    good -= spent["waiting"]
    good = max(0.0, good)
    recorded = good + sum(spent.values())
    # Clocks that were set may leave less time than the parts have.
    total = max(elapsed, recorded)
    if total <= 0:
        return None
    spent["other"] = total - recorded
    shares = {}
    for cause, value in spent.items():
        shares[cause] = value / total
    return Goodput(total, good / total, shares)


def _add_timeline(spent: dict[str, float], run: Run, lead: RankSteps) -> float:
    """Add what happened between the steps of a rank. Returns the seconds from its launch to its newest moment."""
    events: list[dict[str, Any]] = list(run.lead_events)
    if lead.last is not None:
        events.append({"time": float(lead.last["time"]), "event": "step"})
    for time_before, record in lead.first_steps:
        seconds = float(np.nan_to_num(record["seconds"]))
        seconds *= int(record["steps"])
        begin = float(record["time"]) - seconds
        events.append({"time": begin, "event": "first step"})
        if math.isfinite(time_before):
            events.append({"time": time_before, "event": "step"})
    events.sort(key=itemgetter("time"))
    launch = events[0]
    begin = launch["time"] - _seconds_of(launch)
    last = begin
    is_starting = False
    evaluation = math.inf
    for event in events:
        time = event["time"]
        kind = event["event"]
        seconds = _seconds_of(event)
        passed = time - last
        last = time
        if kind == "evaluation_begin":
            evaluation = time
        elif kind == "evaluation_end":
            seconds = max(0.0, time - evaluation)
            evaluation = math.inf
        if kind == "start":
            launching = min(passed, seconds)
            spent["start"] += launching
            spent["restart"] += passed - launching
            is_starting = True
        elif is_starting:
            spent["start"] += passed
            is_starting = kind != "first step"
        cause = _CAUSES.get(kind)
        if cause is not None:
            spent[cause] += seconds
            if is_starting:
                spent["start"] -= seconds
    spent["start"] = max(0.0, spent["start"])
    return float(last - begin)


def _seconds_of(event: Mapping[str, Any]) -> float:
    """How long what ends with an event took; 0 where that is not known."""
    seconds = number_of(event.get("seconds"))
    if 0 < seconds < LONGEST:
        return seconds
    return 0.0


def _warm_up(lead: RankSteps, usual: float) -> float:
    """Seconds by which the first steps of each process took longer than usual, without data and saves."""
    longer = 0.0
    for _, first in lead.first_steps:
        step = int(first["step"])
        records = lead.records(step, step + _WARM_UP_STEPS - 1)
        # Steps that were made again are not among its records.
        if len(records) and records["time"][0] == first["time"]:
            data = np.nan_to_num(records["data"])
            saving = np.nan_to_num(records["checkpoint"])
            work = records["seconds"] - data - saving
            is_longer = work > _LONGER * usual
            is_longer = np.logical_and.accumulate(is_longer)
            lost = (work - usual) * records["steps"]
            longer += float(lost[is_longer].sum())
    return longer


def sampled_waits(run: Run, first: int, last: int) -> Array:
    """The waits for slower ranks in samples of a range of steps: a mean over steps does not show them.

    Returns:
        Seconds of waiting, seconds, and steps, of each rank in all samples: an array of shape (3, ranks).
    """
    samples = _BUCKETS // len(run.ranks)
    samples = max(1, min(_MOST_SAMPLES, samples))
    last_start = max(first, last - _SAMPLE_STEPS + 1)
    starts = np.linspace(last_start, first, samples)
    total: Array = np.zeros((3, 1))
    for start in np.unique(starts.astype(int)).tolist():
        stop = min(last, start + _SAMPLE_STEPS - 1)
        shown = view(run, start, stop, _SAMPLE_STEPS)
        weight = shown.weight
        # The fastest communication has no wait.
        communication = np.nan_to_num(shown.phases["communication"])
        fastest = communication.min(axis=0)
        waits = (shown.waits - fastest) * weight
        seconds = shown.seconds * weight
        total = total + np.nansum([waits, seconds, weight], axis=-1)
    return total


def weighted_median(values: Array, weight: Array) -> float:
    """The median of the values that are known, of which each counts with its weight; NaN without one."""
    has_weight = weight > 0
    is_known = np.isfinite(values) & has_weight
    if not is_known.any():
        return math.nan
    values = values[is_known]
    weight = weight[is_known]
    order = np.argsort(values)
    total = np.cumsum(weight[order])
    middle = np.searchsorted(total, total[-1] / 2)
    return float(values[order[middle]])
