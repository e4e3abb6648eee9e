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
from .steps import COLUMN, Array, Buckets

# The window of the straggler rule has at least as many steps.
WINDOW = 10
# A rank is slow if its own time exceeds the median of all ranks by this share, and by that share of the step.
EXCESS, OF_STEP = 0.2, 0.02
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
    start = max(1, run.first_step if start is None else start)
    stop = max(start, min(run.last_step, run.last_step if stop is None else stop))
    width = bucket_width(stop - start + 1, pixels)
    ranks = sorted(number for number, rank in run.ranks.items() if rank.count)
    if ranks and (each := run.ranks[ranks[0]].steps_per_record(start, stop)) > 1.1:
        # Records of ranks that cover several steps do not end with the same ones: wide buckets have some of each rank.
        width = max(width, bucket_width(math.ceil(4 * each), 1))
    ranks_buckets = [run.ranks[number].view(start, stop, width) for number in ranks]
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        # Means of buckets without a value.
        warnings.simplefilter("ignore", RuntimeWarning)
        shares = [data_share(run.ranks[number].header) for number in ranks]
        shown = _reduced(ranks, ranks_buckets, shares, start, stop, width)
        # Buckets are complete, except at the ends of the run.
        shown.first = np.maximum(shown.first, min(start, run.first_step))
        shown.last = np.minimum(shown.last, max(stop, run.last_step))
        shown.logged = _logged(run, start, stop, width)
    if run.last_step - run.first_step + 1 < WINDOW:
        shown.slow[:] = False  # too few steps to compare
    return shown


def data_share(header: StepsHeader) -> float:
    """The fraction of the samples of a rank that it alone contributes: several ranks may read the same ones."""
    shards = header.details.get("data_shards")
    if isinstance(shards, int) and 0 < shards <= header.world_size:
        return shards / header.world_size
    return 1.0


def _reduced(
    ranks: list[int],
    ranks_buckets: list[Buckets],
    shares: list[float],
    start: int,
    stop: int,
    width: int,
) -> View:
    numbers = np.arange((start - 1) // width, (stop - 1) // width + 1)

    def stacked(values: list[Array]) -> Array:
        if values:
            return np.array(values)
        return np.empty((0, len(numbers)))

    def means(name: str) -> Array:
        return stacked([buckets.mean(name) for buckets in ranks_buckets])

    def lowest(name: str) -> Array:
        return stacked([buckets.low[:, COLUMN[name]] for buckets in ranks_buckets])

    def highest(name: str) -> Array:
        return stacked([buckets.high[:, COLUMN[name]] for buckets in ranks_buckets])

    seconds = means("seconds")
    weight = stacked([buckets.weight[:, COLUMN["seconds"]] for buckets in ranks_buckets])
    phases = {name: means(name) for name in PHASES}
    waits = np.nan_to_num(phases["communication"]) + _waits_within(seconds, phases)
    own = seconds - waits
    phases["other"] = np.maximum(
        seconds - sum(np.nan_to_num(values) for values in phases.values()), 0
    )
    memory = {kind: highest(f"{kind}_memory") for kind in ("device", "host")}
    unit, throughput = _throughput(ranks_buckets, shares, seconds, stacked)
    curves = {
        name: Curve(
            _over(np.nanmean, means(name)),
            _over(np.nanmin, lowest(name)),
            _over(np.nanmax, highest(name)),
        )
        for name in ("loss", "gradient_norm", "learning_rate")
    }
    longest = np.fmax(highest("seconds"), highest("longest"))
    curves["throughput"] = Curve(throughput, throughput, throughput)
    curves["seconds"] = Curve(
        _over(np.nanmean, seconds), _over(np.nanmin, lowest("seconds")), _over(np.nanmax, longest)
    )
    for kind, high in memory.items():
        mean = _over(np.nanmean, means(f"{kind}_memory"))
        curves[f"{kind}_memory"] = Curve(mean, _over(np.nanmin, high), _over(np.nanmax, high))
    return View(
        width=width,
        first=numbers * width + 1,
        last=(numbers + 1) * width,
        time=_over(np.nanmax, stacked([buckets.time for buckets in ranks_buckets])),
        ranks=ranks,
        weight=weight,
        seconds=seconds,
        waits=waits,
        own=own,
        slow=stragglers(own, seconds, weight),
        phases=phases,
        skipped=_over(np.nanmax, stacked([buckets.skipped for buckets in ranks_buckets])),
        bad_loss=stacked([_bad_loss(buckets) for buckets in ranks_buckets]),
        memory=memory,
        unit=unit,
        curves=curves,
    )


def _waits_within(seconds: Array, phases: dict[str, Array]) -> Array:
    """Seconds in which ranks wait for others in collectives that are part of other phases.

    DDP reduces gradients in the backward; sharded layouts also collect parameters in the forward, and norms in the
    optimizer. What these phases take longer than on the fastest rank is waiting, as far as another rank takes longer
    in the phases before it, in which no collective runs.
    """
    if len(seconds) < 2:
        return np.zeros(seconds.shape)
    durations = {name: np.nan_to_num(values) for name, values in phases.items()}
    outside = seconds - durations["communication"]
    longest_waits = np.zeros(seconds.shape)
    for names in (("backward",), ("forward", "backward", "optimizer")):
        inside = np.where(np.isnan(seconds), np.nan, sum(durations[name] for name in names))
        before = outside - inside
        waits = np.clip(np.nanmax(before, axis=0) - before, 0, inside - np.nanmin(inside, axis=0))
        if "forward" in names:
            # Ranks that wait for each other in the forward end it at the same time.
            ends = before + durations["forward"]
            waits = np.where(_spread(ends) <= 0.5 * _spread(before), waits, 0)
        longest_waits = np.fmax(longest_waits, np.nan_to_num(waits))
    return longest_waits


def _spread(values: Array) -> Array:
    return np.asarray(np.nanmax(values, axis=0) - np.nanmin(values, axis=0))


def _bad_loss(buckets: Buckets) -> Array:
    """Where the loss is not finite: nowhere on ranks that know no loss at all."""
    steps = buckets.weight[:, COLUMN["loss"]]
    # Steps that are not split into phases have no loss either.
    is_missing = buckets.weight[:, COLUMN["optimizer"]] > steps
    is_infinite = np.isinf(buckets.low[:, COLUMN["loss"]]) | np.isinf(
        buckets.high[:, COLUMN["loss"]]
    )
    return np.asarray((is_missing | is_infinite) & steps.any())


def _over(function: Any, values: Array) -> Array:
    if len(values):
        return np.asarray(function(values, axis=0))
    return np.full(values.shape[1], np.nan)


def _throughput(
    ranks_buckets: list[Buckets], shares: list[float], seconds: Array, stacked: Any
) -> tuple[str, Array]:
    """The sum over ranks of what each processes in a second, what several process counted once."""
    for unit in ("tokens", "samples"):
        column = COLUMN[unit]
        if any((buckets.weight[:, column] > 0).any() for buckets in ranks_buckets):
            rates = stacked(
                [
                    share
                    * np.where(buckets.weight[:, column] > 0, buckets.total[:, column], np.nan)
                    / buckets.total[:, COLUMN["seconds"]]
                    for share, buckets in zip(shares, ranks_buckets, strict=True)
                ]
            )
            break
    else:
        return "steps", _over(np.nanmean, 1 / seconds)
    # At the newest steps some ranks are not written yet: the others stand for them.
    present = (~np.isnan(rates)).sum(axis=0)
    expected = present.copy()
    for back in (2, 1):
        if len(present) > back:
            expected[-back] = max(expected[-back], expected[-back - 1] if present[-back] else 0)
    total = np.nansum(rates, axis=0) * expected / present
    return unit, np.where(present > 0, total, np.nan)


def stragglers(own: Array, seconds: Array, weight: Array) -> Array:
    """Where ranks are slow: the straggler rule.

    A rank is slow in a window of at least `WINDOW` steps if its own time, that of the step without communication
    and waiting, exceeds the median over ranks (of an even number the lower one) by more than 20 %, and by more than
    2 % of the step.

    Args:
        own: seconds of a step without communication and waiting, of shape (ranks, buckets).
        seconds: seconds of a step, likewise.
        weight: steps of each bucket, likewise. A window ends with its bucket and has as many as it needs.

    Returns:
        Booleans of the same shape.
    """
    if len(own) < 2:
        return np.zeros(own.shape, bool)
    most = weight.max(axis=0)
    if (most > 0).any():
        usual = float(np.median(most[most > 0]))
    else:
        usual = 1.0
    buckets = max(1, math.ceil(WINDOW / usual))
    mean, step = _moving(own, weight, buckets), _moving(seconds, weight, buckets)
    # NaN is sorted to the end.
    present = (~np.isnan(mean)).sum(axis=0)
    middle = np.maximum((present - 1) // 2, 0)
    median = np.take_along_axis(np.sort(mean, axis=0), middle[None], axis=0)
    enough = _summed(weight, buckets).max(axis=0) >= min(WINDOW, most.sum())
    with np.errstate(invalid="ignore"):
        return np.asarray(
            (mean > median * (1 + EXCESS))
            & (mean - median > OF_STEP * step)
            & enough
            & (weight > 0)
        )


def _moving(values: Array, weight: Array, buckets: int) -> Array:
    known = np.where(np.isnan(values), 0, weight)
    with np.errstate(invalid="ignore", divide="ignore"):
        return _summed(np.nan_to_num(values) * known, buckets) / _summed(known, buckets)


def _summed(values: Array, buckets: int) -> Array:
    """Sums over the last `buckets` elements of each row."""
    if buckets == 1:
        return values
    total = np.cumsum(np.pad(values, ((0, 0), (buckets, 0))), axis=1)
    return np.asarray(total[:, buckets:] - total[:, :-buckets])


def _logged(run: Run, start: int, stop: int, width: int) -> dict[str, Curve]:
    """The logged values of a range, several in a bucket reduced to one point."""
    reference = next(
        (run.ranks[number] for number in sorted(run.ranks) if run.ranks[number].count), None
    )
    curves = {}
    for name, series in run.series.items():
        steps, times, values = series.points()
        if reference is not None:
            reached = reference.steps_at(times)
            # A step that is no number of optimizer steps (an epoch, or batches) is placed by its time.
            if np.isnan(steps).any() or not 0.5 <= (steps[-1] + 1) / (reached[-1] + 1) <= 2:
                steps = reached
        elif np.isnan(steps).any():
            steps = np.arange(len(steps), dtype="f8")
        order = np.argsort(steps, kind="stable")
        order = order[(steps[order] >= start - 1) & (steps[order] <= stop + 1)]
        steps, values = steps[order], values[order]
        if not len(steps):
            continue
        starts = np.flatnonzero(np.diff(steps // width, prepend=-1))
        counts = np.diff(starts, append=len(steps))
        means, places = (
            np.add.reduceat(values, starts) / counts,
            np.add.reduceat(steps, starts) / counts,
        )
        curves[name] = Curve(
            means, np.fmin.reduceat(values, starts), np.fmax.reduceat(values, starts), places
        )
    return curves


def heat_rows(shown: View) -> tuple[list[tuple[int, int]], Array, Array, Array]:
    """The rows of the heat map: (first rank, last rank) of each, their own time, step time, and where one is slow."""
    size = max(1, math.ceil(len(shown.ranks) / MOST_ROWS))
    starts = np.arange(0, len(shown.ranks), size)
    last = len(shown.ranks) - 1
    rows = [
        (shown.ranks[at], shown.ranks[min(int(at) + size - 1, last)])
        for at in range(0, last + 1, size)
    ]
    if size == 1:
        return rows, shown.own, shown.seconds, shown.slow
    return (
        rows,
        np.fmax.reduceat(shown.own, starts),
        np.fmax.reduceat(shown.seconds, starts),
        np.logical_or.reduceat(shown.slow, starts),
    )
