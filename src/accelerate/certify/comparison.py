# SPDX-License-Identifier: Apache-2.0
"""The comparison of two recorded runs, with the tolerance that a third one measures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
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
        factor: the number by which all of it is multiplied; None if there is none.
        reason: why no norm can be told, such as another shape.
    """

    step: int
    kind: str
    name: str
    error: float = 0.0
    tolerance: float = 0.0
    size: float = 0.0
    factor: float | None = None
    reason: str = ""


def read_steps(folder: Path) -> list[Step]:
    """The steps of a recorded run."""
    steps = []
    while (path := folder / f"step_{len(steps) + 1}.pt").exists():
        steps.append(torch.load(path, map_location="cpu", weights_only=True))
    return steps


def differences(reference: Path, perturbed: Path, layout: Path) -> Iterator[Difference]:
    """What differs, in the order of the steps and of what happens in one."""
    runs = zip(read_steps(reference), read_steps(perturbed), read_steps(layout), strict=False)
    for number, (expected, moved, actual) in enumerate(runs, start=1):
        for kind in KINDS:
            names = [name for name in expected if name.startswith(f"{kind}/")]
            if kind == "gradient":
                # The last module's come first.
                names.reverse()
            for name in names:
                difference = _difference(number, kind, name, expected, moved, actual)
                if difference is not None:
                    yield difference


def _difference(
    number: int, kind: str, name: str, expected: Step, moved: Step, actual: Step
) -> Difference | None:
    plain = name.partition("/")[2]
    reference = expected[name]
    if name not in actual:
        if kind == "output":
            # A split module, or one of another stage.
            return None
        return Difference(number, kind, plain, reason="the layout has no such tensor")
    value = actual[name]
    if value.shape != reference.shape:
        if kind == "output":
            return None
        return Difference(number, kind, plain, reason=f"{list(value.shape)} in place of {list(reference.shape)}")
    error = _norm(value, reference)
    size = _norm(reference)
    other = moved.get(name)
    spread = 0.0
    if other is not None and other.shape == reference.shape:
        spread = _norm(other, reference)
    precision = torch.finfo(reference.dtype).eps if reference.is_floating_point() else 0.0
    tolerance = FACTOR * max(spread, precision * size)
    if kind == "batch":
        tolerance = 0.0
    if error <= tolerance:
        return None
    return Difference(number, kind, plain, error, tolerance, size, _factor(value, reference))


def _norm(tensor: torch.Tensor, other: torch.Tensor | None = None) -> float:
    values = tensor.double()
    if other is not None:
        values = values - other.double()
    # A value that is not finite differs from each other.
    return float(torch.linalg.vector_norm(values.nan_to_num(nan=torch.inf)))


def _factor(value: torch.Tensor, reference: torch.Tensor) -> float | None:
    flat, expected = value.double().flatten(), reference.double().flatten()
    size = float(expected.dot(expected))
    if not size:
        return None
    factor = float(flat.dot(expected)) / size
    rest = float(torch.linalg.vector_norm(flat - factor * expected))
    if rest > 1e-3 * abs(factor) * size**0.5:
        return None
    return factor
