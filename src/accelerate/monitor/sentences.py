# SPDX-License-Identifier: Apache-2.0
"""The summary of a run in words: where the time went, and what stands out."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

from ..core.objects import ranks_in_words, size_of
from .goodput import BADPUT, Goodput
from .slow_ranks import Straggler
from .summary import Incident, Period, Summary
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
_MOST_GROUPS = 8


def sentences(summary: Summary) -> list[str]:
    """Where the time went, and what stands out."""
    incidents = [incident_sentence(incident) for incident in summary.incidents]
    if not summary.last:
        return [*incidents, "No steps were recorded: use `--telemetry` to record them."]
    lines = [*incidents, _first_sentence(summary)]
    if math.isfinite(summary.flops):
        has_peak = math.isfinite(summary.utilization)
        if has_peak:
            of_peak = f", {percent(summary.utilization)} of its peak (MFU)"
        else:
            of_peak = ""
        lines.append(f"Each device computes {_flops(summary.flops)} for the model{of_peak}.")
    phases = shares_in_words(summary.shares)
    if phases:
        lines.append(f"The time went into {phases}.")
    if summary.waiting >= 0.05 and summary.steps >= WINDOW:
        lines.append(waiting_sentence(summary))
    groups = groups_of(summary.stragglers)
    lines += [slow_sentence(group) for group in groups[:_MOST_GROUPS]]
    if len(groups) > _MOST_GROUPS:
        lines.append(f"{sum(map(len, groups[_MOST_GROUPS:]))} other ranks were also slow.")
    if summary.ranks > 1 and not groups and summary.steps >= WINDOW:
        lines.append("No rank stands out as slow.")
    if summary.period:
        lines.append(period_sentence(summary.period))
    if summary.evaluating > 0.01 * summary.elapsed:
        lines.append(evaluation_sentence(summary))
    if summary.restarts:
        lines.append(restart_sentence(summary))
    if summary.goodput is not None:
        lines.append(goodput_sentence(summary.goodput))
    return [*lines, *_loss_sentences(summary), *_value_sentences(summary)]


def shares_in_words(shares: Mapping[str, float]) -> str:
    """The phases that take at least 1% of the time, the longest first."""
    phases = sorted(
        ((share, phase) for phase, share in shares.items() if share >= 0.01), reverse=True
    )
    return ", ".join(f"{WORDS[phase]} ({percent(share)})" for share, phase in phases)


def incident_sentence(incident: Incident) -> str:
    """Which ranks hang, or have run out of memory."""
    kind, message, ranks = incident
    reason = f": {message.rstrip('.')}" if message else ""
    if kind == "out_of_memory":
        what = "ran out of memory"
    else:
        what = f"reported a hang{reason}"
    return f"{capitalized(ranks_in_words(ranks))} {what}."


def waiting_sentence(summary: Summary) -> str:
    """How long ranks wait for others."""
    return (
        f"Ranks wait for the slowest rank about {percent(summary.waiting)} of the time, mostly in "
        "the backward pass and communication."
    )


def period_sentence(period: Period) -> str:
    """Which steps were slow, and in what."""
    several = period.last > period.first
    if several:
        which = f"Steps {period.first:,} to {period.last:,} were"
    else:
        which = f"Step {period.first:,} was"
    if period.is_first:
        warm_up = "; the first step of a process includes its warm-up"
    else:
        warm_up = ""
    return (
        f"{which} slow: {_ms(period.seconds)}{' a step' * several} instead of "
        f"{_ms(period.usual)}, mostly because of {WORDS[period.phase]}. This cost "
        f"{duration(period.lost)}{warm_up}."
    )


def evaluation_sentence(summary: Summary) -> str:
    """How long the evaluations took."""
    if summary.evaluations == 1:
        count = "One evaluation"
    else:
        count = f"{summary.evaluations:,} evaluations"
    share = percent(summary.evaluating / summary.elapsed)
    return f"{count} took another {duration(summary.evaluating)}, {share} of the time."


def restart_sentence(summary: Summary) -> str:
    """How often the run was restarted, and what that cost."""
    if summary.restarts == 1:
        count = "once"
    else:
        count = f"{summary.restarts} times"
    cost = f", which cost {duration(summary.restarting)} with the steps that were repeated"
    return f"The run was restarted {count}{cost * (summary.restarting > 1)}."


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
    text = f"The goodput is {percent(shares.share)} of {duration(shares.seconds)}"
    badput = sorted(shares.badput.items(), key=lambda item: -item[1])
    parts = [f"{BADPUT[cause]} ({percent(share)})" for cause, share in badput if share >= 0.005]
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


def groups_of(stragglers: Sequence[Straggler]) -> list[list[Straggler]]:
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


def slow_sentence(group: Sequence[Straggler]) -> str:
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
        f"{capitalized(ranks_in_words([straggler.rank for straggler in group]))}{host} {were} slow in "
        f"{percent(slow.share)} of the steps (from {slow.first:,} to {slow.last:,}): {_ms(slow.excess)} a step, "
        f"{percent(slow.ratio - 1)} above the median, of which {_ms(slow.phase_excess)} in {WORDS[slow.phase]}."
        + wait
        * (slow.waiting > 0.1 * slow.excess)
    )


def capitalized(text: str) -> str:
    """A text whose first letter is a capital."""
    return text[0].upper() + text[1:]


def _ms(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds:.3g} s"


def percent(share: float) -> str:
    """A share in percent."""
    if share >= 0.0095:
        return f"{share * 100:.0f}%"
    return "under 1%"


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
