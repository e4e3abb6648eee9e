# SPDX-License-Identifier: Apache-2.0
"""The comparison of two recorded runs, with the tolerance that a third one measures."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from pathlib import Path

import torch

from .recording import KINDS

# A difference counts from so many times that of a run whose parameters began one unit in the last place away.
FACTOR = 8.0

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


@dataclass
class Comparison:
    """Two recorded runs, step by step.

    Args:
        reference, layout: the steps of both.
        perturbed: those of the reference that began at other parameters; None compares bit by bit.

    Attributes:
        differences: in the order of the steps, and of what happens in one.
        compared: {kind: number of tensors}.
    """

    reference: list[Step]
    layout: list[Step]
    perturbed: list[Step] | None = None
    differences: list[Difference] = field(default_factory=list)
    compared: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for number in range(min(len(self.reference), len(self.layout))):
            for kind in KINDS:
                self._compare(number, kind)

    def _compare(self, number: int, kind: str) -> None:
        expected, actual = self.reference[number], self.layout[number]
        names = [name for name in expected if name.startswith(f"{kind}/")]
        if kind == "gradient":
            # A backward begins with the last module.
            names.reverse()
        spreads = self._spreads(number, names)
        typical = statistics.median(spreads.values()) if spreads else 0.0
        for name in names:
            difference = self._difference(
                number,
                kind,
                name,
                expected[name],
                actual.get(name),
                max(spreads.get(name, 0.0), typical),
            )
            if difference is not None:
                self.differences.append(difference)

    def _spreads(self, number: int, names: list[str]) -> dict[str, float]:
        """By how much each tensor differs in the perturbed run, relative to its norm."""
        spreads: dict[str, float] = {}
        if self.perturbed is None:
            return spreads
        expected, moved = self.reference[number], self.perturbed[number]
        for name in names:
            size = norm(expected[name])
            if name in moved and moved[name].shape == expected[name].shape and size:
                spreads[name] = norm(moved[name], expected[name]) / size
        return spreads

    def _difference(
        self,
        number: int,
        kind: str,
        name: str,
        expected: torch.Tensor,
        actual: torch.Tensor | None,
        spread: float,
    ) -> Difference | None:
        step, plain = number + 1, name.partition("/")[2]
        if actual is None or actual.shape != expected.shape:
            if kind == "output":
                # A layout may split a module, or have it on another rank.
                return None
            reason = "the layout has no such tensor"
            if actual is not None:
                reason = (
                    f"its shape is {list(actual.shape)}, and {list(expected.shape)} on one process"
                )
            return Difference(step, kind, plain, reason=reason)
        self.compared[kind] = self.compared.get(kind, 0) + 1
        error, size = norm(actual, expected), norm(expected)
        tolerance = 0.0
        if self.perturbed is not None and kind != "batch":
            if expected.is_floating_point():
                spread = max(spread, torch.finfo(expected.dtype).eps)
            tolerance = FACTOR * spread * size
            moved = self.perturbed[number].get(name)
            if not size and moved is not None and moved.shape == expected.shape:
                tolerance = FACTOR * norm(moved)
        if error <= tolerance:
            return None
        return Difference(step, kind, plain, error, tolerance, size)


def read_steps(folder: Path) -> list[Step]:
    """The steps of a recorded run."""
    steps: list[Step] = []
    for number in range(1, 1 << 20):
        path = folder / f"step_{number}.pt"
        if not path.exists():
            break
        steps.append(torch.load(path, map_location="cpu", weights_only=True))
    return steps


def norm(tensor: torch.Tensor, other: torch.Tensor | None = None) -> float:
    """The Euclidean norm of a tensor or of a difference; infinite where an element is not finite in one of both."""
    values = tensor.double()
    if other is None:
        return float(torch.linalg.vector_norm(values))
    both = torch.isnan(values) & torch.isnan(other.double())
    difference = (values - other.double()).masked_fill(both | (tensor == other), 0.0)
    return float(torch.linalg.vector_norm(difference.nan_to_num(nan=torch.inf)))


def factor_of(actual: torch.Tensor, expected: torch.Tensor) -> float | None:
    """The number by which all elements of `expected` are multiplied; None if there is none."""
    flat, reference = actual.double().flatten(), expected.double().flatten()
    size = float(reference.dot(reference))
    if not size:
        return None
    factor = float(flat.dot(reference)) / size
    rest = float(torch.linalg.vector_norm(flat - factor * reference))
    if rest > 1e-3 * abs(factor) * size**0.5:
        return None
    return factor
