# SPDX-License-Identifier: Apache-2.0
"""The verdict on a run: what limits it, the figures that show it, and what to try next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..core.objects import ranks_in_words
from .sentences import (
    WORDS,
    capitalized,
    evaluation_sentence,
    groups_of,
    incident_sentence,
    percent,
    period_sentence,
    restart_sentence,
    shares_in_words,
    slow_sentence,
    waiting_sentence,
)
from .slow_ranks import Straggler
from .summary import Summary
from .view import WINDOW

# What may limit a run, in the words of the verdict. docs/slow.md explains them.
LIMITS = {
    "hang": "The run hangs.",
    "memory": "The run ran out of memory.",
    "slow_rank": "{ranks} the run.",
    "uneven_ranks": "Uneven work of the ranks limits the run.",
    "input": "Input limits the run.",
    "communication": "Communication limits the run.",
    "optimizer": "The optimizer limits the run.",
    "saving": "Saving checkpoints limits the run.",
    "script": "The script's own code limits the run.",
    "idle": "Time between steps limits the run.",
    "warm_up": "The first steps limit the run.",
    "slow_steps": "A slow stretch limits the run.",
    "computation": "Computation limits the run.",
    "nothing": "Nothing stands out.",
}
# phase -> what it stands for, the share of the time from which on there is something to try, and what.
_PHASES = {
    "data": (
        "input",
        0.15,
        "Raise `num_workers` of the DataLoader, or move preprocessing out of the training loop.",
    ),
    "transfer": (
        "input",
        0.1,
        "Use `pin_memory=True` and `DataLoaderConfiguration(non_blocking=True)`.",
    ),
    "communication": (
        "communication",
        0.25,
        "Accumulate gradients over more batches, compress them (`DistributedDataParallelKwargs(comm_hook=...)`), or "
        "compare layouts with `accelerate plan`.",
    ),
    "optimizer": ("optimizer", 0.2, "Use the fused variant of the optimizer (`fused=True`)."),
    "checkpoint": ("saving", 0.1, "Save less often, or with `save_state(blocking=False)`."),
    "other": (
        "script",
        0.2,
        "Look for `.item()`, printing and logging at every step, and profile with `accelerator.profile()`.",
    ),
}
_COMPUTATION = ("forward", "backward", "optimizer")
# The share of the time that a finding must cost to be the verdict, and that of computation.
_LEAST_SHARE = 0.05
_LEAST_COMPUTATION = 0.75
# The share of evaluations, and of restarts, from which on there is something to try.
_LEAST_BETWEEN_STEPS = 0.25
_MOST_GROUPS = 3
_LESS_MEMORY = (
    "Use smaller batches with gradient accumulation, or compare layouts with `accelerate plan`. "
    "The events link to what the allocator held."
)


@dataclass(frozen=True)
class Finding:
    """What limits a run."""

    limit: str
    """A key of `LIMITS`."""
    share: float
    """The share of the time that it costs; 1 where it has stopped the run."""
    headline: str
    evidence: str
    """Figures, as a sentence."""
    next_step: str

    def lines(self) -> dict[str, str]:
        """The three lines in which a report and the monitor show it."""
        return {"Verdict": self.headline, "Evidence": self.evidence, "Next step": self.next_step}


def verdict(summary: Summary) -> Finding:
    """What has stopped the run, or else what costs most of its time."""
    if summary.stopped_by is not None:
        evidence = incident_sentence(summary.stopped_by)
        if summary.stopped_by[0] == "hang":
            next_step = "Look up the lines of the hang report: they name the ranks that others wait for, and where."
            return _finding("hang", 1.0, evidence, next_step)
        return _finding("memory", 1.0, evidence, _LESS_MEMORY)
    findings = [finding for finding in _findings(summary) if finding.share >= _LEAST_SHARE]
    if findings:
        return findings[0]
    share = sum(summary.shares.get(phase, 0.0) for phase in _COMPUTATION)
    next_step = (
        'Profile a few steps (`accelerate launch --profile 10:12`), then try `mixed_precision="bf16"`, larger '
        "batches, compilation, and other layouts (`accelerate plan`)."
    )
    if share >= _LEAST_COMPUTATION:
        parts = {phase: summary.shares[phase] for phase in _COMPUTATION}
        evidence = f"{percent(share)} of the time is {shares_in_words(parts)}."
        return _finding("computation", share, evidence, next_step)
    if not summary.last:
        next_step = "Record the steps: `accelerate launch --telemetry`."
        return _finding("nothing", 0.0, "No steps are recorded.", next_step)
    evidence = (
        f"Computation takes {percent(share)} of the time, and no other phase reaches its limit."
    )
    return _finding("nothing", 0.0, evidence, next_step)


def advice(summary: Summary) -> list[str]:
    """What else to try, most useful first."""
    lines = [finding.next_step for finding in _findings(summary)]
    if summary.bad_loss is not None:
        lines.append(
            "Lower the learning rate, clip gradients, or look at the batch before the loss is not finite."
        )
    if summary.skipped > 0.05 * summary.steps:
        lines.append(
            "Many steps are skipped: use bf16, or a lower `init_scale` of `GradScalerKwargs`."
        )
    if summary.memory_growth > 0:
        lines.append(
            "Look for what keeps objects of each step: often losses, collected without `.item()` or `.detach()`."
        )
    if any(kind == "out_of_memory" for kind, _, _ in summary.incidents):
        lines.append(_LESS_MEMORY)
    first = verdict(summary).next_step
    return [line for line in lines if line != first]


def _finding(limit: str, share: float, evidence: str, next_step: str) -> Finding:
    return Finding(limit, share, LIMITS[limit], evidence, next_step)


def _findings(summary: Summary) -> list[Finding]:
    """What costs time that may be saved, the most expensive first."""
    findings = [
        _slow_ranks(summary, group) for group in groups_of(summary.stragglers)[:_MOST_GROUPS]
    ]
    if summary.waiting >= 0.1 and not summary.stragglers and summary.steps >= WINDOW:
        next_step = (
            "The ranks are slow in turn: give them batches of equal work (samples of similar "
            "length), and look for other programs on these machines."
        )
        evidence = waiting_sentence(summary)
        findings.append(_finding("uneven_ranks", summary.waiting, evidence, next_step))
    findings += _phase_findings(summary)
    period = summary.period
    if period:
        limit = "slow_steps"
        next_step = (
            f"Check what else ran on these machines during steps {period.first:,} to "
            f"{period.last:,}, and what is special about {WORDS[period.phase]} there."
        )
        if period.is_first:
            limit = "warm_up"
            next_step = (
                "Judge the speed by later steps: zoom in, or let the run take longer. Regional compilation makes a "
                "long warm-up shorter."
            )
        share = period.lost / summary.duration
        findings.append(_finding(limit, share, period_sentence(period), next_step))
    if summary.evaluating > _LEAST_BETWEEN_STEPS * summary.elapsed:
        share = summary.evaluating / summary.elapsed
        next_step = "Evaluate less often, on a part of the data, or with larger batches."
        findings.append(_finding("idle", share, evaluation_sentence(summary), next_step))
    if summary.restarting > _LEAST_BETWEEN_STEPS * summary.elapsed:
        share = summary.restarting / summary.elapsed
        next_step = "Find out why the run was restarted, and save more often: fewer steps are then repeated."
        findings.append(_finding("idle", share, restart_sentence(summary), next_step))
    return sorted(findings, key=lambda finding: -finding.share)


def _phase_findings(summary: Summary) -> list[Finding]:
    """The phases that take a larger share of the time than they should on all ranks."""
    # What slow ranks alone lose in a phase, or communicate because of them, is not repeated for all.
    excess = max(
        (straggler.phase_excess / summary.seconds for straggler in summary.stragglers), default=0.0
    )
    slow_phases = {straggler.phase for straggler in summary.stragglers}
    findings = []
    for phase, (limit, least, next_step) in _PHASES.items():
        share = summary.usual_shares.get(phase, 0.0)
        if phase == "communication" and slow_phases:
            continue
        if phase in slow_phases:
            least += excess
        if share >= least:
            evidence = f"{percent(share)} of the time is {WORDS[phase]}."
            findings.append(_finding(limit, share, evidence, next_step))
    return findings


def _slow_ranks(summary: Summary, group: Sequence[Straggler]) -> Finding:
    """Slow ranks with the same cause."""
    slow = group[0]
    ranks = ranks_in_words([straggler.rank for straggler in group])
    if slow.phase == "checkpoint":
        next_step = (
            f"Save less often, or with `save_state(blocking=False)`: the others wait while {ranks} saves "
            "checkpoints."
        )
    elif slow.phase == "data":
        reads = "reads" if len(group) == 1 else "read"
        next_step = f"Look at the storage that {ranks} {reads}, and at the load of the CPU there."
    elif slow.phase == "other":
        next_step = f"Look at what only {ranks} did between steps: logging, printing, evaluation."
    else:
        machine = slow.host or "the machine"
        next_step = f"Look at the load, clock and temperature of {machine}, the machine of {ranks}."
    limits = "limits" if len(group) == 1 else "limit"
    headline = LIMITS["slow_rank"].format(ranks=f"{capitalized(ranks)} {limits}")
    share = slow.excess * slow.share / summary.seconds
    return Finding("slow_rank", share, headline, slow_sentence(group), next_step)
