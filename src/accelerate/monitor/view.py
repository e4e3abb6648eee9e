# SPDX-License-Identifier: Apache-2.0
"""What one screen shows of a run: all ranks, reduced to as many buckets of steps as there are pixels."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..telemetry.records import PHASES, StepsHeader
from .run import Run
from .steps import BLOCK, SUMS, Array, Buckets, reduce_steps

# The window of the straggler rule has at least as many steps.
WINDOW = 10
# A rank is slow if its own time exceeds the median of all ranks by this share, and by that share of the step.
EXCESS = 0.2
OF_STEP = 0.02
# Steps of all ranks together whose records a view reads from the files. Longer ranges are shown in blocks.
MOST_STEPS = 1 << 19
# Rows of the heat map. With more ranks a row shows the slowest of neighbouring ones.
MOST_ROWS = 256
# The phases of a step in the order in which they are stacked; `other` is what no phase covers.
ALL_PHASES = (*PHASES, "other")


@dataclass
class Curve:
    """Values at buckets or, with `x`, at other steps: arrays of shape (points,)."""

    mean: Array
    low: Array
    high: Array
    x: Array | None = None


@dataclass
class View:
    """A range of steps of a run. Arrays have one element for each bucket, NaN where nothing was recorded."""

    width: int
    """Steps of a bucket."""
    first: Array
    """The first step of each bucket."""
    last: Array
    time: Array
    """Seconds since 1970 at the end of each bucket."""
    ranks: list[int]
    weight: Array
    """Steps recorded, of shape (ranks, buckets)."""
    seconds: Array
    """Seconds of a step, of shape (ranks, buckets)."""
    waits: Array
    """Seconds of a step in communication, and in the wait for other ranks within other phases."""
    own: Array
    """Seconds of a step without these."""
    slow: Array
    """Where a rank is a straggler, of shape (ranks, buckets)."""
    phases: dict[str, Array]
    """For each of `ALL_PHASES` seconds of a step, of shape (ranks, buckets)."""
    skipped: Array
    """Skipped steps on any rank."""
    bad_loss: Array
    """Where the loss is not finite, of shape (ranks, buckets)."""
    memory: dict[str, Array]
    """Most bytes for `device` and `host`, of shape (ranks, buckets)."""
    buckets: Buckets
    """All values that were recorded."""
    shares: Array
    """The fraction of its samples that each rank alone contributes, of shape (ranks, 1)."""
    unit: str
    """What the curve of throughput counts per second: tokens, samples or steps."""
    curves: dict[str, Curve]
    logged: dict[str, Curve] = field(default_factory=dict)

    @property
    def x(self) -> Array:
        """The middle of each bucket, in steps."""
        return np.asarray((self.first + self.last) / 2)


def bucket_width(steps: int, pixels: int) -> int:
    """The smallest power of 2 with which `steps` fit in `pixels` buckets."""
    return 1 << max(0, math.ceil(math.log2(max(1, steps) / max(1, pixels))))


def view(run: Run, start: int | None = None, stop: int | None = None, pixels: int = 800) -> View:
    """Reduce a range of steps of a run.

    Buckets lie at multiples of their width, so that they do not move while the run grows.

    Args:
        run: the run.
        start: the first step. Default: the first of the run.
        stop: the last step. Default: the newest.
        pixels: the most buckets, about.
    """
    run_first = run.first_step
    run_last = run.last_step
    if start is None:
        start = run_first
    if stop is None:
        stop = run_last
    start = max(1, start)
    stop = max(start, min(run_last, stop))
    width = bucket_width(stop - start + 1, pixels)
    ranks = sorted(number for number, rank in run.ranks.items() if rank.last_step)
    files = [run.ranks[number] for number in ranks]
    if files:
        # Records of ranks that cover several steps do not end with the same ones: wide buckets have some of each rank.
        steps_per_record = files[0].steps_per_record(start, stop)
        if steps_per_record > 1.1:
            width = max(width, bucket_width(math.ceil(4 * steps_per_record), 1))
    if (stop - start + 1) * len(files) > MOST_STEPS:
        width = max(width, BLOCK)
    buckets = reduce_steps(files, start, stop, width)
    shares = np.array([data_share(file.header) for file in files]).reshape(-1, 1)
    numbers = np.arange((start - 1) // width, (stop - 1) // width + 1)
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        # Means of buckets without a value.
        warnings.simplefilter("ignore", RuntimeWarning)
        shown = _shown(ranks, buckets, shares, numbers, width)
        shown.logged = _logged(run, start, stop, width)
    # Buckets are complete, except at the ends of the run.
    shown.first = np.maximum(shown.first, min(start, run_first))
    shown.last = np.minimum(shown.last, max(stop, run_last))
    if run_last - run_first + 1 < WINDOW:
        # Too few steps to compare.
        shown.slow[:] = False
    return shown


def data_share(header: StepsHeader) -> float:
    """The fraction of the samples of a rank that it alone contributes: several ranks may read the same ones."""
    shards = header.details.get("data_shards")
    if isinstance(shards, int) and 0 < shards <= header.world_size:
        return shards / header.world_size
    return 1.0


def _shown(ranks: list[int], buckets: Buckets, shares: Array, numbers: Array, width: int) -> View:
    def curve(name: str, high: Array) -> Curve:
        return Curve(
            mean=_over(np.nanmean, buckets.mean(name)),
            low=_over(np.nanmin, buckets.lowest(name)),
            high=_over(np.nanmax, high),
        )

    seconds = buckets.mean("seconds")
    weight = buckets.steps("seconds")
    phases = {name: buckets.mean(name) for name in PHASES}
    waits = np.nan_to_num(phases["communication"]) + _waits_within(seconds, phases)
    own = seconds - waits
    covered = np.nansum(list(phases.values()), axis=0)
    phases["other"] = np.maximum(seconds - covered, 0)
    curves = {}
    for name in ("loss", "gradient_norm", "learning_rate", "device_memory", "host_memory"):
        curves[name] = curve(name, buckets.highest(name))
    longest = np.fmax(buckets.highest("seconds"), buckets.highest("longest"))
    curves["seconds"] = curve("seconds", longest)
    unit, throughput = _throughput(buckets, shares, seconds)
    curves["throughput"] = Curve(throughput, throughput, throughput)
    return View(
        width=width,
        first=numbers * width + 1,
        last=(numbers + 1) * width,
        time=_over(np.nanmax, buckets.time),
        ranks=ranks,
        weight=weight,
        seconds=seconds,
        waits=waits,
        own=own,
        slow=stragglers(own, seconds, weight),
        phases=phases,
        skipped=_over(np.nanmax, buckets.skipped),
        bad_loss=_bad_loss(buckets),
        memory={
            "device": buckets.highest("device_memory"),
            "host": buckets.highest("host_memory"),
        },
        buckets=buckets,
        shares=shares,
        unit=unit,
        curves=curves,
    )


def _waits_within(seconds: Array, phases: dict[str, Array]) -> Array:
    """Seconds in which ranks wait for others in collectives that are part of other phases.

    DDP reduces gradients in the backward; sharded layouts also collect parameters in the forward, and norms in the
    optimizer. What these phases take longer than on the fastest rank is waiting, as far as another rank takes longer
    in the phases before it, in which no collective runs.
    """
    longest_waits = np.zeros(seconds.shape)
    if len(seconds) < 2:
        return longest_waits
    durations = {name: np.nan_to_num(values) for name, values in phases.items()}
    outside = seconds - durations["communication"]

    def waits_in(*names: str) -> tuple[Array, Array]:
        """The waits in these phases, and the seconds before them."""
        inside = np.where(np.isnan(seconds), np.nan, 0.0)
        for name in names:
            inside += durations[name]
        before = outside - inside
        excess = inside - np.nanmin(inside, axis=0)
        latest = np.nanmax(before, axis=0)
        return np.clip(latest - before, 0, excess), before

    in_backward, _ = waits_in("backward")
    in_all, before = waits_in("forward", "backward", "optimizer")
    # Ranks that wait for each other in the forward end it at the same time.
    ends = before + durations["forward"]
    in_all = np.where(_spread(ends) <= 0.5 * _spread(before), in_all, 0)
    for waits in (in_backward, in_all):
        longest_waits = np.fmax(longest_waits, np.nan_to_num(waits))
    return longest_waits


def _spread(values: Array) -> Array:
    return np.asarray(np.nanmax(values, axis=0) - np.nanmin(values, axis=0))


def _bad_loss(buckets: Buckets) -> Array:
    """Where the loss is not finite: nowhere on ranks that know no loss at all."""
    steps = buckets.steps("loss")
    # Steps that are not split into phases have no loss either.
    is_bad = buckets.steps("optimizer") > steps
    is_bad |= np.isinf(buckets.lowest("loss"))
    is_bad |= np.isinf(buckets.highest("loss"))
    is_bad &= steps.any(axis=1, keepdims=True)
    return is_bad


def _over(function: Any, values: Array) -> Array:
    if len(values):
        return np.asarray(function(values, axis=0))
    return np.full(values.shape[1], np.nan)


def _throughput(buckets: Buckets, shares: Array, seconds: Array) -> tuple[str, Array]:
    """The sum over ranks of what each processes in a second, what several process counted once."""
    recorded = [unit for unit in SUMS if buckets.steps(unit).any()]
    if not recorded:
        return "steps", _over(np.nanmean, 1 / seconds)
    unit = recorded[-1]
    amounts = shares * buckets.sum(unit)
    amounts[buckets.steps(unit) == 0] = np.nan
    rates = amounts / buckets.sum("seconds")
    # At the newest steps some ranks are not written yet: the others stand for them.
    present = (~np.isnan(rates)).sum(axis=0)
    expected = present.copy()
    for back in (2, 1):
        if len(present) > back and present[-back]:
            expected[-back] = max(expected[-back], expected[-back - 1])
    total = np.nansum(rates, axis=0) * expected / present
    return unit, np.where(present > 0, total, np.nan)


def stragglers(own: Array, seconds: Array, weight: Array) -> Array:
    """Where ranks are slow: the straggler rule.

    A rank is slow in a window of at least `WINDOW` steps if its own time, that of the step without communication
    and waiting, exceeds the median over ranks (of an even number the lower one) by more than 20%, and by more than
    2% of the step.

    Args:
        own: seconds of a step without communication and waiting, of shape (ranks, buckets).
        seconds: seconds of a step, likewise.
        weight: steps of each bucket, likewise. A window ends with its bucket and has as many as it needs.

    Returns:
        Booleans of the same shape.
    """
    most = weight.max(axis=0, initial=0)
    if len(own) < 2 or not most.any():
        return np.zeros(own.shape, bool)
    usual_steps = float(np.median(most[most > 0]))
    buckets = max(1, math.ceil(WINDOW / usual_steps))
    mean = _moving(own, weight, buckets)
    step = _moving(seconds, weight, buckets)
    # NaN is sorted to the end.
    ordered = np.sort(mean, axis=0)
    present = (~np.isnan(mean)).sum(axis=0)
    middle = np.maximum((present - 1) // 2, 0)
    median = np.take_along_axis(ordered, middle[None], axis=0)
    steps_of_window = _summed(weight, buckets).max(axis=0)
    is_slow = weight > 0
    is_slow &= steps_of_window >= min(WINDOW, most.sum())
    with np.errstate(invalid="ignore"):
        is_slow &= mean > median * (1 + EXCESS)
        is_slow &= mean - median > OF_STEP * step
    return is_slow


def _moving(values: Array, weight: Array, buckets: int) -> Array:
    known_weight = np.where(np.isnan(values), 0, weight)
    with np.errstate(invalid="ignore", divide="ignore"):
        return _summed(np.nan_to_num(values) * known_weight, buckets) / _summed(
            known_weight, buckets
        )


def _summed(values: Array, buckets: int) -> Array:
    """Sums over the last `buckets` elements of each row."""
    if buckets == 1:
        return values
    total = np.cumsum(np.pad(values, ((0, 0), (buckets, 0))), axis=1)
    return np.asarray(total[:, buckets:] - total[:, :-buckets])


def _logged(run: Run, start: int, stop: int, width: int) -> dict[str, Curve]:
    """The logged values of a range, several in a bucket reduced to one point."""
    recorded = [rank for _, rank in sorted(run.ranks.items()) if rank.last_step]
    curves = {}
    for name, series in run.series.items():
        steps, times, values = series.points()
        has_gaps = np.isnan(steps).any()
        if recorded:
            reached = recorded[0].steps_at(times)
            # A step that is no number of optimizer steps (an epoch, or batches) is placed by its time.
            if has_gaps or not 0.5 <= (steps[-1] + 1) / (reached[-1] + 1) <= 2:
                steps = reached
        elif has_gaps:
            steps = np.arange(len(steps), dtype="f8")
        is_inside = (steps >= start - 1) & (steps <= stop + 1)
        steps = steps[is_inside]
        values = values[is_inside]
        if not len(steps):
            continue
        order = np.argsort(steps, kind="stable")
        steps = steps[order]
        values = values[order]
        starts = np.flatnonzero(np.diff(steps // width, prepend=-1))
        counts = np.diff(starts, append=len(steps))
        curves[name] = Curve(
            mean=np.add.reduceat(values, starts) / counts,
            low=np.fmin.reduceat(values, starts),
            high=np.fmax.reduceat(values, starts),
            x=np.add.reduceat(steps, starts) / counts,
        )
    return curves


def heat_rows(shown: View) -> tuple[list[tuple[int, int]], Array, Array, Array]:
    """The rows of the heat map: (first rank, last rank) of each, their own time, step time, and where one is slow."""
    count = len(shown.ranks)
    size = max(1, math.ceil(count / MOST_ROWS))
    starts = range(0, count, size)
    rows = []
    for start in starts:
        group = shown.ranks[start : start + size]
        rows.append((group[0], group[-1]))
    if size == 1:
        return rows, shown.own, shown.seconds, shown.slow
    own = np.fmax.reduceat(shown.own, starts)
    seconds = np.fmax.reduceat(shown.seconds, starts)
    slow = np.logical_or.reduceat(shown.slow, starts)
    return rows, own, seconds, slow
