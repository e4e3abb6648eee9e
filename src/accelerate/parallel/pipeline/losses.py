# SPDX-License-Identifier: Apache-2.0
"""How the loss of a batch follows from those of its micro-batches: found out from the numbers, not assumed.

A loss may be a mean over samples, over labels that count, over labels shifted by one, or a sum. A rule gives weights
for the micro-batches; the rules that give the loss of the whole batch, where they differ, are the ones that hold.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...core.trees import first_leaf
from .inputs import Inputs

# What an input is called that says what each sample, or token, should have been; and its value that counts nothing.
_LABELS = ("labels", "label", "targets", "target")
_IGNORED = -100
RULES = ("samples", "sum", "labels", "next labels")

# Relative differences between a batch's loss and its parts' that come from computing by parts alone.
_NOISE = {torch.float64: 1e-9, torch.float32: 1e-4}


def weights_by_rule(inputs: Inputs, rules: Sequence[str]) -> dict[str, list[float]]:
    """Rule -> the weight of each micro-batch, for those of the rules that the inputs allow."""
    found: dict[str, list[float]] = {}
    for rule in rules:
        if rule == "samples":
            found[rule] = [rows / inputs.batch for rows in inputs.rows]
        elif rule == "sum":
            found[rule] = [1.0] * len(inputs.rows)
        elif (labels := _labels(inputs)) is not None:
            counts = _counts(labels[:, 1:] if rule == "next labels" and labels.dim() > 1 else labels, inputs)
            total = sum(counts)
            found[rule] = [count / total if total else 0.0 for count in counts]
    return found


def _labels(inputs: Inputs) -> torch.Tensor | None:
    given = {**dict(zip(inputs.names, inputs.args, strict=False)), **inputs.kwargs}
    named = next((given[name] for name in _LABELS if given.get(name) is not None), None)
    labels = first_leaf(named)
    if labels is None or labels.dtype.is_floating_point or not labels.dim() or labels.shape[0] != inputs.batch:
        return None
    return labels


def _counts(labels: torch.Tensor, inputs: Inputs) -> list[int]:
    # One message to the host for all of them.
    each = (labels != _IGNORED).reshape(inputs.batch, -1).sum(dim=1).tolist()
    return [sum(each[start : start + rows]) for start, rows in zip(inputs.starts, inputs.rows, strict=True)]


def are_equal(weights: dict[str, list[float]]) -> bool:
    """Whether all rules give the same weights."""
    rows = list(weights.values())
    return all(abs(a - b) <= 1e-12 for row in rows[1:] for a, b in zip(rows[0], row, strict=True))


def holding(whole: torch.Tensor, parts: Sequence[torch.Tensor], inputs: Inputs, lowered: bool) -> list[str]:
    """The rules by which the losses of the parts make the loss of the whole; none where it is something else."""
    weights = weights_by_rule(inputs, RULES)
    loss = float(whole.detach())
    values = [float(part.detach()) for part in parts]
    residuals = {
        rule: abs(sum(weight * value for weight, value in zip(row, values, strict=True) if weight) - loss)
        for rule, row in weights.items()
    }
    least = min(residuals.values())
    noise = 2e-2 if lowered else _NOISE.get(whole.dtype, 2e-2)
    if not least <= noise * max(abs(loss), 1e-3):
        return []
    floor = 64 * torch.finfo(whole.dtype).eps * max(abs(loss), 1e-3)
    return [rule for rule, residual in residuals.items() if residual <= max(8 * least, floor)]
