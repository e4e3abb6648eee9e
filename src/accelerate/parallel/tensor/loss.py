# SPDX-License-Identifier: Apache-2.0
"""The cross entropy of logits that are sharded over the vocabulary: each rank computes its own classes.

DTensor would gather the logits on every rank, and refuses labels that are plain tensors. torch's `loss_parallel`
solves both inside of a context, in which the gradient of a log-softmax is wrong unless a cross entropy follows. Here
each operation is exact by itself, so it can replace DTensor's as long as a model needs it.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn
from torch._ops import OpOverload
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

P = ParamSpec("P")
T = TypeVar("T")
# What DTensor calls instead of an operation, with its arguments.
Handler = Callable[[OpOverload, tuple[Any, ...], Mapping[str, Any]], object]

aten = torch.ops.aten
collectives = torch.ops._c10d_functional
_NONE, _MEAN, _SUM = range(3)  # torch's numbers of reductions


def split_losses_while_alive(model: nn.Module) -> None:
    """Compute cross entropies of sharded logits on the shards, as long as the model lives."""
    _models.add(model)
    ensure()
    # The last of them restores DTensor.
    weakref.finalize(model, _remove_when_unneeded).atexit = False


_models: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def _table() -> dict[OpOverload, Handler]:
    return DTensor._op_dispatcher._custom_op_handlers  # type: ignore[return-value]


def ensure() -> None:
    """Register the operations: torch's `loss_parallel` block removes them at its end."""
    if _models:
        _table().update(_OPERATIONS)


def _remove_when_unneeded() -> None:
    # While a model is finalized, the length of the set still counts it.
    if list(_models):
        return
    table = _table()
    for operation, handler in _OPERATIONS.items():
        if table.get(operation) is handler:
            del table[operation]


def _handles(logits: object, dimension: int) -> bool:
    """Whether a tensor is sharded over its classes, and over nothing else."""
    if not isinstance(logits, DTensor) or logits.device_mesh.ndim != 1:
        return False
    return logits.placements[0] == Shard(dimension % logits.ndim)


def _or_else(split_of: Callable[..., tuple[object, int]]) -> Callable[[Callable[..., object]], Handler]:
    """A handler for sharded logits; `split_of(arguments)` is (logits, dimension of classes). DTensor does the rest."""

    def decorate(function: Callable[..., object]) -> Handler:
        @functools.wraps(function)
        def handler(operation: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> object:
            if _handles(*split_of(*args)):
                return function(*args, **kwargs)
            table = _table()
            ours = table.pop(operation)
            try:
                return operation(*args, **kwargs)
            finally:
                table[operation] = ours

        return handler

    return decorate


def _reduce(local: torch.Tensor, like: DTensor, how: str = "sum") -> torch.Tensor:
    group = like.device_mesh.get_group().group_name
    total: torch.Tensor = collectives.wait_tensor(collectives.all_reduce(local.contiguous(), how, group))
    return total


def _from_local(local: torch.Tensor, like: DTensor, placement: Placement) -> DTensor:
    return DTensor.from_local(local, like.device_mesh, (placement,), run_check=False)


def _in_placement(value: torch.Tensor, placement: Placement) -> torch.Tensor:
    """The local tensor of a value in a placement; a plain tensor is returned as it is."""
    if not isinstance(value, DTensor):
        return value
    return value.redistribute(placements=(placement,)).to_local()


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums over the classes."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


@_or_else(lambda logits, dimension, *_: (logits, dimension))
def _log_softmax(logits: DTensor, dimension: int, half_to_float: bool) -> DTensor:
    local = logits.to_local()
    wide = local.to(_wide(local.dtype))
    wide = wide - _reduce(wide.amax(dimension, keepdim=True), logits, "max")
    wide = wide - _reduce(wide.exp().sum(dimension, keepdim=True), logits).log()
    result = wide if half_to_float else wide.to(local.dtype)
    return _from_local(result, logits, logits.placements[0])


@_or_else(lambda gradient, output, dimension, dtype: (output, dimension))
def _log_softmax_backward(gradient: torch.Tensor, output: DTensor, dimension: int, dtype: torch.dtype) -> DTensor:
    wide = _in_placement(gradient, output.placements[0]).to(_wide(output.dtype))
    total = _reduce(wide.sum(dimension, keepdim=True), output)
    local = wide - output.to_local().to(wide.dtype).exp() * total
    return _from_local(local.to(dtype), output, output.placements[0])


def _classes(scores: DTensor) -> int:
    return 1 if scores.ndim > 1 else 0


def _own(scores: DTensor, labels: torch.Tensor, ignored: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(labels as indices of own classes, which of them are own, which count), with a dimension for the classes."""
    dimension = _classes(scores)
    labels = labels.unsqueeze(dimension)
    counts = labels != ignored
    total, here = scores.shape[dimension], scores.to_local().shape[dimension]
    inside = (labels >= 0) & (labels < total)
    torch._assert_async((inside | ~counts).all(), f"cross_entropy: a label is none of the {total} classes")
    first = scores.device_mesh.get_local_rank() * here
    numbers = labels - first
    own = counts & (numbers >= 0) & (numbers < here)
    return torch.where(own, numbers, 0), own, counts


def _weights(
    weight: torch.Tensor | None, labels: torch.Tensor, counts: torch.Tensor, like: torch.Tensor, dimension: int
) -> torch.Tensor:
    """The weight of each label."""
    if weight is None:
        return counts.to(like.dtype)
    of_labels = _in_placement(weight, Replicate())[torch.where(counts, labels.unsqueeze(dimension), 0)]
    return torch.where(counts, of_labels, 0)


@_or_else(lambda scores, *_: (scores, _classes(scores)))
def _nll(
    scores: DTensor, labels: torch.Tensor, weight: torch.Tensor | None, reduction: int, ignored: int
) -> tuple[DTensor, DTensor]:
    local, labels, dimension = scores.to_local(), _in_placement(labels, Replicate()), _classes(scores)
    numbers, own, counts = _own(scores, labels, ignored)
    found = _reduce(torch.where(own, local.gather(dimension, numbers), 0), scores)
    weights = _weights(weight, labels, counts, local, dimension)
    losses = (-found * weights).squeeze(dimension)
    total = weights.sum() if reduction != _NONE or scores.ndim == 1 else local.new_zeros(())
    if reduction == _SUM or (reduction == _NONE and scores.ndim == 1):
        losses = losses.sum()
    elif reduction == _MEAN:
        losses = losses.sum() / total
    return _from_local(losses, scores, Replicate()), _from_local(total, scores, Replicate())


@_or_else(lambda gradient, scores, *_: (scores, _classes(scores)))
def _nll_backward(
    gradient: torch.Tensor,
    scores: DTensor,
    labels: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: int,
    ignored: int,
    total: torch.Tensor,
) -> DTensor:
    local, labels, dimension = scores.to_local(), _in_placement(labels, Replicate()), _classes(scores)
    numbers, own, counts = _own(scores, labels, ignored)
    each = _in_placement(gradient, Replicate())
    if reduction == _MEAN:
        each = each / _in_placement(total, Replicate())
    elif each.ndim:
        each = each.unsqueeze(dimension)
    each = torch.where(own, -each * _weights(weight, labels, counts, local, dimension), 0)
    return _from_local(torch.zeros_like(local).scatter(dimension, numbers, each), scores, scores.placements[0])


_OPERATIONS: dict[OpOverload, Handler] = {
    aten._log_softmax.default: _log_softmax,
    aten._log_softmax_backward_data.default: _log_softmax_backward,
    aten.nll_loss_forward.default: _nll,
    aten.nll_loss_backward.default: _nll_backward,
    aten.nll_loss2d_forward.default: _nll,
    aten.nll_loss2d_backward.default: _nll_backward,
}
