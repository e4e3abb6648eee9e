# SPDX-License-Identifier: Apache-2.0
"""The comparison of two recorded runs, with the tolerance that a third one measures."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from .recording import KINDS

# A difference counts from so many times that of a run whose parameters began one unit in the last place away.
FACTOR = 8.0
# Up to which effect of that run, relative to a tensor's norm, an equal tensor is equal without a further word.
SHARP = 1e-4
# Above which effect nothing can be told of a tensor, and above which part of such tensors nothing of their kind.
VAGUE = 0.1
VAGUE_PART = 0.5
# Tensors with at most so many elements may be moved by little, by chance: one or two of them are most of an error.
FEW = 32
# Elements of a gradient that change by more than this part are as good as rounded away for optimizers such as Adam.
UNSTEADY = 1 / 32
# Verdicts on a kind of tensors, and on a layout.
EQUAL = "equal"
EQUAL_PERTURBED = "equal up to perturbation"
DIFFERENT = "different"
NOT_COMPARABLE = "not comparable"
FAILED = "could not run"
# Kinds that a perturbation of the parameters leaves as they are.
EXACT = ("batch", "options")

Step = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Difference:
    """A tensor that differs from the reference by more than the tolerance.

    Fields:
        step: optimizer step, from 1.
        kind: one of `recording.KINDS`.
        name: of the tensor, in the plain model.
        error, tolerance: Euclidean norms.
        size: the norm of the reference's tensor.
        reason: why no norm can be told, such as another shape.
    """

    step: int
    kind: str
    name: str
    error: float = 0.0
    tolerance: float = 0.0
    size: float = 0.0
    reason: str = ""

    @property
    def module(self) -> str:
        """The name of the tensor's module; empty for a kind that belongs to none."""
        if self.kind == "output":
            return self.name.partition(" (call ")[0]
        if self.kind in ("gradient", "parameter", "buffer"):
            return self.name.rpartition(".")[0]
        return ""

    @property
    def ratio(self) -> float:
        """The error in units of the tolerance."""
        if not self.error:
            return 0.0
        if not self.tolerance:
            return math.inf
        return self.error / self.tolerance


@dataclass
class Item:
    """The comparison of all tensors of a kind.

    Fields:
        tensors: their number, over all steps.
        ratio: the largest error in units of its tolerance. name, step: of that tensor.
        spread: the largest effect of the perturbation on a tensor, relative to its norm, among those that it leaves
            comparable. moved: the name of that tensor.
        vague: tensors on which the effect is above `VAGUE`: nothing can be told of them.
        vague_part: the largest part that these have in the norm of all tensors of a step.
    """

    tensors: int = 0
    ratio: float = 0.0
    name: str = ""
    step: int = 0
    spread: float = 0.0
    moved: str = ""
    vague: dict[str, float] = field(default_factory=dict)
    vague_part: float = 0.0

    def add(self, difference: Difference, spread: float) -> None:
        """Take in a tensor of which something can be told, and the effect of the perturbation on it."""
        if spread > self.spread:
            self.spread = spread
            self.moved = difference.name
        if difference.ratio > self.ratio:
            self.ratio = difference.ratio
            self.name = difference.name
            self.step = difference.step

    @property
    def verdict(self) -> str:
        """What the tensors of the kind have shown."""
        if self.ratio > 1:
            return DIFFERENT
        if self.vague_part > VAGUE_PART:
            return NOT_COMPARABLE
        if self.vague or self.spread > SHARP:
            return EQUAL_PERTURBED
        return EQUAL


@dataclass
class Comparison:
    """Two recorded runs, step by step.

    Args:
        reference, layout: the steps of both.
        perturbed: those of the reference that began at other parameters; None compares bit by bit.

    Attributes:
        differences: in the order of the steps, and of what happens in one.
        items: {kind: the comparison of its tensors}.
    """

    reference: Sequence[Step]
    layout: Sequence[Step]
    perturbed: Sequence[Step] | None = None
    differences: list[Difference] = field(default_factory=list)
    items: dict[str, Item] = field(default_factory=dict)
    # Elements of parameters of which a gradient was so small that its sign is that of rounding.
    _undecided: dict[str, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for number in range(min(len(self.reference), len(self.layout))):
            for kind in KINDS:
                self._compare(number, kind)

    def add(self, difference: Difference) -> None:
        """Add a difference that another comparison has shown, before those of later steps and kinds."""
        self.differences.append(difference)
        self.differences.sort(key=lambda each: (each.step, KINDS.index(each.kind)))

    def _compare(self, number: int, kind: str) -> None:
        expected, actual = self.reference[number], self.layout[number]
        names = [name for name in expected if name.startswith(f"{kind}/")]
        if kind == "gradient":
            if actual.keys().isdisjoint(names):
                # Engines and FSDP1 give none.
                return
            # A backward begins with the last module.
            names.reverse()
        # (by how much the perturbation changes a tensor, and that relative to its norm).
        spreads: dict[str, tuple[float, float]] = {}
        if self.perturbed is not None and kind not in EXACT:
            spreads = {name: self._spread(number, name) for name in names}
        relative_spreads = [relative for _, relative in spreads.values()]
        typical = statistics.median(relative_spreads or [0.0])
        # Tensors come from the parameters, and are rounded as they are.
        parameters = [expected[name] for name in expected if name.startswith("parameter/")]
        floor = max(typical, _rounding(*parameters))
        vague = 0.0
        total = 0.0
        for name in names:
            difference = self._difference(number, name, expected[name], actual.get(name))
            if difference is None:
                continue
            item = self.items.setdefault(kind, Item())
            item.tensors += 1
            spread = 0.0
            if name in spreads:
                change, spread = spreads[name]
                rounding = max(floor, _rounding(expected[name], actual.get(name)))
                if expected[name].numel() <= FEW:
                    # Terms that cancel are rounded by more than their sum.
                    rounding *= FACTOR
                tolerance = FACTOR * max(change, rounding * difference.size)
                difference = replace(difference, tolerance=tolerance)
                if kind == "gradient":
                    self._decide(difference, expected[name], actual.get(name))
            total += difference.size**2
            if spread > VAGUE and math.isfinite(difference.error):
                vague += difference.size**2
                item.vague.setdefault(difference.name, spread)
                continue
            item.add(difference, spread)
            if difference.ratio > 1:
                self.differences.append(difference)
        if vague:
            item = self.items[kind]
            item.vague_part = max(item.vague_part, math.sqrt(vague / total))

    def _difference(
        self, number: int, name: str, expected: torch.Tensor, actual: torch.Tensor | None
    ) -> Difference | None:
        """A tensor in both runs, without a tolerance; None for an output that the layout has in another form."""
        kind, _, plain = name.partition("/")
        if actual is not None and actual.shape == expected.shape:
            actual = self._decided(name, actual, expected)
            return Difference(number + 1, kind, plain, norm(actual, expected), 0.0, norm(expected))
        if kind == "output" or (kind == "batch" and actual is None):
            # A layout may split a module, or have it on another rank; ranks may pad batches to other lengths.
            return None
        reason = "the layout has no such tensor"
        if actual is not None:
            reason = f"its shape is {list(actual.shape)}, but {list(expected.shape)} on one process"
        return Difference(number + 1, kind, plain, math.inf, reason=reason)

    def _decide(
        self, gradient: Difference, expected: torch.Tensor, actual: torch.Tensor | None
    ) -> None:
        """Note the elements of a gradient that rounding changes by much of their size, or may change so."""
        limit = gradient.tolerance / max(expected.numel(), 1) ** 0.5
        undecided = expected.abs() <= limit
        has_gradient = expected != 0
        if actual is not None and actual.shape == expected.shape:
            undecided |= (actual - expected).abs() > UNSTEADY * expected.abs()
            has_gradient |= actual != 0
        undecided &= has_gradient
        before = self._undecided.get(gradient.name)
        if before is not None and before.shape == undecided.shape:
            undecided |= before
        self._undecided[gradient.name] = undecided

    def _decided(self, name: str, tensor: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
        """A parameter with equal values where optimizers that divide by the size of a gradient step by its sign."""
        kind, _, plain = name.partition("/")
        undecided = self._undecided.get(plain)
        if kind != "parameter" or undecided is None or undecided.shape != tensor.shape:
            return tensor
        return torch.where(undecided, expected, tensor)

    def _spread(self, number: int, name: str) -> tuple[float, float]:
        """By how much the perturbation changes a tensor, and relative to its norm; of few elements in any step."""
        assert self.perturbed is not None
        size = norm(self.reference[number][name])
        steps = [(self.reference[number], self.perturbed[number])]
        if self.reference[number][name].numel() <= FEW:
            steps = list(zip(self.reference, self.perturbed, strict=False))
        change = spread = 0.0
        for step, moved_step in steps:
            expected, moved = step.get(name), moved_step.get(name)
            if expected is None or moved is None or moved.shape != expected.shape:
                continue
            moved_by = norm(self._decided(name, moved, expected), expected)
            own_size = norm(expected)
            if size and own_size:
                spread = max(spread, moved_by / own_size)
            else:
                change = max(change, moved_by)
        return max(change, spread * size), spread


def _rounding(*tensors: torch.Tensor | None) -> float:
    """The largest rounding of the types of some tensors."""
    rounding = 0.0
    for tensor in tensors:
        if tensor is not None and tensor.is_floating_point():
            rounding = max(rounding, torch.finfo(tensor.dtype).eps)
    return rounding


def read_steps(folder: Path) -> list[Step]:
    """The steps of a recorded run."""
    steps: list[Step] = []
    for number in range(1, 1 << 20):
        path = folder / f"step_{number}.pt"
        if not path.exists():
            break
        steps.append(torch.load(path, map_location="cpu", weights_only=True, mmap=True))
    return steps


def norm(tensor: torch.Tensor, other: torch.Tensor | None = None) -> float:
    """The Euclidean norm of a tensor or of a difference; infinite where an element is not finite in one of both."""
    values = tensor.double()
    if other is not None:
        others = other.double()
        is_equal = tensor == other
        is_equal |= values.isnan() & others.isnan()
        errors = (values - others).masked_fill(is_equal, 0.0)
        values = errors.nan_to_num(nan=torch.inf)
    return float(torch.linalg.vector_norm(values))


def factor_of(actual: torch.Tensor, expected: torch.Tensor) -> float | None:
    """The number by which all elements of `expected` are multiplied; None if there is none."""
    values = actual.double().flatten()
    reference = expected.double().flatten()
    square = float(reference.dot(reference))
    if not square:
        return None
    factor = float(values.dot(reference)) / square
    rest = float(torch.linalg.vector_norm(values - factor * reference))
    if rest > 1e-3 * abs(factor) * square**0.5:
        return None
    return factor
