# SPDX-License-Identifier: Apache-2.0
"""The summary of a run in words: where the time went, what stands out, and what to try."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from ..core.objects import ranks_in_words, size_of
from .goodput import BADPUT, Goodput
from .slow_ranks import Straggler
from .summary import Summary
from .view import WINDOW

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
    "data": (
        0.15,
        "raise `num_workers` of the DataLoader, or move preprocessing out of the training loop",
    ),
    "transfer": (0.1, "use `pin_memory=True` and `DataLoaderConfiguration(non_blocking=True)`"),
    "communication": (
        0.25,
        "accumulate gradients over more batches, compress them (`DistributedDataParallelKwargs(comm_hook=...)`), or "
        "compare layouts with `accelerate plan`",
    ),
    "optimizer": (0.2, "use the fused variant of the optimizer (`fused=True`)"),
    "checkpoint": (0.1, "save less often, or with `save_state(blocking=False)`"),
    "other": (
        0.2,
        "look for `.item()`, printing and logging at every step, and profile with `accelerator.profile()`",
    ),
}
_MOST_GROUPS = 8


def sentences(summary: Summary) -> list[str]:
    """Where the time went, and what stands out."""
    if not summary.last:
        return [*_incidents(summary), "No steps are recorded: `--telemetry` records them."]
    lines = [*_incidents(summary), _first_sentence(summary)]
    if math.isfinite(summary.flops):
        has_peak = math.isfinite(summary.utilization)
        if has_peak:
            of_peak = f", {_percent(summary.utilization)} of its peak (MFU)"
        else:
            of_peak = ""
        lines.append(f"Each device computes {_flops(summary.flops)} for the model{of_peak}.")
    phases = sorted(
        ((share, phase) for phase, share in summary.shares.items() if share >= 0.01), reverse=True
    )
    if phases:
        parts = ", ".join(f"{WORDS[phase]} ({_percent(share)})" for share, phase in phases)
        lines.append(f"The time went into {parts}.")
    if summary.waiting >= 0.05 and summary.steps >= WINDOW:
        lines.append(
            f"In about {_percent(summary.waiting)} of the time ranks wait for the slowest one, most of it inside the "
            "backward pass and communication."
        )
    groups = _groups(summary.stragglers)
    lines += [_slow_sentence(group) for group in groups[:_MOST_GROUPS]]
    if len(groups) > _MOST_GROUPS:
        lines.append(f"{sum(map(len, groups[_MOST_GROUPS:]))} other ranks were slow too.")
    if summary.ranks > 1 and not groups and summary.steps >= WINDOW:
        lines.append("No rank stands out as slow.")
    period = summary.period
    if period:
        several = period.last > period.first
        if several:
            which = f"Steps {period.first:,} to {period.last:,} were"
        else:
            which = f"Step {period.first:,} was"
        if period.is_first:
            warm_up = "; the first step of a process includes its warm-up"
        else:
            warm_up = ""
        lines.append(
            f"{which} slow: {_ms(period.seconds)}{' a step' * several} instead of {_ms(period.usual)}, most of it in "
            f"{WORDS[period.phase]}. This cost {duration(period.lost)}{warm_up}."
        )
    if summary.evaluating > 0.01 * summary.elapsed:
        if summary.evaluations == 1:
            count = "One evaluation"
        else:
            count = f"{summary.evaluations:,} evaluations"
        share = _percent(summary.evaluating / summary.elapsed)
        lines.append(f"{count} took {duration(summary.evaluating)} more, {share} of the time.")
    if summary.restarts:
        if summary.restarts == 1:
            count = "once"
        else:
            count = f"{summary.restarts} times"
        cost = f", which cost {duration(summary.restarting)} with the steps that were repeated"
        lines.append(f"The run was restarted {count}{cost * (summary.restarting > 1)}.")
    if summary.goodput is not None:
        lines.append(goodput_sentence(summary.goodput))
    return [*lines, *_loss_sentences(summary), *_value_sentences(summary)]


def _incidents(summary: Summary) -> list[str]:
    lines = []
    for kind, message, ranks in summary.incidents:
        reason = f": {message.rstrip('.')}" if message else ""
        if kind == "out_of_memory":
            what = "ran out of memory"
        else:
            what = f"reported a hang{reason}"
        lines.append(f"{_capitalized(ranks_in_words(ranks))} {what}.")
    return lines


def _first_sentence(summary: Summary) -> str:
    has_rate = summary.throughput > 0 and summary.unit != "steps"
    if has_rate:
        rate = f", {summary.throughput:,.0f} {summary.unit}/s"
    else:
        rate = ""
    if not 0.8 < summary.typical / summary.seconds < 1.25:
        median = f" (median {_ms(summary.typical)})"
    else:
        median = ""
    if summary.steps > 1:
        steps = f"Steps {summary.first:,} to {summary.last:,}"
    else:
        steps = f"Step {summary.first:,}"
    return (
        f"{steps} on {summary.ranks} rank{'s' * (summary.ranks > 1)} took {duration(summary.duration)}: "
        f"{_ms(summary.seconds)} a step{median}{rate}."
    )


def goodput_sentence(shares: Goodput) -> str:
    """Where the time of a run went, with the causes that cost most first."""
    text = f"The goodput is {_percent(shares.share)} of {duration(shares.seconds)}"
    badput = sorted(shares.badput.items(), key=lambda item: -item[1])
    parts = [f"{BADPUT[cause]} ({_percent(share)})" for cause, share in badput if share >= 0.005]
    if parts:
        text += f"; the rest is {', '.join(parts)}"
    return f"{text}."


def _loss_sentences(summary: Summary) -> list[str]:
    lines = []
    first, last = summary.loss
    if math.isfinite(first) and summary.steps > 1:
        lowest, step = summary.lowest_loss
        has_risen = last - lowest > 0.5 * abs(first - lowest)
        lines.append(
            f"The loss went from {first:.4g} to {last:.4g}"
            + f"; it was lowest, {lowest:.4g}, at about step {step:,}" * has_risen
            + "."
        )
    elif math.isfinite(first):
        lines.append(f"The loss is {last:.4g}.")
    if summary.bad_loss is not None:
        if len(summary.bad_loss_ranks) < summary.ranks:
            some = f" on {ranks_in_words(summary.bad_loss_ranks)}"
        else:
            some = ""
        lines.append(f"The loss is not finite{some}, first at step {summary.bad_loss:,}.")
    return lines


def _value_sentences(summary: Summary) -> list[str]:
    lines = []
    if summary.skipped:
        if summary.skipped == 1:
            steps = "1 step was"
        else:
            steps = f"{summary.skipped:,} steps were"
        lines.append(f"{steps} skipped because fp16 gradients overflowed.")
    if summary.memory_growth > 0:
        lines.append(f"The host memory grows by {size_of(summary.memory_growth)} in 1,000 steps.")
    return lines


def advice(summary: Summary) -> list[str]:
    """What to try, most useful first."""
    lines = []
    for group in sorted(_groups(summary.stragglers), key=len, reverse=True)[:3]:
        phase = group[0].phase
        host = group[0].host
        ranks = ranks_in_words([straggler.rank for straggler in group])
        if phase == "checkpoint":
            lines.append(
                f"The others wait while {ranks} saves checkpoints: save less often, or with "
                "`save_state(blocking=False)`."
            )
            continue
        look = {
            "data": "the storage that is read there, and the load of the CPU",
            "other": "what only this rank does between steps: logging, printing, evaluation",
        }.get(phase, f"the load, clock and temperature of {host or 'the machine'}")
        if len(group) == 1:
            loses = "loses its time"
        else:
            loses = "lose their time"
        lines.append(f"{_capitalized(ranks)} {loses} in {WORDS[phase]}: look at {look}.")
    period = summary.period
    if period and not period.is_first:
        lines.append(
            f"Look at what else ran on these machines during steps {period.first:,} to {period.last:,}, "
            f"and at what is special about {WORDS[period.phase]} there."
        )
    if summary.waiting >= 0.1 and not summary.stragglers and summary.steps >= WINDOW:
        lines.append(
            "The ranks take turns in being slow: give them batches of equal work (samples of similar length), and "
            "look for other programs on these machines."
        )
    # What slow ranks alone lose in a phase, or communicate because of them, is not repeated for all.
    excess = max(
        (straggler.phase_excess / summary.seconds for straggler in summary.stragglers), default=0.0
    )
    slow_phases = {straggler.phase for straggler in summary.stragglers}
    for phase, share in sorted(summary.usual_shares.items(), key=lambda item: -item[1]):
        least, remedy = REMEDIES.get(phase, (math.inf, ""))
        if phase == "communication" and slow_phases:
            continue
        if share >= least + excess * (phase in slow_phases):
            lines.append(f"{_percent(share)} of the time is {WORDS[phase]}: {remedy}.")
    if summary.evaluating > 0.25 * summary.elapsed:
        lines.append("Evaluate less often, on a part of the data, or with larger batches.")
    if summary.bad_loss is not None:
        lines.append(
            "Lower the learning rate, clip gradients, or look at the batch before that step."
        )
    if summary.skipped > 0.05 * summary.steps:
        lines.append(
            "Many steps are skipped: use bf16, or a lower `init_scale` of `GradScalerKwargs`."
        )
    if summary.memory_growth > 0:
        lines.append(
            "Something keeps objects of each step: often losses, collected without `.item()` or `.detach()`."
        )
    if any(kind == "out_of_memory" for kind, _, _ in summary.incidents):
        lines.append(
            "Use smaller batches with gradient accumulation, or compare layouts with `accelerate plan`. The events "
            "link what the allocator held."
        )
    return lines


def _groups(stragglers: Sequence[Straggler]) -> list[list[Straggler]]:
    """Stragglers of one machine with the same phase and about the same steps, together."""
    groups: list[list[Straggler]] = []
    for straggler in stragglers:
        for group in groups:
            other = group[0]
            near = 0.1 * (other.last - other.first + 1) + 1
            if (
                (straggler.host, straggler.phase) == (other.host, other.phase)
                and abs(straggler.first - other.first) <= near
                and abs(straggler.last - other.last) <= near
                and 0.8 < straggler.excess / other.excess < 1.25
            ):
                group.append(straggler)
                break
        else:
            groups.append([straggler])
    return groups


def _slow_sentence(group: Sequence[Straggler]) -> str:
    """One sentence about slow ranks with the same cause."""
    slow = group[0]
    host = f" on {slow.host}" if slow.host else ""
    if len(group) == 1:
        were = "was"
        them = "it"
    else:
        were = "were"
        them = "them"
    wait = f" The others wait {_ms(slow.waiting)} a step for {them}."
    return (
        f"{_capitalized(ranks_in_words([straggler.rank for straggler in group]))}{host} {were} slow in "
        f"{_percent(slow.share)} of the steps (from {slow.first:,} to {slow.last:,}): {_ms(slow.excess)} a step, "
        f"{_percent(slow.ratio - 1)} above the median, of which {_ms(slow.phase_excess)} in {WORDS[slow.phase]}."
        + wait
        * (slow.waiting > 0.1 * slow.excess)
    )


def _capitalized(text: str) -> str:
    return text[0].upper() + text[1:]


def _ms(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds:.3g} s"


def _percent(share: float) -> str:
    if share >= 0.0095:
        return f"{share * 100:.0f}\u00a0%"
    return "under 1\u00a0%"


def _flops(rate: float) -> str:
    if rate >= 1e11:
        return f"{rate / 1e12:.3g} TFLOP/s"
    return f"{rate / 1e9:.3g} GFLOP/s"


def duration(seconds: float) -> str:
    """A length of time for people: 13.2 ms, 45 s, 12 min 5 s, 3 h 20 min, 4 days 2 h."""
    rounded = round(seconds)
    if rounded < 60:
        return _ms(seconds)
    if rounded < 3600:
        return f"{rounded // 60} min {rounded % 60} s"
    if rounded < 48 * 3600:
        return f"{rounded // 3600} h {rounded % 3600 // 60} min"
    return f"{rounded // 86400:,} days {rounded % 86400 // 3600} h"
