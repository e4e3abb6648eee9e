# SPDX-License-Identifier: Apache-2.0
"""How the loss of a batch follows from those of its micro-batches: determined from the values, not assumed.

A loss may be a mean over samples, over labels that count, over labels shifted by one, or a sum. Each rule gives
weights for the micro-batches. Those rules hold whose weighted sum is the loss of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...core.trees import first_leaf
from .microbatch import MicroBatches

# Names of inputs with the labels of samples or tokens, and the label that does not count.
_LABELS = ("labels", "label", "targets", "target")
_IGNORED = -100
RULES = ("samples", "sum", "labels", "next labels")

# Relative differences of the loss that micro-batches may cause by computing in another order.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}


def weights_by_rule(inputs: MicroBatches, rules: Sequence[str]) -> dict[str, list[float]]:
    """Rule -> the weight of each micro-batch, for the rules that the inputs allow."""
    found: dict[str, list[float]] = {}
    for rule in rules:
        if rule == "samples":
            found[rule] = [size / inputs.batch_size for size in inputs.sizes]
        elif rule == "sum":
            found[rule] = [1.0] * len(inputs.sizes)
        elif (labels := _labels(inputs)) is not None:
            counts = _counts(labels[:, 1:] if rule == "next labels" and labels.dim() > 1 else labels, inputs)
            total = sum(counts)
            found[rule] = [count / total if total else 0.0 for count in counts]
    return found


def _labels(inputs: MicroBatches) -> torch.Tensor | None:
    given = {**dict(zip(inputs.names, inputs.args, strict=False)), **inputs.kwargs}
    named = next((given[name] for name in _LABELS if given.get(name) is not None), None)
    labels: torch.Tensor | None = first_leaf(named)
    if labels is None or labels.dtype.is_floating_point or not labels.dim() or labels.shape[0] != inputs.batch_size:
        return None
    return labels


def _counts(labels: torch.Tensor, inputs: MicroBatches) -> list[int]:
    # One synchronization with the device for all of them.
    each = (labels != _IGNORED).reshape(inputs.batch_size, -1).sum(dim=1).tolist()
    return [sum(each[start : start + size]) for start, size in zip(inputs.offsets, inputs.sizes, strict=True)]


def are_equal(weights: dict[str, list[float]]) -> bool:
    """Whether all rules give the same weights."""
    rows = list(weights.values())
    return all(abs(a - b) <= 1e-12 for row in rows[1:] for a, b in zip(rows[0], row, strict=True))


def matching_rules(
    batch_loss: torch.Tensor, microbatch_losses: Sequence[torch.Tensor], inputs: MicroBatches, low_precision: bool
) -> list[str]:
    """The rules by which the losses of micro-batches make that of the batch; empty where none does."""
    weights = weights_by_rule(inputs, RULES)
    loss = float(batch_loss.detach())
    values = [float(part.detach()) for part in microbatch_losses]
    residuals = {
        rule: abs(sum(weight * value for weight, value in zip(row, values, strict=True) if weight) - loss)
        for rule, row in weights.items()
    }
    least = min(residuals.values())
    tolerance = 2e-2 if low_precision else _TOLERANCE.get(batch_loss.dtype, 2e-2)
    if not least <= tolerance * max(abs(loss), 1e-3):
        return []
    floor = 64 * torch.finfo(batch_loss.dtype).eps * max(abs(loss), 1e-3)
    return [rule for rule, residual in residuals.items() if residual <= max(8 * least, floor)]
