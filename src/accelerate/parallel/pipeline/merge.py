# SPDX-License-Identifier: Apache-2.0
"""Micro-batches put together again: what blocks gave, and outputs, where they can be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ...core import trees
from ...core.errors import PrepareError
from .stage import Spec, describe, fill, is_spec

# Relative differences that come from computing by parts alone.
_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


def is_divided(tensors: Sequence[torch.Tensor], rows: Sequence[int]) -> bool:
    """Whether each tensor's first dimension is its micro-batch's."""
    return all(tensor.dim() and tensor.shape[0] == count for tensor, count in zip(tensors, rows, strict=True))


def join(values: Sequence[Any], rows: Sequence[int]) -> tuple[Any, list[torch.Tensor], list[bool]]:
    """(description of the whole, its tensors without a graph, whether each is divided) of what a block gave by parts.

    A tensor that is no batch's may stand in the micro-batches alike; no gradient for it is taken.
    """
    columns = list(zip(*(list(trees.leaves(value)) for value in values), strict=True))
    tensors, divided = [], []
    for column in columns:
        alike = is_divided(column, rows)
        divided.append(alike)
        if alike:
            tensors.append(torch.cat([tensor.detach() for tensor in column]))
        elif len({tensor.shape for tensor in column}) == 1:
            tensors.append(column[0].detach())
        else:
            raise no_batch(column[0], rows)
    described = trees.replace_leaves(
        describe(values[0], "the output of a block"),
        [
            Spec(tuple(tensor.shape), tensor.dtype, column[0].requires_grad)
            for tensor, column in zip(tensors, columns, strict=True)
        ],
        is_spec,
    )
    return described, tensors, divided


def no_batch(tensor: torch.Tensor, rows: Sequence[int]) -> PrepareError:
    return PrepareError(
        f"a block gave a tensor of shape {tuple(tensor.shape)} for a micro-batch of {rows[0]} samples: what the "
        "blocks give to the end of the model must have the batch as its first dimension"
    )


def merge(values: Sequence[Any], rows: Sequence[int]) -> Any | None:
    """Outputs of micro-batches as one output of the batch; None where some tensor is not divided."""
    columns = list(zip(*(list(trees.leaves(value)) for value in values), strict=True))
    if not all(is_divided(column, rows) for column in columns):
        return None
    described = describe(values[0], "the model's output")
    return fill(described, [torch.cat([tensor.detach() for tensor in column]) for column in columns])


def is_same(one: Any, other: Any) -> bool:
    """Whether two outputs agree in structure, and in values up to the noise of another order of computing."""
    mine, theirs = list(trees.leaves(one)), list(trees.leaves(other))
    if [(t.shape, t.dtype) for t in mine] != [(t.shape, t.dtype) for t in theirs]:
        return False
    return all(_is_close(a.detach(), b.detach()) for a, b in zip(mine, theirs, strict=True))


def _is_close(one: torch.Tensor, other: torch.Tensor) -> bool:
    tolerance = _TOLERANCE.get(one.dtype)
    if tolerance is None:
        return torch.equal(one, other)
    scale = float(other.abs().nan_to_num(0.0).max()) if other.numel() else 0.0
    return torch.allclose(one, other, rtol=tolerance, atol=tolerance * scale)


def widen(seen: Mapping[int, list[Any]], rows: int, batch: int) -> dict[int, list[Any]]:
    """What units gave for a micro-batch, as they would for the whole batch."""

    def wide(spec: Spec) -> Spec:
        if spec.shape and spec.shape[0] == rows:
            return replace(spec, shape=(batch, *spec.shape[1:]))
        return spec

    return {number: [trees.map_leaves(wide, call, is_spec) for call in calls] for number, calls in seen.items()}


def loss_of(output: Any) -> torch.Tensor | None:
    """The loss in a model's output: what it names so, else the first number that has a gradient; None without one."""
    named = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(named, torch.Tensor):
        return named
    return next((tensor for tensor in trees.leaves(output) if tensor.dim() == 0 and tensor.is_floating_point()), None)
