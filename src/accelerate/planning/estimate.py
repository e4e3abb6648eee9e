# SPDX-License-Identifier: Apache-2.0
"""From a traced step to intervals of memory and time, and which layouts fit a machine."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

from .experts import has_experts
from .layouts import REFUSED, REFUSED_EXPERTS, PlannedLayout
from .ledger import ACTIVATIONS, GRADIENTS, OPTIMIZER, WEIGHTS, Work
from .machine import Machine
from .trace import PlannedTraining, Step, trace_all

# How much slower float32 matrix products are than those whose speed describes an accelerator.
_SLOWER = {"float32": 2.0, "float64": 32.0}
# What offloaded shards cross to the host (bytes a second).
_TO_HOST = 20e9
# A layout that does not fit is tried with smaller batches, up to so many in a window.
_MOST_BATCHES = 32


class Interval(NamedTuple):
    """A quantity that lies between `low` and `high`."""

    low: float
    high: float

    @property
    def middle(self) -> float:
        """The estimate."""
        return (self.low + self.high) / 2


_NOTHING = Interval(0, 0)


@dataclass(frozen=True)
class Estimate:
    """One layout on one machine.

    Fields:
        layout: which.
        memory: bytes of one rank at the peak of a step.
        kinds: kind of memory -> bytes, of the middle.
        seconds: of an optimizer step.
        sent: bytes of the messages of one rank in an optimizer step.
        fits: whether the upper end of `memory` is less than the machine has.
        failure: why there is no estimate; None if there is one.
        defect: the traceback of a failure of this package.
    """

    layout: PlannedLayout
    memory: Interval = _NOTHING
    kinds: dict[str, int] | None = None
    seconds: Interval = _NOTHING
    sent: int = 0
    fits: bool = False
    failure: str | None = None
    defect: str | None = None

    def to_json(self) -> dict[str, Any]:
        """The row as plain data."""
        if self.failure is not None:
            return {"layout": self.layout.name, "not_estimated": self.failure}
        row = {
            "layout": self.layout.name,
            "fits": self.fits,
            "memory_bytes": list(self.memory),
            "memory_by_kind": self.kinds,
            "step_seconds": list(self.seconds),
            "sent_bytes": self.sent,
        }
        if self.layout.loading:
            row["distributed_config"] = dict(self.layout.loading)
        return row


def estimate(layout: PlannedLayout, step: Step, machine: Machine) -> Estimate:
    """The row of one traced step."""
    if step.failure is not None:
        return Estimate(layout, failure=step.failure, defect=step.defect)
    kinds = {kind: round(size * machine.memory_scale) for kind, size in step.memory.items()}
    extra = 0.0
    if layout.offload:
        # Gathered weights and activations stay on the device.
        extra = (kinds[WEIGHTS] + kinds[GRADIENTS]) / _TO_HOST
        for kind in (WEIGHTS, GRADIENTS, OPTIMIZER):
            kinds[kind] = 0
    total = sum(kinds.values())
    # Kernels allocate by themselves, and there are gaps between blocks.
    memory = memory_interval(step, total, machine.memory_spread)
    first, last = step.work
    batches_before = layout.accumulation - 1
    seconds = _seconds(last, machine)
    seconds += batches_before * _seconds(first, machine)
    seconds += extra
    seconds *= machine.time_scale * (1 + step.waiting)
    sent = _sent(last) + batches_before * _sent(first)
    low = seconds * (1 - machine.spread)
    high = seconds * (1 + machine.spread)
    fits = memory.high <= machine.memory
    return Estimate(layout, memory, kinds, seconds=Interval(low, high), sent=sent, fits=fits)


def memory_interval(step: Step, total: int, spread: float) -> Interval:
    """The interval of an estimate of `total` bytes."""
    spread += step.uneven
    return Interval(total * (1 - spread), total * (1 + spread))


def _sent(work: Work) -> int:
    return sum(size for _, size in work.messages.values())


def _seconds(work: Work, machine: Machine) -> float:
    compute = work.operations * machine.overhead
    compute += work.moved / machine.bandwidth
    for dtype, flops in work.flops.items():
        seconds = flops / machine.flops
        if machine.device != "cpu":
            seconds *= _SLOWER.get(dtype, 1.0)
        compute += seconds
    messages = 0.0
    for (kind, _), (number, size) in work.messages.items():
        latency, speed = machine.links[kind]
        messages += number * latency + size / speed
    hidden = min(messages * machine.overlap, compute)
    return compute + messages - hidden


def plan(
    training: PlannedTraining,
    machine: Machine,
    layouts: Iterable[PlannedLayout],
    processes: int = 1,
    on_estimate: Callable[[Estimate, int], None] | None = None,
) -> list[Estimate]:
    """All rows: layouts that fit, by time; then layouts that do not, by memory; then layouts without an estimate.

    A layout that does not fit is tried again with half the batch and twice the batches of a window, until it fits or
    has one sample. `on_estimate` is called with each row, and the number of layouts that are known so far.
    """
    rows = list[Estimate]()
    waiting = list(layouts)
    while waiting:
        again = list[PlannedLayout]()
        count = len(rows) + len(waiting)
        for layout, step in trace_all(training, waiting, processes):
            row = estimate(layout, step, machine)
            rows.append(row)
            if _shrinks(row, training, machine):
                name = layout.name.removesuffix(f" x{layout.accumulation}")
                base = next(row.layout for row in rows if row.layout.name == name)
                again.append(base.accumulated(layout.accumulation * 2))
            if on_estimate is not None:
                on_estimate(row, count + len(again))
        waiting = again
    return sorted(rows, key=order)


def refused(model: nn.Module, ranks: int) -> list[Estimate]:
    """Rows for the layouts that a run refuses, with the reason."""
    if ranks == 1:
        return []
    reasons = REFUSED
    if has_experts(model):
        reasons = REFUSED | REFUSED_EXPERTS
    return [Estimate(PlannedLayout(name, ranks), failure=why) for name, why in reasons.items()]


def _shrinks(row: Estimate, training: PlannedTraining, machine: Machine) -> bool:
    """Whether a layout that does not fit may fit with half of its batch: only activations become smaller."""
    if row.failure is not None or row.fits or row.layout.accumulation >= _MOST_BATCHES:
        return False
    samples = training.batch.samples // (row.layout.data_ranks * row.layout.accumulation)
    fixed = row.memory.high - (row.kinds or {}).get(ACTIVATIONS, 0) * (1 + machine.memory_spread)
    return samples % 2 == 0 and fixed < machine.memory


def order(row: Estimate) -> tuple[int, float]:
    """The order of rows in a table."""
    if row.failure is not None:
        return 2, 0.0
    if row.fits:
        return (0, row.seconds.middle)
    return (1, row.memory.middle)
