# SPDX-License-Identifier: Apache-2.0
"""Gather, reduce and broadcast nested tensors, in one message for each call, and describe their structure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ..core import trees
from ..core.errors import ConfigurationError
from ..runtime.calls import Call
from ..runtime.channel import signature
from ..runtime.communication import Collective
from ..state import PartialState
from . import flat, gather_buffer, objects, transport, verify

# The names of operations of torch.
REDUCTIONS = {"mean": "SUM", "sum": "SUM", "max": "MAX", "min": "MIN"}

# The numbers of dtypes in what `gather_tensor_shape` returns.
TENSOR_INT_TO_DTYPE = dict(
    enumerate(
        [
            torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.uint8, torch.int8, torch.int16,
            torch.int32, torch.int64, torch.bool,
        ],
        1,
    )
)  # fmt: skip
TENSOR_TYPE_TO_INT = {dtype: number for number, dtype in TENSOR_INT_TO_DTYPE.items()}


def gather(tensor: object) -> Any:
    """Gather nested tensors from all ranks, joined along dimension 0 in rank order.

    All ranks must pass the same structure, shapes and dtypes. `ACCELERATE_DEBUG_MODE=1` verifies it. For different
    sizes see `pad_across_processes`. Gradients do not flow through the result.

    Args:
        tensor: a tensor of shape `[n, ...]`, or nested lists, tuples and mappings of tensors.

    Returns:
        The same structure with tensors of shape `[ranks * n, ...]`, on every rank. A tensor without dimensions
        becomes `[ranks]`. On one process, the data itself.

    Raises:
        TypeError: a value that is not a tensor.

    Example:
        predictions, labels = gather((predictions, labels))
    """
    if PartialState().use_distributed:
        return gather_nested(tensor)
    return tensor


def gather_nested(data: object, group: dist.ProcessGroup | None = None) -> Any:
    """`gather` among the ranks of `group`."""
    if PartialState().debug:
        verify.agree("gather", data, group)
    outline: list[Any] = []
    leaves = flat.tensors_in(data, "gather", outline)
    group = transport.group_of(group)
    channel = transport.channel_for(group, flat.lone_device(leaves))
    if channel is not None:
        path = gather_buffer.known(leaves, outline, channel)
        if path is None and leaves:
            flat.checked(leaves, "gather")
            path = gather_buffer.created(leaves, outline, channel)
        if path is not None:
            return flat.replace(data, path.gather(leaves, group, data))
        channel.agree(group, flat.signature_of("gather", leaves, outline), Call("gather", data))
    if not leaves:
        return data
    leaves = flat.checked(leaves, "gather")
    with Collective(Call("gather", data)):
        return flat.replace(data, _gather_raw(leaves, group))


def _gather_raw(leaves: list[torch.Tensor], group: dist.ProcessGroup) -> Sequence[torch.Tensor]:
    """The `leaves` of all ranks, joined, in one raw message."""
    target = transport.carrier(group, flat.lone_device(leaves))
    if len(leaves) == 1:
        gathered: Sequence[torch.Tensor] = [_gather_one(leaves[0], target, group)]
    else:
        rows = transport.all_gather(flat.pack(leaves, target), group)
        gathered = flat.unpack_stacked(rows, flat.specs_of(leaves))
    if target is not None:
        gathered = [value.to(leaf.device) for value, leaf in zip(gathered, leaves, strict=True)]
    return gathered


def _gather_one(
    leaf: torch.Tensor, target: torch.device | None, group: dist.ProcessGroup
) -> torch.Tensor:
    """A single tensor is received in its final memory, without a copy after the message."""
    shape = flat.stacked_shape(leaf.shape, group.size())
    if leaf.dtype in transport.COMMON and target is None and leaf.dim() and not leaf.is_neg():
        content = leaf.detach().contiguous()
        out = torch.empty(shape, dtype=leaf.dtype, device=leaf.device)
        transport.all_gather_into(out, content, group)
        return out
    content = flat.as_bytes(leaf.detach(), target)
    out = torch.empty(shape, dtype=leaf.dtype, device=content.device)
    transport.all_gather_into(out.view(-1).view(torch.uint8), content, group)
    return out


def reduce(tensor: object, reduction: str = "mean", scale: float = 1.0) -> Any:
    """Reduce nested tensors elementwise over all ranks. The arguments are not changed.

    Args:
        tensor: a tensor, or nested lists, tuples and mappings of tensors.
        reduction: "mean", "sum", "max", "min", or "none", which returns `tensor`.
        scale: a factor for the result.

    Returns:
        The same structure with the reduced tensors, on every rank.

    Raises:
        TypeError: a value that is not a tensor, or a mean or factor of integers.
        ConfigurationError: an unknown reduction.

    Example:
        loss = reduce(loss.detach(), "mean")
    """
    if reduction == "none":
        return tensor
    if reduction not in REDUCTIONS:
        raise ConfigurationError(
            f"reduce: reduction={reduction!r} is unknown: use one of {', '.join(REDUCTIONS)}"
        )
    if not PartialState().use_distributed:
        if scale != 1.0:
            _check_divisible(flat.collect(tensor, "reduce"), "sum")
        return trees.map_leaves(
            lambda leaf: leaf.clone() if scale == 1.0 else leaf * scale, tensor, strict="reduce"
        )
    return reduce_nested(tensor, reduction, scale)


def reduce_nested(
    data: object,
    reduction: str = "mean",
    scale: float = 1.0,
    group: dist.ProcessGroup | None = None,
) -> Any:
    """`reduce` among the ranks of `group`."""
    group = transport.group_of(group)
    call = Call("reduce", data, f"reduction={reduction!r}, scale={scale!r}")
    leaves, sign = _leaves(call, group, reduction, scale)
    if not leaves:
        return data
    if reduction == "mean" or scale != 1.0:
        _check_divisible(leaves, reduction)
    by_dtype: dict[torch.dtype, list[int]] = {}
    for place, leaf in enumerate(leaves):
        by_dtype.setdefault(leaf.dtype, []).append(place)
    reduced: list[Any] = [None] * len(leaves)
    for places in by_dtype.values():
        values = _reduce_one_dtype(
            [leaves[place] for place in places], reduction, scale, group, sign, call
        )
        for place, value in zip(places, values, strict=True):
            reduced[place] = value
    return flat.replace(data, reduced)


def _leaves(
    call: Call, group: dist.ProcessGroup, *facts: object
) -> tuple[list[torch.Tensor], bytes]:
    """The tensors of a call, and what must be the same on every rank; without tensors the ranks compare it now."""
    if PartialState().debug:
        verify.agree(call.operation, call.data, group, options=call.options)
    outline: list[Any] = []
    leaves = flat.checked(flat.tensors_in(call.data, call.operation, outline), call.operation)
    sign = flat.signature_of(call.operation, leaves, outline, *facts)
    if not leaves and (channel := transport.channel_for(group, None)) is not None:
        channel.agree(group, sign, call)
    return leaves, sign


def _check_divisible(leaves: Sequence[torch.Tensor], reduction: str) -> None:
    for leaf in leaves:
        if not (leaf.is_floating_point() or leaf.is_complex()):
            raise TypeError(
                f"reduce: a tensor of {leaf.dtype} cannot hold a {'mean' if reduction == 'mean' else 'scaled value'}: "
                'use reduction="sum" without a scale, or convert it with `.float()`'
            )


def _reduce_one_dtype(
    leaves: Sequence[torch.Tensor],
    reduction: str,
    scale: float,
    group: dist.ProcessGroup,
    sign: bytes,
    call: Call,
) -> Sequence[torch.Tensor]:
    """Tensors of one dtype, reduced in one message."""
    target = transport.carrier(group, flat.lone_device(leaves))
    total = flat.join(leaves if target is None else [leaf.to(target) for leaf in leaves])
    # Autograd does not record the message: the result keeps this rank's graph.
    transport.checked_all_reduce(
        total.detach(), getattr(dist.ReduceOp, REDUCTIONS[reduction]), group, sign, call
    )
    if reduction == "mean":
        total.div_(group.size())
    if scale != 1.0:
        total.mul_(scale)
    values = flat.part(total, leaves)
    if target is None:
        return values
    return [value.to(leaf.device) for value, leaf in zip(values, leaves, strict=True)]


def broadcast(tensor: object, from_process: int = 0) -> Any:
    """Overwrite nested tensors in place with those of one rank.

    All ranks must pass the same structure, shapes and dtypes.

    Args:
        tensor: a tensor, or nested lists, tuples and mappings of tensors.
        from_process: the rank whose values are sent.

    Returns:
        `tensor` itself.

    Raises:
        TypeError: a value that is not a tensor.
        ConfigurationError: there is no rank `from_process`.
    """
    state = PartialState()
    if not state.use_distributed:
        return tensor
    transport.check_source("broadcast", from_process, state.num_processes)
    return broadcast_nested(tensor, from_process)


def broadcast_nested(data: object, source: int = 0, group: dist.ProcessGroup | None = None) -> Any:
    """`broadcast` among the ranks of `group`, from its rank `source`."""
    group = transport.group_of(group)
    call = Call("broadcast", data, f"from_process={source}")
    leaves, sign = _leaves(call, group, source)
    if not leaves:
        return data
    target = transport.carrier(group, flat.lone_device(leaves))
    # The row of a lone contiguous tensor is its own memory: it is received where it stays.
    row = flat.pack(leaves, target)
    transport.checked_broadcast(row, source, group, sign, call)
    if group.rank() != source and row.data_ptr() != leaves[0].data_ptr():
        values = flat.unpack(row, flat.specs_of(leaves))
        for leaf, value in zip(leaves, values, strict=True):
            leaf.detach().copy_(value)
    return data


def avg_losses_across_data_parallel_group(losses: Sequence[torch.Tensor]) -> torch.Tensor:
    """Average losses over the ranks. A collective.

    Ranks that share one replica of the model have the same losses, so this is the mean over the data-parallel group.

    Args:
        losses: tensors of one element each.

    Returns:
        The means, of shape `[len(losses)]`, without gradients.
    """
    averaged: torch.Tensor = reduce(
        torch.cat([loss.detach().reshape(1) for loss in losses]), "mean"
    )
    return averaged


def copy_tensor_to_devices(tensor: torch.Tensor | None = None) -> torch.Tensor:
    """Copy the tensor of one rank to every rank's device. The other ranks do not need to know its shape and dtype.

    Args:
        tensor: the tensor on one rank, None on the others.

    Returns:
        The tensor, on every rank.

    Raises:
        ValueError: on every rank, if not exactly one rank passed a tensor.
    """
    state = PartialState()
    owner, info = _only_tensor(tensor, "copy_tensor_to_devices")
    if tensor is None:
        tensor = initialize_tensors(info)
    tensor = tensor.to(state.device)
    if state.use_distributed:
        group = transport.group_of(None)
        row = flat.pack([tensor], transport.carrier(group, tensor.device))
        call = Call("copy_tensor_to_devices", tensor)
        sign = signature(call.operation, owner)
        transport.checked_broadcast(row, owner, group, sign, call)
        (tensor,) = flat.unpack(row, flat.specs_of([tensor]))
    return tensor.to(state.device)


def gather_tensor_shape(tensor: torch.Tensor | None) -> tuple[torch.Tensor, int]:
    """Send the shape and dtype of one rank's tensor to every rank.

    Args:
        tensor: the tensor on one rank, None on the others.

    Returns:
        The sizes as an int32 tensor of shape `[dimensions, 1]`, and the number of the dtype in `TENSOR_INT_TO_DTYPE`.

    Raises:
        ValueError: on every rank, if not exactly one rank passed a tensor, or its dtype has no number.
    """
    info = _only_tensor(tensor, "gather_tensor_shape")[1]
    if info.dtype not in TENSOR_TYPE_TO_INT:
        raise ValueError(
            f"gather_tensor_shape: {info.dtype} is not one of {list(TENSOR_TYPE_TO_INT)}"
        )
    sizes = torch.tensor(info.shape, dtype=torch.int32, device=PartialState().device)
    return sizes.unsqueeze(1), TENSOR_TYPE_TO_INT[info.dtype]


def _only_tensor(tensor: torch.Tensor | None, operation: str) -> tuple[int, TensorInformation]:
    """The one rank that passed a tensor, and the tensor's shape and dtype. A collective."""
    state = PartialState()
    if state.use_distributed and state.debug:
        verify.agree(operation, None)
    info = None
    if tensor is not None:
        info = TensorInformation(tensor.shape, tensor.dtype)
    infos = [info]
    if state.use_distributed:
        infos = objects.gather_each(info, operation=operation)
    owners = [(rank, info) for rank, info in enumerate(infos) if info is not None]
    if len(owners) != 1:
        raise ValueError(
            f"{operation}: exactly one rank must pass a tensor; ranks {[rank for rank, _ in owners]} did"
        )
    return owners[0]


@dataclass
class TensorInformation:
    """A tensor's shape and dtype, standing for it in a nested value."""

    shape: torch.Size
    dtype: torch.dtype


def is_tensor_information(tensor_info: object) -> bool:
    """Whether `tensor_info` stands for a tensor."""
    return isinstance(tensor_info, TensorInformation)


def get_data_structure(data: object) -> Any:
    """Nested `data` with a `TensorInformation` in place of every tensor."""
    return trees.map_leaves(
        lambda tensor: TensorInformation(shape=tensor.shape, dtype=tensor.dtype), data
    )


def initialize_tensors(data_structure: object) -> Any:
    """The inverse of `get_data_structure`: uninitialised tensors in place of every `TensorInformation`."""
    return trees.map_leaves(
        lambda info: torch.empty(info.shape, dtype=info.dtype),
        data_structure,
        is_tensor_information,
    )
