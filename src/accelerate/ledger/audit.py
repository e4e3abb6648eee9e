# SPDX-License-Identifier: Apache-2.0
"""Whether a run has trained each sample of each epoch once, from the ranges of its ledger."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from . import rows
from .rows import Array, Ledger

# Why positions of an epoch were not trained once, and what is written about it.
REASONS = {
    "drop_last": "not trained: drop_last drops the incomplete last step",
    "skip": "not trained: the pass began behind them (skip_first_batches, or a position that was loaded)",
    "left": "not trained: the loop left the epoch",
    "no_backward": "read, and no backward followed before the next batch",
    "optimizer": "not trained: the optimizer left out the step, whose gradients were not finite",
    "unrecorded": "not known: steps are missing in the ledger",
    "order": "not known: another order of the epoch (another seed?) goes on behind them",
    "even_batches": "trained twice: even_batches fills the last step with the start of the epoch",
    "again": "trained again in the same epoch",
}
Span = tuple[int, int]


@dataclass(frozen=True)
class Finding:
    """Positions of an epoch that were not trained once: the first and the last one, and the step that read them."""

    reason: str
    first: int
    last: int
    step: int | None = None


@dataclass
class Epoch:
    """What the steps have trained of one order of an epoch.

    Fields:
        steps: the first and the last one.
        total: the length of the order; None if it is not known.
        trained: positions that were trained at least once.
        samples: that were trained, without padding; NaN if they were not counted.
        ranks: numbers of ranks, in the order of the steps.
        is_open: the run has ended within this epoch, which is no fault.
    """

    loader: int
    epoch: int
    steps: Span
    total: int | None = None
    trained: int = 0
    samples: float = 0.0
    ranks: list[int] = field(default_factory=list)
    is_open: bool = False
    findings: list[Finding] = field(default_factory=list)


@dataclass
class Audit:
    """The result of an audit.

    Fields:
        steps: optimizer steps that count.
        redone: the first and the last one of steps that were done again.
        missing: the same of steps that are not in the ledger.
    """

    attempts: int
    steps: int
    redone: list[Span]
    missing: list[Span]
    epochs: list[Epoch]

    def is_right(self, allowed: tuple[str, ...] = ()) -> bool:
        """Whether each sample of each complete epoch was trained once, but for reasons that are allowed."""
        for epoch in self.epochs:
            for finding in epoch.findings:
                if finding.reason not in allowed:
                    return False
        return bool(self.epochs)


def audit(ledger: Ledger) -> Audit:
    """Audit the ledger of a run."""
    numbers = ledger.steps["step"]
    expected = np.arange(1, numbers.max(initial=0) + 1)
    missing = _spans(np.setdiff1d(expected, numbers))
    groups: dict[Any, list[int]] = {}
    for i, key in enumerate(ledger.ranges[["index", "epoch", "order"]].tolist()):
        groups.setdefault(key, []).append(i)
    epochs: list[Epoch] = []
    following: dict[int, Epoch] = {}
    # From the newest one on, as the steps of an epoch end where the next one begins.
    for members in reversed(groups.values()):
        ranges = ledger.ranges[members]
        index = int(ranges[0]["index"])
        epoch = _epoch(ledger, ranges, following.get(index), missing)
        following[index] = epoch
        epochs.insert(0, epoch)
    redone = _spans(np.unique(ledger.superseded["step"]))
    return Audit(len(ledger.attempts), len(numbers), redone, missing, epochs)


def _epoch(ledger: Ledger, ranges: Array, following: Epoch | None, missing: list[Span]) -> Epoch:
    """The audit of the ranges of one order, before the epoch of the same loader that follows."""
    newest = ranges[-1]
    first_step, last_step = int(ranges[0]["step"]), int(newest["step"])
    epoch = Epoch(int(newest["index"]), int(newest["epoch"]), (first_step, last_step))
    total = float(newest["total"])
    if math.isnan(total) and newest["flags"] & rows.LAST:
        total = float(newest["last"])
    if not math.isnan(total):
        epoch.total = int(total)
    numbers = ledger.steps["step"]
    steps = ledger.steps[np.searchsorted(numbers, ranges["step"])]
    for world_size in steps["world_size"].tolist():
        if epoch.ranks[-1:] != [world_size]:
            epoch.ranks.append(world_size)
    of_epoch = numbers >= first_step
    if following is not None:
        of_epoch &= numbers < following.steps[0]
        if following.epoch == epoch.epoch:
            _compare_orders(following)
    # A loop that reads a batch ahead has a backward for each batch, later.
    reads_ahead = ledger.steps["backwards"][of_epoch].sum() >= ranges["batches"].sum()
    reached = before = 0
    for i in np.argsort(ranges["first"], kind="stable").tolist():
        row = ranges[i]
        first, last, step = int(row["first"]), int(row["last"]), int(row["step"])
        if first > reached:
            reason = "skip"
            if any(before < low and high < step for low, high in missing):
                reason = "unrecorded"
            epoch.findings.append(Finding(reason, reached, first - 1))
        if row["flags"] & rows.SKIPPED and not reads_ahead:
            epoch.findings.append(Finding("no_backward", first, last - 1, step))
        elif steps[i]["flags"] & rows.SKIPPED:
            epoch.findings.append(Finding("optimizer", first, last - 1, step))
        else:
            epoch.samples += float(row["samples"])
            epoch.trained += max(0, last - max(first, reached))
            if first < reached:
                again = min(last, reached) - 1
                epoch.findings.append(Finding("again", first, again, step))
        reached = max(reached, last)
        before = step
    if epoch.total is not None and reached < epoch.total:
        is_complete = ranges["flags"] & rows.LAST
        reason = "left"
        if is_complete.any() and newest["flags"] & rows.DROPS:
            reason = "drop_last"
        if reason == "left" and following is None:
            epoch.is_open = True
        else:
            epoch.findings.append(Finding(reason, reached, epoch.total - 1))
    repeated = int(ranges["repeated"].sum())
    if repeated:
        epoch.findings.append(Finding("even_batches", 0, repeated - 1))
    return epoch


def _compare_orders(epoch: Epoch) -> None:
    """In an epoch that has had another order before, the beginning was read in that one."""
    if epoch.findings and epoch.findings[0].first == 0 and epoch.findings[0].step is None:
        beginning = epoch.findings[0]
        epoch.findings[0] = Finding("order", 0, beginning.last)


def _spans(numbers: Array) -> list[Span]:
    """Ascending numbers as the first and the last one of each run of neighbours."""
    spans: list[Span] = []
    for number in numbers.tolist():
        if spans and spans[-1][1] == number - 1:
            spans[-1] = spans[-1][0], number
        else:
            spans.append((number, number))
    return spans
