# SPDX-License-Identifier: Apache-2.0
"""Whether a run has trained each sample of each epoch once, from the ranges of its ledger."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from . import rows
from .rows import Array, Ledger

# Why positions of an epoch were not trained once, and what is written about it.
REASONS = {
    "drop_last": "not trained: drop_last drops the incomplete last step",
    "skip": "not trained: the pass or a different order of the epoch started after them "
    "(skip_first_batches, a loaded position, a different seed)",
    "left": "not trained: the loop left the epoch",
    "no_backward": "read, but no backward pass followed before the next batch",
    "optimizer": "not trained: the optimizer skipped the step because gradients were not finite",
    "unrecorded": "unknown: steps are missing in the ledger",
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
        is_open: the run has ended within this epoch, which is not a fault.
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

    def add(self, reason: str, begin: int, end: int, step: int | None = None) -> None:
        """Add a finding on the positions from `begin` to the one before `end`, if there are any."""
        if begin < end:
            finding = Finding(reason, begin, end - 1, step)
            self.findings.append(finding)


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
    groups: dict[Any, list[int]] = {}
    keys = ledger.ranges[["index", "epoch", "order"]]
    for i, key in enumerate(keys.tolist()):
        groups.setdefault(key, []).append(i)
    epochs: list[Epoch] = []
    following: dict[int, Epoch] = {}
    # From the newest one on, as the steps of an epoch end where the next one begins.
    for members in reversed(groups.values()):
        ranges = ledger.ranges[members]
        loader = int(ranges["index"][0])
        epoch = _epoch(ledger, ranges, following.get(loader))
        following[loader] = epoch
        epochs.insert(0, epoch)
    numbers = ledger.steps["step"]
    expected = np.arange(1, numbers.max(initial=0) + 1)
    return Audit(
        attempts=len(ledger.attempts),
        steps=len(numbers),
        redone=_spans(np.unique(ledger.superseded["step"])),
        missing=_spans(np.setdiff1d(expected, numbers)),
        epochs=epochs,
    )


def _epoch(ledger: Ledger, ranges: Array, following: Epoch | None) -> Epoch:
    """The audit of the ranges of one order, before the epoch of the same loader that follows."""
    newest = ranges[-1]
    numbers = ledger.steps["step"]
    steps = ledger.steps[np.searchsorted(numbers, ranges["step"])]
    sizes = steps["world_size"].tolist()
    epoch = Epoch(
        loader=int(newest["index"]),
        epoch=int(newest["epoch"]),
        steps=(int(ranges[0]["step"]), int(newest["step"])),
        ranks=[size for size, _ in itertools.groupby(sizes)],
    )
    is_complete = bool((ranges["flags"] & rows.LAST).any())
    total = float(newest["total"])
    if math.isnan(total) and is_complete:
        total = float(newest["last"])
    if not math.isnan(total):
        epoch.total = int(total)

    is_unused = ranges["flags"] & rows.SKIPPED != 0
    is_in_epoch = numbers >= epoch.steps[0]
    if following is not None:
        is_in_epoch &= numbers < following.steps[0]
    backwards = ledger.steps["backwards"][is_in_epoch]
    if backwards.sum() >= ranges["batches"].sum():
        # A loop that reads a batch ahead has a backward for each batch, later.
        is_unused[:] = False
    is_left_out = steps["flags"] & rows.SKIPPED != 0
    reached = 0
    before = 0
    for i in np.argsort(ranges["first"], kind="stable").tolist():
        first, last, step = ranges[["first", "last", "step"]][i].item()
        reason = "skip"
        if _lacks_steps(numbers, before, step):
            reason = "unrecorded"
        epoch.add(reason, reached, first)
        if is_unused[i]:
            epoch.add("no_backward", first, last, step)
        elif is_left_out[i]:
            epoch.add("optimizer", first, last, step)
        else:
            epoch.samples += float(ranges["samples"][i])
            epoch.trained += max(0, last - max(first, reached))
            epoch.add("again", first, min(last, reached), step)
        reached = max(reached, last)
        before = step

    if epoch.total is not None:
        if is_complete and newest["flags"] & rows.DROPS:
            epoch.add("drop_last", reached, epoch.total)
        elif following is not None:
            epoch.add("left", reached, epoch.total)
        else:
            epoch.is_open = reached < epoch.total
    epoch.add("even_batches", 0, int(ranges["repeated"].sum()))
    return epoch


def _lacks_steps(numbers: Array, before: int, step: int) -> bool:
    """Whether some steps between two steps are not among those that were recorded."""
    begin = np.searchsorted(numbers, before, "right")
    end = np.searchsorted(numbers, step)
    return bool(end - begin < step - before - 1)


def _spans(numbers: Array) -> list[Span]:
    """Ascending numbers as the first and the last one of each run of neighbours."""
    spans: list[Span] = []
    for number in numbers.tolist():
        if spans and spans[-1][1] == number - 1:
            spans[-1] = spans[-1][0], number
        else:
            spans.append((number, number))
    return spans
