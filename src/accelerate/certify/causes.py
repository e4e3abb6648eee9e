# SPDX-License-Identifier: Apache-2.0
"""What usually causes a difference: one table, from facts of the comparison to a sentence."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .comparison import Comparison, Difference, factor_of, norm

# By how much two numbers differ that are not the same factor.
_APART = 1e-2
# What remains of a tensor, relative to its norm, that has the form that a fact names.
_REST = 1e-3


class Facts:
    """What is known of the first difference.

    Args:
        comparison: of the layout's run with the reference.
        info: what the layout's run has noted.
    """

    def __init__(self, comparison: Comparison, info: dict[str, Any]) -> None:
        self.first: Difference = comparison.differences[0]
        self.name: str = f"{self.first.kind}/{self.first.name}"
        self.processes: int = int(info.get("processes", 1))
        self.shards: int = int(info.get("shards", 1))
        self._info = info
        self._reference = comparison.reference
        self._expected_step = comparison.reference[self.first.step - 1]
        self._actual_step = comparison.layout[self.first.step - 1]
        # Names of what differs in the same step.
        self._different: dict[str, list[str]] = {}
        for other in comparison.differences:
            if other.step == self.first.step:
                self._different.setdefault(other.kind, []).append(other.name)

    @functools.cached_property
    def actual(self) -> torch.Tensor:
        """The tensor in the layout."""
        return self._actual_step[self.name].double()

    @functools.cached_property
    def expected(self) -> torch.Tensor:
        """The tensor on one process."""
        return self._expected_step[self.name].double()

    @property
    def is_absent(self) -> bool:
        """The layout has no such tensor."""
        return self.name not in self._actual_step

    @property
    def has_other_shape(self) -> bool:
        """The tensor has another shape in the layout."""
        return self.actual.shape != self.expected.shape

    @property
    def is_reordered(self) -> bool:
        """The elements are the same in another order."""
        return torch.equal(self.actual.flatten().sort()[0], self.expected.flatten().sort()[0])

    @property
    def is_zero(self) -> bool:
        """All elements are zero in the layout."""
        return not norm(self.actual)

    @property
    def is_first_step(self) -> bool:
        """The difference is in the first step."""
        return self.first.step == 1

    @functools.cached_property
    def factor(self) -> float | None:
        """By what all elements are multiplied, of a parameter those of its step; None where nothing is or by 1."""
        factor = factor_of(*self._changes)
        if factor is None or abs(factor - 1) < _APART:
            return None
        return factor

    @property
    def by_processes(self) -> bool:
        """That factor is the number of ranks, or of shards of the data, or one divided by it."""
        if self.factor is None or not self.factor:
            return False
        larger = max(abs(self.factor), 1 / abs(self.factor))
        return any(abs(larger - count) < _APART for count in (self.processes, self.shards))

    @property
    def by_a_whole_number(self) -> bool:
        """That factor is 2 or more, without a fraction."""
        return self.factor is not None and self.factor > 1 + _APART and not self.factor % 1

    @property
    def by_parts(self) -> bool:
        """The shards of the tensor are multiplied by other numbers."""
        actual, expected = self._changes
        if not actual.ndim or len(actual) < 2:
            return False
        factors = []
        pieces = zip(actual.chunk(self.processes), expected.chunk(self.processes), strict=True)
        for actual_piece, expected_piece in pieces:
            factor = factor_of(actual_piece, expected_piece)
            if factor is None:
                return False
            factors.append(factor)
        return max(factors) - min(factors) > _REST

    @property
    def is_shifted(self) -> bool:
        """The same vector is added to each row."""
        if self._row_errors is None or len(self._row_errors) < 2:
            return False
        spread = self._row_errors - self._row_errors[0]
        return bool(spread.abs().max() <= _REST * self._row_errors.abs().max())

    @property
    def rows(self) -> str:
        """How many rows differ, such as "3 of 8"; empty where all do."""
        if self._row_errors is None:
            return ""
        differ = self._row_errors.abs().amax(-1) > self.first.tolerance
        if bool(differ.all()):
            return ""
        return f"{int(differ.sum())} of {len(differ)}"

    @property
    def is_rare(self) -> bool:
        """Other tensors of this kind are equal in this step."""
        total = sum(name.startswith(f"{self.first.kind}/") for name in self._expected_step)
        return len(self._different[self.first.kind]) < total

    @property
    def replica(self) -> str:
        """The rank with another copy of the tensor, and along which dimension of the mesh; empty if there is none."""
        for note in (self._info.get("replicas"), self._info.get("buffers")):
            if note and (note["step"], note["kind"]) == (self.first.step, self.first.kind):
                return "rank {rank} has different values of {name} than rank 0 (along {dimension})".format(
                    **note
                )
        return ""

    @property
    def values(self) -> str:
        """The two numbers."""
        return f"{float(self.expected):.6g} on one process, {float(self.actual):.6g} in the layout"

    @property
    def other_step(self) -> int:
        """The step of the reference in which a number is what it is in the layout; 0 if there is none."""
        for number, step in enumerate(self._reference, 1):
            if self.name in step and torch.equal(step[self.name].double(), self.actual):
                return number
        return 0

    @property
    def state(self) -> str:
        """The state of the same parameter that differs too, such as "exp_avg"; empty if none does."""
        states = self._different.get("state", [])
        return next((name for name in states if f"{self.first.name} " in name), "")

    @functools.cached_property
    def _row_errors(self) -> torch.Tensor | None:
        """The error of each row; None of a tensor of one dimension."""
        if self.actual.ndim < 2:
            return None
        return (self.actual - self.expected).flatten(0, -2)

    @property
    def _changes(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The tensors, of parameters what this step has changed."""
        actual, expected = self.actual, self.expected
        if self.first.kind == "parameter" and not self.is_first_step:
            before = self._reference[self.first.step - 2].get(self.name)
            if before is not None:
                return actual - before.double(), expected - before.double()
        return actual, expected


@dataclass(frozen=True)
class Cause:
    """A row of the table.

    Fields:
        name: of the cause.
        kind: of the tensors that it changes.
        applies: whether facts point to it.
        text: a sentence, in whose braces f has the facts.
    """

    name: str
    kind: str
    applies: Callable[[Facts], object]
    text: str


def _always(facts: Facts) -> bool:
    return True


# Of each kind the first row that applies counts.
TABLE = (
    Cause(
        "dropped tail", "batch", lambda f: f.has_other_shape,
        "the ranks read a different number of samples: some are dropped or added, or collate_fn "
        "depends on the rank",
    ),
    Cause(
        "batch order", "batch", lambda f: f.is_reordered,
        "the ranks read the same samples in a different order: a sampler or dataset orders them "
        "by rank",
    ),
    Cause(
        "other samples", "batch", _always,
        "the ranks read different samples: each process draws its own random numbers in the "
        "dataset or in collate_fn, the dataset depends on the rank, or the seed is not set",
    ),
    Cause(
        "repeated sum", "output", lambda f: f.factor is not None,
        "all of it is multiplied by {f.factor:.4g}: values that are complete on each rank are "
        "summed, or a sum replaces a mean",
    ),
    Cause(
        "repeated bias", "output", lambda f: f.is_shifted,
        "the same vector is added to each row: each of the {f.processes} ranks adds the bias "
        "before the sum",
    ),
    Cause(
        "dropped mask or tail", "output", lambda f: f.rows,
        "{f.rows} rows differ: the module reads rows that are on another rank (neighbors, the "
        "last token, a mean), or a mask or the end of a sequence is dropped",
    ),
    Cause(
        "split samples", "output", _always,
        "the module combines what is split over ranks or micro-batches: samples of a batch (a "
        "mean over them, batch statistics), rows of a sequence, or features between split "
        "layers. Do not split it, or gather what it combines",
    ),
    Cause(
        "sum of losses", "loss", lambda f: f.is_first_step and f.by_processes,
        "the loss is multiplied by {f.factor:.4g}: it sums over the samples of a rank, and the "
        "ranks are averaged. Use the mean (reduction='mean')",
    ),
    Cause(
        "mean over unequal parts", "loss", lambda f: f.is_first_step,
        "the ranks take the mean over different numbers of items, such as labels that are not "
        "padding: call accelerator.backward(loss, num_items=n) with their number. Or the loss "
        "combines samples of several ranks (negatives in the batch): gather them first",
    ),
    Cause(
        "other forward", "loss", _always,
        "the parameters before this step are equal: a rank computes with different buffers, uses "
        "weights that it keeps elsewhere, or draws random numbers, or the ranks take the mean "
        "over different numbers of items (backward(loss, num_items=n) counts them)",
    ),
    Cause(
        "missing reduction", "gradient", lambda f: f.replica,
        "{f.replica}: the gradient is not reduced over these ranks. The backward ran inside "
        "no_sync, a communication hook returns the gradient of its own rank, or the parameter "
        "does not belong to the prepared model",
    ),
    Cause(
        "missing reduction", "gradient", lambda f: f.is_zero,
        "the gradient is zero: the layout loses it between the backward pass and the step",
    ),
    Cause(
        "hook of a gradient", "gradient", lambda f: f.factor is not None and f.is_rare,
        "only this gradient is multiplied by {f.factor:.4g}: a hook of the parameter is "
        "skipped or called twice, or the gradient is summed over only some of the ranks",
    ),
    Cause(
        "sum for mean", "gradient", lambda f: f.by_processes,
        "all gradients are multiplied by {f.factor:.4g}: a sum replaces the mean over the "
        "ranks, or the loss is divided twice",
    ),
    Cause(
        "part of a norm", "gradient", lambda f: f.factor is not None or f.by_parts,
        "the gradients are scaled differently than on one process: the norm that clips or scales "
        "them covers only a part of the model, or counts copies. Call accelerator.clip_grad_norm_",
    ),
    Cause(
        "missing reduction", "gradient", lambda f: f.is_rare,
        "the other gradients are equal: this one lacks the contribution of some ranks that share "
        "the parameter (a tied weight, a layer between split layers, a parameter outside the "
        "prepared model)",
    ),
    Cause(
        "mean over unequal parts", "gradient", _always,
        "the loss is equal, but the gradients are not averaged, or are weighted by unequal parts "
        "of the batch",
    ),
    Cause(
        "schedule", "options", lambda f: f.other_step,
        "{f.values}, which one process has in step {f.other_step}: the scheduler does not "
        "step once for each optimizer step. Prepare it, or call it once on each rank",
    ),
    Cause(
        "schedule", "options", _always,
        "{f.values}: the script computes it from the rank or the number of processes, or a "
        "scheduler makes a different number of steps",
    ),
    Cause(
        "other optimizer", "parameter", lambda f: f.replica,
        "{f.replica}: the gradients are equal, but the ranks step with different options or "
        "states (a learning rate that depends on the rank, weights that an optimizer copied "
        "before prepare synchronized the ranks)",
    ),
    Cause(
        "lost state", "parameter", lambda f: f.state,
        "the optimizer's {f.state} differs too, although the gradients are equal: the state "
        "was lost, was not loaded, or covers only a part of the tensor",
    ),
    Cause(
        "part of a norm", "parameter", lambda f: f.by_parts or (f.factor is not None and not f.is_first_step),
        "the gradients are equal, but the step is scaled: the optimizer computes a norm or a "
        "mean over the part that a rank holds. If the optimizer can use DTensors, do not use "
        "their local part; otherwise remove supports_sharded_parameters",
    ),
    Cause(
        "lost write", "parameter", lambda f: f.is_rare,
        "the gradients and the other parameters are equal: a forward or the loop writes this "
        "parameter and the layout does not keep the value, its master weight is lost, or the "
        "optimizer computes a norm over the part that a rank holds",
    ),
    Cause(
        "other weights", "parameter", _always,
        "the gradients are equal: the optimizer steps other weights (lost master weights, its "
        "own copy), or combines elements that are spread over ranks",
    ),
    Cause(
        "repeated write", "buffer", lambda f: f.by_a_whole_number,
        "the buffer is {f.factor:.4g} times its value on one process: it is written once for "
        "each micro-batch or rank",
    ),
    Cause(
        "unsynchronized buffer", "buffer", lambda f: f.replica,
        "{f.replica}: each rank writes it from its own samples. Average it over the ranks (accelerator.reduce), or "
        "use SyncBatchNorm",
    ),
    Cause(
        "unsynchronized buffer", "buffer", _always,
        "the buffer is written from a part of the batch and is not averaged over the ranks or "
        "micro-batches",
    ),
    Cause(
        "lost state", "state", _always,
        "gradients and parameters are equal: the state was lost, was not loaded, or covers only "
        "a part of the tensor",
    ),
)  # fmt: skip
_ABSENT = Cause("absent", "", _always, "the layout does not train this tensor or does not save it")


def causes(comparison: Comparison, info: dict[str, Any]) -> list[str]:
    """The likely cause of the first difference: its name and a sentence.

    Args:
        comparison: of the layout's run with the reference.
        info: what the layout's run has noted.
    """
    facts = Facts(comparison, info)
    cause = _ABSENT
    if not facts.is_absent:
        rows = [row for row in TABLE if row.kind == facts.first.kind]
        cause = next(row for row in rows if row.applies(facts))
    return [f"{cause.name}: {cause.text.format(f=facts)}"]
