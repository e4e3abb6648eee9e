# SPDX-License-Identifier: Apache-2.0
"""A summary of the records of a run in words: where the time went, which rank was slow, and what to try."""

from __future__ import annotations

import itertools
import math
import warnings
from dataclasses import dataclass

import numpy as np

from .run import Run
from .steps import Array
from .view import ALL_PHASES, EXCESS, View, view

# Buckets of the range that is summarized.
_BUCKETS = 256
# A rank that is slow in a smaller share of the windows is not named.
_LEAST_SHARE = 0.05

WORDS = {
    "data": "waiting for the data loader",
    "transfer": "copying batches to the device",
    "forward": "the forward pass",
    "backward": "the backward pass",
    "communication": "communication that the backward pass does not hide",
    "optimizer": "the optimizer",
    "checkpoint": "saving checkpoints",
    "other": "the script's own code between these phases",
}
# phase -> the share of the time from which on there is something to try, and what.
REMEDIES = {
    "data": (0.15, "raise `num_workers` of the DataLoader, or move preprocessing out of the training loop"),
    "transfer": (0.1, "use `pin_memory=True` and `DataLoaderConfiguration(non_blocking=True)`"),
    "communication": (
        0.25,
        "accumulate gradients over more batches, compress them (`DistributedDataParallelKwargs(comm_hook=...)`), or "
        "compare layouts with `accelerate plan`",
    ),
    "optimizer": (0.2, "use the fused variant of the optimizer (`fused=True`)"),
    "checkpoint": (0.1, "save less often, or with `save_state(blocking=False)`"),
    "other": (0.2, "look for `.item()`, printing and logging at every step, and profile with `accelerator.profile()`"),
}


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

    def sentence(self) -> str:
        """One sentence for people."""
        where = f" on {self.host}" if self.host else ""
        wait = f" The others wait {_ms(self.waiting)} a step for it." if self.waiting > 0.1 * self.excess else ""
        return (
            f"Rank {self.rank}{where} was slow in {_percent(self.share)} of the steps (from {self.first:,} to "
            f"{self.last:,}): {_ms(self.excess)} a step, {_percent(self.ratio - 1)} above the median, of which "
            f"{_ms(self.phase_excess)} in {WORDS[self.phase]}.{wait}"
        )


@dataclass(frozen=True)
class Summary:
    """Figures of a range of steps."""

    first: int
    last: int
    ranks: int
    duration: float
    """Seconds that the steps took."""
    seconds: float
    """Seconds of a step, the mean."""
    typical: float
    """The median over buckets of steps."""
    throughput: float
    unit: str
    shares: dict[str, float]
    """For each of `ALL_PHASES` its share of the time."""
    loss: tuple[float, float]
    """At the beginning and at the end."""
    bad_loss: int | None
    """The first step at which the loss is not finite."""
    skipped: int
    memory: dict[str, float]
    """The most bytes of any rank, for `device` and `host`."""
    memory_growth: float
    """Bytes by which the host memory grows in 1000 steps, if it grows all the time."""
    stragglers: tuple[Straggler, ...]

    def sentences(self) -> list[str]:
        """Where the time went, and what stands out."""
        if not self.last:
            return ["No steps were recorded yet."]
        rate = f", {self.throughput:,.0f} {self.unit}/s" if self.throughput > 0 and self.unit != "steps" else ""
        found = [
            f"Steps {self.first:,} to {self.last:,} on {self.ranks} rank{'s' * (self.ranks > 1)} took "
            f"{duration(self.duration)}: {_ms(self.seconds)} a step{rate}."
        ]
        phases = sorted(((share, phase) for phase, share in self.shares.items() if share >= 0.01), reverse=True)
        if phases:
            found.append(
                "The time went into "
                + ", ".join(f"{WORDS[phase]} ({_percent(share)})" for share, phase in phases)
                + "."
            )
        found += [straggler.sentence() for straggler in self.stragglers[:8]]
        if len(self.stragglers) > 8:
            found.append(f"{len(self.stragglers) - 8} other ranks were slow too.")
        if self.ranks > 1 and not self.stragglers:
            found.append("No rank was slower than the others.")
        if all(map(math.isfinite, self.loss)):
            found.append(f"The loss went from {self.loss[0]:.4g} to {self.loss[1]:.4g}.")
        if self.bad_loss is not None:
            found.append(f"The loss is not finite from about step {self.bad_loss:,} on.")
        if self.skipped:
            found.append(f"{self.skipped:,} steps were skipped because fp16 gradients overflowed.")
        if self.memory_growth > 0:
            found.append(f"The host memory grows by {size(self.memory_growth)} in 1,000 steps.")
        return found

    def advice(self) -> list[str]:
        """What to try, most useful first."""
        found = []
        stragglers = {straggler.phase: straggler for straggler in reversed(self.stragglers)}
        for phase, one in stragglers.items():
            others = sum(other.phase == phase for other in self.stragglers) - 1
            who = f"Rank {one.rank} loses its time"
            if others:
                count = "one other rank" if others == 1 else f"{others} other ranks"
                who = f"Rank {one.rank} and {count} lose their time"
            what = {
                "data": "its data loader: the storage that it reads from, and the load of its CPU",
                "other": "what only this rank does between steps: logging, printing, evaluation",
                "checkpoint": "how fast its storage is",
            }.get(phase, f"the load, clock and temperature of {one.host or 'its machine'}")
            found.append(f"{who} in {WORDS[phase]}: look at {what}.")
        for phase, share in sorted(self.shares.items(), key=lambda item: -item[1]):
            least, remedy = REMEDIES.get(phase, (2.0, ""))
            if self.stragglers and (phase == "communication" or phase in stragglers):
                continue  # the slow ranks, and the wait for them
            if share >= least:
                found.append(f"{_percent(share)} of the time is {WORDS[phase]}: {remedy}.")
        if self.bad_loss is not None:
            found.append(
                "Lower the learning rate, clip gradients, or look at the batch of the step before the loss broke."
            )
        if self.skipped > 0.05 * (self.last - self.first + 1):
            found.append("Many steps are skipped: use bf16, or a lower `init_scale` of `GradScalerKwargs`.")
        if self.memory_growth > 0:
            found.append(
                "Something keeps objects of each step: often losses, collected without `.item()` or `.detach()`."
            )
        return found


def summarize(run: Run, start: int | None = None, stop: int | None = None) -> Summary:
    """Summarize a range of steps, by default all of them."""
    with run.lock, warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore", RuntimeWarning)
        return _summary(run, view(run, start, stop, _BUCKETS))


def _summary(run: Run, shown: View) -> Summary:
    weight = shown.weight
    if not shown.ranks:
        nothing = (math.nan, math.nan)
        return Summary(0, 0, 0, 0, math.nan, math.nan, 0, "steps", {}, nothing, None, 0, {}, 0, ())
    known = weight.sum(axis=1)
    per_rank = np.nansum(np.nan_to_num(shown.seconds) * weight, axis=1)
    seconds = float(per_rank.sum() / known.sum())
    shares = {
        phase: float(np.nansum(np.nan_to_num(shown.phases[phase]) * weight) / per_rank.sum()) for phase in ALL_PHASES
    }
    columns = np.flatnonzero(known_anywhere(weight))
    first = max(run.first_step, int(shown.x[columns[0]] - shown.width / 2 + 0.5))
    last = min(run.last_step, int(shown.x[columns[-1]] + shown.width / 2))
    loss = shown.curves["loss"].mean
    finite = loss[np.isfinite(loss)]
    broken = np.flatnonzero(~np.isfinite(shown.curves["loss"].high) & ~np.isnan(shown.curves["loss"].high))
    if len(finite) and np.isnan(loss[columns[-1]]):
        broken = np.append(broken, np.flatnonzero(np.isfinite(loss))[-1] + 1)
    throughput = shown.curves["throughput"].mean
    tail = slice(-min(8, len(finite)), None)
    return Summary(
        first,
        last,
        len(shown.ranks),
        float(per_rank.max()),
        seconds,
        float(np.nanmedian(np.nanmean(shown.seconds, axis=0))),
        float(np.nanmedian(throughput)) if np.isfinite(throughput).any() else 0.0,
        shown.unit,
        shares,
        (float(finite[0]), float(finite[tail].mean())) if len(finite) else (math.nan, math.nan),
        int(shown.x[broken[0]]) if len(broken) and broken[0] < len(shown.x) else None,
        int(np.nansum(shown.skipped)),
        {
            kind: float(np.nanmax(high))
            for kind in ("device", "host")
            if np.isfinite(high := shown.curves[f"{kind}_memory"].high).any()
        },
        _growth(shown),
        tuple(_stragglers(run, shown)),
    )


def known_anywhere(weight: Array) -> Array:
    """The buckets in which any rank has recorded something."""
    return np.asarray((weight > 0).any(axis=0))


def _growth(shown: View) -> float:
    """Bytes of host memory in 1000 steps, if it grew in the second half by more than 5 % and almost always."""
    memory = shown.curves["host_memory"].mean
    at = np.flatnonzero(np.isfinite(memory))
    at = at[len(at) // 2 :]
    if len(at) < 16 or memory[at[-1]] < 1.05 * memory[at[0]]:
        return 0.0
    means = [piece.mean() for piece in np.array_split(memory[at], 8)]
    if any(later <= earlier for earlier, later in itertools.pairwise(means)):
        return 0.0
    return float((memory[at[-1]] - memory[at[0]]) / (shown.x[at[-1]] - shown.x[at[0]]) * 1000)


def _stragglers(run: Run, shown: View) -> list[Straggler]:
    windows = known_anywhere(shown.weight).sum()
    found = []
    middle = (len(shown.ranks) - 1) // 2
    # Ranks that are slow now and then, each as often as the others, are a busy machine.
    often = 2 * np.sort(shown.slow.sum(axis=1))[middle]
    for row, rank in enumerate(shown.ranks):
        at = np.flatnonzero(shown.slow[row])
        if len(at) < max(1, _LEAST_SHARE * windows) or (len(at) <= often and not _is_slow_between(shown, row, at)):
            continue
        own, weight = shown.own[:, at], shown.weight[row, at]

        def over(values: Array, row: int = row, weight: Array = weight) -> float:
            """The mean by which a row is above the lower median of all rows."""
            median = np.sort(np.nan_to_num(values), axis=0)[middle]
            return float(np.average(np.nan_to_num(values[row]) - median, weights=weight))

        seconds = {phase: shown.phases[phase][:, at] for phase in ALL_PHASES if phase != "communication"}
        seconds["backward"] = seconds["backward"] - (shown.waits - np.nan_to_num(shown.phases["communication"]))[:, at]
        above = {phase: over(values) for phase, values in seconds.items()}
        phase = max(above, key=above.__getitem__)
        excess = over(own)
        waits = np.delete(shown.waits[:, at], row, axis=0).mean(axis=0) - shown.waits[row, at]
        usual = float(np.average(np.nan_to_num(own[row]), weights=weight)) - excess
        found.append(
            Straggler(
                rank,
                run.ranks[rank].header.host,
                int(shown.x[at[0]] - shown.width / 2 + 0.5),
                min(run.last_step, int(shown.x[at[-1]] + shown.width / 2)),
                len(at) / windows,
                excess,
                1 + excess / usual if usual > 0 else math.inf,
                phase,
                above[phase],
                float(np.average(waits, weights=weight)),
            )
        )
    return sorted(found, key=lambda straggler: -straggler.excess * straggler.share)


def _is_slow_between(shown: View, row: int, at: Array) -> bool:
    """Whether a rank is slow on average from the first to the last of its slow windows."""
    own, weight = (values[:, at[0] : at[-1] + 1] for values in (shown.own, shown.weight))
    mean = np.nansum(own * weight, axis=1) / weight.sum(axis=1)
    return bool(mean[row] > (1 + EXCESS) * np.sort(mean)[(len(mean) - 1) // 2])


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _percent(share: float) -> str:
    return f"{share * 100:.0f}\u00a0%" if share >= 0.0095 else "under 1\u00a0%"


def duration(seconds: float) -> str:
    """A length of time for people: 45 s, 12 min 5 s, 3 h 20 min."""
    rounded = round(seconds)
    if rounded < 60:
        return f"{seconds:.3g} s"
    if rounded < 3600:
        return f"{rounded // 60} min {rounded % 60} s"
    return f"{rounded // 3600:,} h {rounded % 3600 // 60} min"


def size(count: float) -> str:
    """Bytes for people, in powers of 1000."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(count) < 1000 or unit == "TB":
            break
        count /= 1000
    return f"{count:.3g} {unit}"
