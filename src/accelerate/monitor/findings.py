# SPDX-License-Identifier: Apache-2.0
"""A summary of the records of a run in words: where the time went, which rank was slow, and what to try."""

from __future__ import annotations

import itertools
import math
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from textwrap import shorten

import numpy as np

from .run import Run, ranks_text
from .slow_ranks import Straggler, briefly_slow_ranks, slow_ranks
from .steps import Array
from .view import ALL_PHASES, WINDOW, View, view

# Buckets of the range that is summarized, and most for what is short: of one rank, and of all together.
_BUCKETS = 256
_FINE_BUCKETS, _FINE_VALUES = 4096, 200_000
# Seconds that slow steps must have cost to be named, and those with which a process begins.
_LEAST_LOST, _LEAST_WARM_UP = 5.0, 1.0
# Steps that are looked at one by one for the wait for others: in so many pieces of so many steps.
_PIECES, _PIECE = 8, 64

# How sentences about what stands out begin.
STANDS_OUT = re.compile(r"Ranks? \d")

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
    bad_losses: float = 0.0
    """Steps at which it is not; infinite if those are all from `bad_loss` on."""
    bad_loss_ranks: tuple[int, ...] = ()
    skipped: int = 0
    memory: dict[str, float] = field(default_factory=dict)
    """The most bytes of any rank, for `device` and `host`."""
    uneven_memory: tuple[str, tuple[int, ...], float, float] | None = None
    """`device` or `host`, the ranks that use much more than the others, their most bytes, and those of the median."""
    memory_growth: float = 0.0
    """Bytes by which the host memory grows in 1000 steps, if it grows all the time."""
    stragglers: tuple[Straggler, ...] = ()
    incidents: tuple[str, ...] = ()
    """Hangs, and errors of memory, one sentence each."""

    @property
    def steps(self) -> int:
        """The number of steps."""
        return self.last - self.first + 1

    @property
    def elapsed(self) -> float:
        """Seconds from the first step to the last, with what happened between steps."""
        return self.duration + self.evaluating + self.restarting

    def sentences(self) -> list[str]:
        """Where the time went, and what stands out."""
        if not self.last:
            return ["No steps were recorded yet."]
        rate = f", {self.throughput:,.0f} {self.unit}/s" if self.throughput > 0 and self.unit != "steps" else ""
        median = f" (median {_ms(self.typical)})" if not 0.8 < self.typical / self.seconds < 1.25 else ""
        steps = f"Steps {self.first:,} to {self.last:,}" if self.steps > 1 else f"Step {self.first:,}"
        found = [
            *self.incidents,
            f"{steps} on {self.ranks} rank{'s' * (self.ranks > 1)} took "
            f"{duration(self.duration)}: {_ms(self.seconds)} a step{median}{rate}.",
        ]
        if math.isfinite(self.flops):
            of_peak = f", {_percent(self.utilization)} of its peak (MFU)" if math.isfinite(self.utilization) else ""
            found.append(f"Each device computes {_flops(self.flops)} for the model{of_peak}.")
        phases = sorted(((share, phase) for phase, share in self.shares.items() if share >= 0.01), reverse=True)
        if phases:
            found.append(
                "The time went into "
                + ", ".join(f"{WORDS[phase]} ({_percent(share)})" for share, phase in phases)
                + "."
            )
        if self.waiting >= 0.05 and self.steps >= WINDOW:
            found.append(
                f"In about {_percent(self.waiting)} of the time ranks wait for the slowest one, most of it inside the "
                "backward pass and communication."
            )
        groups = _groups(self.stragglers)
        found += [_slow_sentence(group) for group in groups[:8]]
        if len(groups) > 8:
            found.append(f"{sum(map(len, groups[8:]))} other ranks were slow too.")
        if self.ranks > 1 and not self.stragglers and self.steps >= WINDOW:
            found.append("No rank stands out as slow.")
        return [*found, *self._time_sentences(), *self._value_sentences()]

    def _time_sentences(self) -> list[str]:
        found = []
        if self.period is not None:
            one = self.period
            many = one.last > one.first
            which = f"Steps {one.first:,} to {one.last:,} were" if many else f"Step {one.first:,} was"
            warm_up = "; the first step of a process includes its warm-up" if one.is_first else ""
            found.append(
                f"{which} slow: {_ms(one.seconds)}{' a step' * many} instead of {_ms(one.usual)}, most of it in "
                f"{WORDS[one.phase]}. This cost {duration(one.lost)}{warm_up}."
            )
        if self.evaluating > 0.01 * self.elapsed:
            often = "One evaluation" if self.evaluations == 1 else f"{self.evaluations:,} evaluations"
            share = _percent(self.evaluating / self.elapsed)
            found.append(f"{often} took {duration(self.evaluating)} more, {share} of the time.")
        if self.restarts:
            often = "once" if self.restarts == 1 else f"{self.restarts} times"
            lost = f", which cost {duration(self.restarting)} with the steps that were repeated"
            found.append(f"The run was restarted {often}{lost * (self.restarting > 1)}.")
        return found

    def _value_sentences(self) -> list[str]:
        found = []
        if all(map(math.isfinite, self.loss)):
            first, last = self.loss
            lowest, when = self.lowest_loss
            back = f"; it was lowest, {lowest:.4g}, at about step {when:,}" * (
                last - lowest > 0.5 * abs(first - lowest)
            )
            found.append(
                f"The loss went from {first:.4g} to {last:.4g}{back}."
                if self.steps > 1
                else f"The loss is {last:.4g}."
            )
        if self.bad_loss is not None:
            who = f" on {ranks_text(self.bad_loss_ranks)}" if len(self.bad_loss_ranks) < self.ranks else ""
            if math.isinf(self.bad_losses):
                at = f"from step {self.bad_loss:,} on"
            elif self.bad_losses == 1:
                at = f"at step {self.bad_loss:,}"
            else:
                at = f"at {self.bad_losses:,.0f} steps, first at step {self.bad_loss:,}"
            found.append(f"The loss is not finite{who} {at}.")
        if self.skipped:
            were = "1 step was" if self.skipped == 1 else f"{self.skipped:,} steps were"
            found.append(f"{were} skipped because fp16 gradients overflowed.")
        if self.uneven_memory is not None:
            kind, ranks, most, median = self.uneven_memory
            use = "uses" if len(ranks) == 1 else "use up to"
            text = ranks_text(ranks)
            found.append(
                f"{text[0].upper()}{text[1:]} {use} {size(most)} of {kind} memory, the median rank {size(median)}."
            )
        if self.memory_growth > 0:
            found.append(f"The host memory grows by {size(self.memory_growth)} in 1,000 steps.")
        return found

    def advice(self) -> list[str]:
        """What to try, most useful first."""
        found = []
        named = {straggler.phase for straggler in self.stragglers}
        for group in sorted(_groups(self.stragglers), key=len, reverse=True)[:3]:
            one = group[0]
            text = ranks_text([straggler.rank for straggler in group])
            if one.phase == "checkpoint":
                found.append(
                    f"The others wait while {text} saves checkpoints: save less often, or with "
                    "`save_state(blocking=False)`."
                )
                continue
            who = f"{text[0].upper()}{text[1:]} " + ("loses its time" if len(group) == 1 else "lose their time")
            what = {
                "data": "the storage that is read there, and the load of the CPU",
                "other": "what only this rank does between steps: logging, printing, evaluation",
            }.get(one.phase, f"the load, clock and temperature of {one.host or 'the machine'}")
            found.append(f"{who} in {WORDS[one.phase]}: look at {what}.")
        if self.period is not None and not self.period.is_first:
            found.append(
                f"Look at what else ran on these machines during steps {self.period.first:,} to {self.period.last:,}, "
                f"and at what is special about {WORDS[self.period.phase]} there."
            )
        if self.waiting >= 0.1 and not self.stragglers and self.steps >= WINDOW:
            found.append(
                "The ranks take turns in being slow: give them batches of equal work (samples of similar length), and "
                "look for other programs on these machines."
            )
        for phase, share in sorted(self.usual_shares.items(), key=lambda item: -item[1]):
            least, remedy = REMEDIES.get(phase, (2.0, ""))
            if self.stragglers and phase == "communication":
                continue  # the wait for the slow ranks
            if phase in named and share < least + max(one.phase_excess for one in self.stragglers) / self.seconds:
                continue  # the slow ranks alone
            if share >= least:
                found.append(f"{_percent(share)} of the time is {WORDS[phase]}: {remedy}.")
        if self.evaluating > 0.25 * self.elapsed:
            found.append("Evaluate less often, on a part of the data, or with larger batches.")
        if self.bad_loss is not None:
            found.append(
                "Lower the learning rate, clip gradients, or look at the batch of the step before the loss broke."
            )
        if self.skipped > 0.05 * self.steps:
            found.append("Many steps are skipped: use bf16, or a lower `init_scale` of `GradScalerKwargs`.")
        if self.memory_growth > 0:
            found.append(
                "Something keeps objects of each step: often losses, collected without `.item()` or `.detach()`."
            )
        if any("out of memory" in text for text in self.incidents):
            found.append(
                "Use smaller batches with gradient accumulation, or compare layouts with `accelerate plan`. The "
                "events link what the allocator held."
            )
        return found


def _groups(stragglers: Sequence[Straggler]) -> list[list[Straggler]]:
    """Stragglers of one machine with the same phase and about the same steps, together."""
    found: list[list[Straggler]] = []
    for one in stragglers:
        for group in found:
            other = group[0]
            near = 0.1 * (other.last - other.first + 1) + 1
            if (
                (one.host, one.phase) == (other.host, other.phase)
                and abs(one.first - other.first) <= near
                and abs(one.last - other.last) <= near
                and 0.8 < one.excess / other.excess < 1.25
            ):
                group.append(one)
                break
        else:
            found.append([one])
    return found


def _slow_sentence(group: Sequence[Straggler]) -> str:
    """One sentence for people about slow ranks with the same cause."""
    one = group[0]
    where = f" on {one.host}" if one.host else ""
    wait = f" The others wait {_ms(one.waiting)} a step for {'it' if len(group) == 1 else 'them'}."
    text = ranks_text([straggler.rank for straggler in group])
    were = "was" if len(group) == 1 else "were"
    return (
        f"{text[0].upper()}{text[1:]}{where} {were} slow in {_percent(one.share)} of the steps (from {one.first:,} to "
        f"{one.last:,}): {_ms(one.excess)} a step, {_percent(one.ratio - 1)} above the median, of which "
        f"{_ms(one.phase_excess)} in {WORDS[one.phase]}.{wait * (one.waiting > 0.1 * one.excess)}"
    )


def summarize(run: Run, start: int | None = None, stop: int | None = None) -> Summary:
    """Summarize a range of steps, by default all of them."""
    with run.lock, warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore", RuntimeWarning)
        return _summary(run, view(run, start, stop, _BUCKETS), is_end=stop is None or stop >= run.last_step)


def _summary(run: Run, shown: View, is_end: bool) -> Summary:
    weight = shown.weight
    columns = np.flatnonzero(known_anywhere(weight)) if shown.ranks else np.empty(0, int)
    if not len(columns):
        return Summary(incidents=tuple(_incidents(run, 0, math.inf)))
    known = weight.sum(axis=1)
    per_rank = np.nansum(np.nan_to_num(shown.seconds) * weight, axis=1)
    seconds = float(per_rank.sum() / known.sum())
    first = max(run.first_step, int(shown.x[columns[0]] - shown.width / 2 + 0.5))
    last = min(run.last_step, int(shown.x[columns[-1]] + shown.width / 2))
    stragglers = slow_ranks(run, shown)
    if len(shown.ranks) > 1:
        named = {straggler.rank for straggler in stragglers}
        pixels = max(_BUCKETS, min(_FINE_BUCKETS, _FINE_VALUES // len(shown.ranks)))
        fine = shown if shown.width == 1 else view(run, first, last, pixels)
        stragglers += [one for one in briefly_slow_ranks(run, fine) if one.rank not in named]
    period, inside = _period(run, shown, stragglers)
    begin = float(shown.time[columns[0]] - np.nanmax(shown.seconds[:, columns[0]] * weight[:, columns[0]]))
    end = float(shown.time[columns[-1]])
    took = float(per_rank.max())
    # What comes after the last step belongs to the newest steps.
    evaluations, evaluating = _evaluations(run, begin, math.inf if is_end else end)
    restarts = max((len(times) for times in _restarts(run, begin, end).values()), default=0)
    loss = shown.curves["loss"].mean
    finite = loss[np.isfinite(loss)]
    tail = slice(-min(8, len(finite)), None)
    bad = shown.bad_loss
    throughput, lengths = shown.curves["throughput"].mean, np.nanmax(np.nan_to_num(shown.seconds) * weight, axis=0)
    rates = np.isfinite(throughput) & (lengths > 0)
    rate = float(np.average(throughput[rates], weights=lengths[rates])) if rates.any() else 0.0
    memory = {kind: float(np.nanmax(high)) for kind, high in shown.memory.items() if np.isfinite(high).any()}
    flops, utilization = _utilization(run, rate, shown)
    return Summary(
        first=first,
        last=last,
        ranks=len(shown.ranks),
        duration=took,
        seconds=seconds,
        typical=_weighted_median(np.nanmean(shown.seconds, axis=0), weight.max(axis=0)),
        throughput=rate,
        unit=shown.unit,
        flops=flops,
        utilization=utilization,
        shares=_shares(shown, np.ones(len(shown.x), bool)),
        waiting=_waiting(run, first, last),
        period=period,
        usual_shares=_shares(shown, ~inside),
        evaluations=evaluations,
        evaluating=evaluating,
        restarts=restarts,
        restarting=max(0.0, end - begin - took - _evaluations(run, begin, end)[1]) if restarts else 0.0,
        loss=(float(finite[0]), float(finite[tail].mean())) if len(finite) else (math.nan, math.nan),
        lowest_loss=_lowest(shown),
        bad_loss=_first_bad_step(run, shown) if bad.any() else None,
        bad_losses=_bad_steps(shown),
        bad_loss_ranks=tuple(rank for rank, steps in zip(shown.ranks, bad, strict=True) if steps.any()),
        skipped=int(np.nansum(shown.skipped)),
        memory=memory,
        uneven_memory=_uneven(shown),
        memory_growth=_growth(shown),
        stragglers=tuple(stragglers),
        incidents=tuple(_incidents(run, begin, math.inf if is_end else end)),
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
        value if isinstance(value := work.get(name), int | float) else math.nan for name in ("flops", "peak")
    )
    if f"{work.get('unit')}s" != shown.unit or not rate:
        return math.nan, math.nan
    found = flops * rate / len(shown.ranks)
    return found, found / peak if peak > 0 else math.nan


def known_anywhere(weight: Array) -> Array:
    """The buckets in which any rank has recorded something."""
    return np.asarray((weight > 0).any(axis=0))


def _shares(shown: View, where: Array) -> dict[str, float]:
    """For each phase its share of the time in some buckets."""
    weight = shown.weight[:, where]
    total = np.nansum(np.nan_to_num(shown.seconds[:, where]) * weight)
    return {
        phase: float(np.nansum(np.nan_to_num(shown.phases[phase][:, where]) * weight) / total) if total > 0 else 0.0
        for phase in ALL_PHASES
    }


def _weighted_median(values: Array, weight: Array) -> float:
    known = np.isfinite(values) & (weight > 0)
    values, weight = values[known], weight[known]
    order = np.argsort(values)
    at = np.searchsorted(np.cumsum(weight[order]), weight.sum() / 2)
    return float(values[order][at]) if len(order) else math.nan


def _waiting(run: Run, first: int, last: int) -> float:
    """The share of the time in which ranks wait for slower ones, in a sample: a mean over steps does not show it."""
    pieces = max(1, min(_PIECES, _BUCKETS // max(1, len(run.ranks))))
    waited = total = 0.0
    for start in np.unique(np.linspace(first, max(first, last - _PIECE + 1), pieces).astype(int)).tolist():
        shown = view(run, start, min(last, start + _PIECE - 1), _PIECE)
        if len(shown.ranks) < 2:
            return 0.0
        communication = np.nan_to_num(shown.phases["communication"])
        waits = shown.waits - communication + communication - communication.min(axis=0)
        waited += float(np.nansum(waits * shown.weight))
        total += float(np.nansum(np.nan_to_num(shown.seconds) * shown.weight))
    return waited / total if total > 0 else 0.0


def _period(run: Run, shown: View, stragglers: Sequence[Straggler]) -> tuple[Period | None, Array]:
    """The neighbouring steps that were slow on all ranks and cost most, if they stand out; and their buckets."""
    nothing = np.zeros(len(shown.x), bool)
    weight = shown.weight.max(axis=0)
    phases = {phase: np.nan_to_num(np.nanmean(shown.phases[phase], axis=0)) for phase in ALL_PHASES}
    # Waiting has the cause in another rank, and checkpoints come back at intervals.
    waits = np.nanmean(shown.waits, axis=0) - phases["communication"]
    phases["backward"] = phases["backward"] - np.nan_to_num(waits)
    seconds = np.nan_to_num(np.nanmean(shown.seconds, axis=0)) - phases["checkpoint"]
    usual = _weighted_median(seconds, weight)
    slow = np.flatnonzero((seconds > 1.4 * usual) & (weight > 0))
    if not len(slow):
        return None, nothing
    lost = (seconds - usual) * weight
    parts = np.split(slow, np.flatnonzero(np.diff(slow) > 1) + 1)
    at = max(parts, key=lambda part: float(lost[part].sum()))
    total = float(np.nansum(np.nanmean(shown.seconds, axis=0) * weight))
    is_much = lost[at].sum() >= max(0.05 * total, 0.5 * lost[slow].sum())
    if not is_much or weight[at].sum() > 0.5 * weight.sum():
        return None, nothing
    first = max(run.first_step, int(shown.x[at[0]] - shown.width / 2 + 0.5))
    last = min(run.last_step, int(shown.x[at[-1]] + shown.width / 2))
    if any(one.first - shown.width <= first and last <= one.last + WINDOW + shown.width for one in stragglers):
        return None, nothing  # their sentences report it
    inside = nothing.copy()
    inside[at] = True
    rest = ~inside & (weight > 0)
    above = {
        phase: float(np.average(values[at], weights=weight[at]) - np.average(values[rest], weights=weight[rest]))
        for phase, values in phases.items()
        if phase != "checkpoint"
    }
    is_first = any(run.ranks[rank].begins_between(first, last) for rank in shown.ranks[:4])
    if lost[at].sum() < (_LEAST_WARM_UP if is_first else _LEAST_LOST):
        return None, nothing
    one = Period(
        first,
        last,
        float(np.average(seconds[at], weights=weight[at])),
        usual,
        float(lost[at].sum()),
        max(above, key=above.__getitem__),
        is_first,
    )
    return one, inside


def _evaluations(run: Run, begin: float, end: float) -> tuple[int, float]:
    """The number of evaluations, and the seconds of the rank that evaluated longest."""
    found: dict[int, list[float]] = {}
    began: dict[int, float] = {}
    for event in run.events:
        rank, time = event["rank"], run.time_of(event)
        if event["event"] == "evaluation_begin":
            began[rank] = time
        elif event["event"] == "evaluation_end" and begin <= (start := began.pop(rank, -1.0)) <= time <= end:
            found.setdefault(rank, []).append(time - start)
    longest = max(found.values(), key=sum, default=[])
    return len(longest), sum(longest)


def _restarts(run: Run, begin: float, end: float) -> dict[int, list[float]]:
    """For each rank the times at which a process continued the run."""
    found: dict[int, list[float]] = {}
    for event in run.events:
        if event["event"] == "start":
            found.setdefault(event["rank"], []).append(run.time_of(event))
    return {rank: [time for time in times[1:] if begin <= time <= end] for rank, times in found.items()}


def _incidents(run: Run, begin: float, end: float) -> list[str]:
    """A sentence for each kind of hang and of missing memory."""
    found: dict[tuple[str, str], set[int]] = {}
    for event in run.events:
        message = shorten(str(event.get("message", "")), 600, placeholder=" […]")
        if (
            event["event"] in ("out_of_memory", "hang")
            and event.get("path") is None
            and begin <= run.time_of(event) <= end
        ):
            key = (event["event"], message if event["event"] == "hang" else "")
            found.setdefault(key, set()).add(event["rank"])
    texts = []
    for (kind, message), ranks in list(found.items())[-4:]:
        text = ranks_text(sorted(ranks))
        why = f": {message.rstrip('.')}" if message else ""
        what = "ran out of memory" if kind == "out_of_memory" else f"reported a hang{why}"
        texts.append(f"{text[0].upper()}{text[1:]} {what}.")
    return texts


def _first_bad_step(run: Run, shown: View) -> int:
    """The first step whose loss is not finite."""
    at = int(np.flatnonzero(shown.bad_loss.any(axis=0))[0])
    first = int(shown.x[at] - shown.width / 2 + 0.5)
    one = view(run, first, first + shown.width - 1, shown.width)
    steps: Array = one.x[one.bad_loss.any(axis=0)] if len(one.bad_loss) else np.empty(0)
    return math.ceil(steps[0]) if len(steps) else max(first, 1)


def _bad_steps(shown: View) -> float:
    """The number of steps whose loss is not finite; infinite if those are all after the first of them."""
    bad: Array = np.asarray(shown.bad_loss.any(axis=0))
    known = np.flatnonzero(known_anywhere(shown.weight))
    at = np.flatnonzero(bad)
    is_all = len(at) > 0 and at[-1] == known[-1] and bool(bad[known[known >= at[0]]].all())
    return math.inf if is_all and len(at) > 1 else float(shown.bad_loss.max(axis=0).sum())


def _lowest(shown: View) -> tuple[float, int]:
    """The lowest mean of the loss over neighbouring buckets, and about the step of it."""
    loss = shown.curves["loss"].mean
    at = np.flatnonzero(np.isfinite(loss))
    if not len(at):
        return math.nan, 0
    size = min(8, len(at))
    means = np.convolve(loss[at], np.ones(size) / size, "valid")
    lowest = int(np.argmin(means))
    return float(means[lowest]), int(shown.x[at[lowest + size // 2]])


def _uneven(shown: View) -> tuple[str, tuple[int, ...], float, float] | None:
    """Ranks that use much more memory than the others: of the device, or of the host without one."""
    for kind, high in shown.memory.items():
        if len(high) > 1 and np.isfinite(high).any():
            most = np.nan_to_num(np.nanmax(high, axis=1))
            median = float(np.sort(most)[(len(most) - 1) // 2])
            rows = np.flatnonzero((most > 1.3 * median) & (most > median + 2.5e8))
            if len(rows):
                return kind, tuple(shown.ranks[row] for row in rows), float(most.max()), median
            return None
    return None


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


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _flops(rate: float) -> str:
    """Floating point operations in a second for people."""
    for unit in ("MFLOP/s", "GFLOP/s", "TFLOP/s"):
        rate /= 1e6 if unit == "MFLOP/s" else 1e3
        if rate < 1000:
            break
    return f"{rate:.3g} {unit}"


def _percent(share: float) -> str:
    return f"{share * 100:.0f}\u00a0%" if share >= 0.0095 else "under 1\u00a0%"


def duration(seconds: float) -> str:
    """A length of time for people: 45 s, 12 min 5 s, 3 h 20 min, 4 days 2 h."""
    rounded = round(seconds)
    if rounded < 60:
        return f"{seconds:.3g} s"
    if rounded < 3600:
        return f"{rounded // 60} min {rounded % 60} s"
    if rounded < 48 * 3600:
        return f"{rounded // 3600} h {rounded % 3600 // 60} min"
    return f"{rounded // 86400:,} days {rounded % 86400 // 3600} h"


def size(count: float) -> str:
    """Bytes for people, in powers of 1000."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(count) < 1000 or unit == "TB":
            break
        count /= 1000
    return f"{count:.3g} {unit}"
