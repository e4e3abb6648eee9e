# SPDX-License-Identifier: Apache-2.0
"""Gather, reduce and broadcast nested tensors, in one message for each call, and describe their structure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

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
    device = flat.lone_device(leaves)
    channel = transport.channel_for(group, device)
    if channel is not None:
        buffer = gather_buffer.known(leaves, outline, channel)
        if buffer is None and leaves:
            flat.checked(leaves, "gather")
            buffer = gather_buffer.created(leaves, outline, channel)
        if buffer is not None:
            gathered = buffer.gather(leaves, group, data)
            return flat.replace(data, gathered)
        sign = flat.signature_of("gather", leaves, outline)
        channel.agree(group, sign, Call("gather", data))
    if not leaves:
        return data
    leaves = flat.checked(leaves, "gather")
    with Collective(Call("gather", data)):
        gathered = _gather_raw(leaves, group)
    return flat.replace(data, gathered)


def _gather_raw(leaves: list[Tensor], group: dist.ProcessGroup) -> Sequence[Tensor]:
    """The `leaves` of all ranks, joined, in one raw message."""
    device = flat.lone_device(leaves)
    target = transport.carrier(group, device)
    gathered: Sequence[Tensor]
    if len(leaves) == 1:
        gathered = [_gather_one(leaves[0], target, group)]
    else:
        row = flat.pack(leaves, target)
        rows = transport.all_gather(row, group)
        specs = flat.specs_of(leaves)
        gathered = flat.unpack_stacked(rows, specs)
    if target is None:
        return gathered
    return _on_devices_of(leaves, gathered)


def _on_devices_of(leaves: Sequence[Tensor], values: Sequence[Tensor]) -> list[Tensor]:
    moved = []
    for leaf, value in zip(leaves, values, strict=True):
        moved.append(value.to(leaf.device))
    return moved


def _gather_one(leaf: Tensor, target: torch.device | None, group: dist.ProcessGroup) -> Tensor:
    """A single tensor is received in its final memory, without a copy after the message."""
    shape = flat.stacked_shape(leaf.shape, group.size())
    leaf = leaf.detach()
    if leaf.dtype in transport.COMMON and target is None and leaf.dim() and not leaf.is_neg():
        content = leaf.contiguous()
        out = torch.empty(shape, dtype=leaf.dtype, device=leaf.device)
        transport.all_gather_into(out, content, group)
        return out
    content = flat.as_bytes(leaf, target)
    out = torch.empty(shape, dtype=leaf.dtype, device=content.device)
    received = out.view(-1).view(torch.uint8)
    transport.all_gather_into(received, content, group)
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
        TypeError: a value that is not a tensor.
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
        if scale == 1.0:
            return trees.map_leaves(torch.clone, tensor, strict="reduce")
        return trees.map_leaves(lambda leaf: leaf * scale, tensor, strict="reduce")
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
    by_dtype: dict[torch.dtype, list[int]] = {}
    for index, leaf in enumerate(leaves):
        indices = by_dtype.setdefault(leaf.dtype, [])
        indices.append(index)
    reduced: list[Any] = [None] * len(leaves)
    for indices in by_dtype.values():
        of_dtype = [leaves[index] for index in indices]
        values = _reduce_one_dtype(of_dtype, reduction, scale, group, sign, call)
        for index, value in zip(indices, values, strict=True):
            reduced[index] = value
    return flat.replace(data, reduced)


def _leaves(call: Call, group: dist.ProcessGroup, *facts: object) -> tuple[list[Tensor], bytes]:
    """The tensors of a call, and what must be the same on every rank; without tensors the ranks compare it now."""
    if PartialState().debug:
        verify.agree(call.operation, call.data, group, options=call.options)
    outline: list[Any] = []
    leaves = flat.tensors_in(call.data, call.operation, outline)
    leaves = flat.checked(leaves, call.operation)
    sign = flat.signature_of(call.operation, leaves, outline, *facts)
    if leaves:
        return leaves, sign
    channel = transport.channel_for(group, None)
    if channel is not None:
        channel.agree(group, sign, call)
    return leaves, sign


def _reduce_one_dtype(
    leaves: Sequence[Tensor],
    reduction: str,
    scale: float,
    group: dist.ProcessGroup,
    sign: bytes,
    call: Call,
) -> Sequence[Tensor]:
    """Tensors of one dtype, reduced in one message."""
    device = flat.lone_device(leaves)
    target = transport.carrier(group, device)
    sent = leaves
    if target is not None:
        sent = [leaf.to(target) for leaf in leaves]
    total = flat.join(sent)
    operation = getattr(dist.ReduceOp, REDUCTIONS[reduction])
    # Autograd does not record the message: the result keeps this rank's graph.
    transport.checked_all_reduce(total.detach(), operation, group, sign, call)
    if reduction == "mean":
        total.div_(group.size())
    if scale != 1.0:
        total.mul_(scale)
    values = flat.part(total, leaves)
    if target is None:
        return values
    return _on_devices_of(leaves, values)


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

    Example:
        seed = broadcast(torch.randint(0, 2**31, (1,), device=accelerator.device))  # that of rank 0
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
    device = flat.lone_device(leaves)
    target = transport.carrier(group, device)
    row = flat.pack(leaves, target)
    transport.checked_broadcast(row, source, group, sign, call)
    # The row of a lone contiguous tensor is its own memory: it is received where it stays.
    stays = row.data_ptr() == leaves[0].data_ptr()
    if stays or group.rank() == source:
        return data
    specs = flat.specs_of(leaves)
    values = flat.unpack(row, specs)
    for leaf, value in zip(leaves, values, strict=True):
        leaf.detach().copy_(value)
    return data


def avg_losses_across_data_parallel_group(losses: Sequence[Tensor]) -> Tensor:
    """Average losses over the ranks. A collective.

    Ranks that share one replica of the model have the same losses, so this is the mean over the data-parallel group.

    Args:
        losses: tensors of one element each.

    Returns:
        The means, of shape `[len(losses)]`, without gradients.
    """
    rows = [loss.detach().reshape(1) for loss in losses]
    averaged: Tensor = reduce(torch.cat(rows), "mean")
    return averaged


def copy_tensor_to_devices(tensor: Tensor | None = None) -> Tensor:
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
    if not state.use_distributed:
        return tensor
    group = transport.group_of(None)
    target = transport.carrier(group, tensor.device)
    row = flat.pack([tensor], target)
    call = Call("copy_tensor_to_devices", tensor)
    sign = signature(call.operation, owner)
    transport.checked_broadcast(row, owner, group, sign, call)
    specs = flat.specs_of([tensor])
    (tensor,) = flat.unpack(row, specs)
    return tensor.to(state.device)


def gather_tensor_shape(tensor: Tensor | None) -> tuple[Tensor, int]:
    """Send the shape and dtype of one rank's tensor to every rank.

    Args:
        tensor: the tensor on one rank, None on the others.

    Returns:
        The sizes as an int32 tensor of shape `[dimensions, 1]`, and the number of the dtype in `TENSOR_INT_TO_DTYPE`.

    Raises:
        ValueError: on every rank, if not exactly one rank passed a tensor.
        KeyError: its dtype does not have a number.
    """
    _, info = _only_tensor(tensor, "gather_tensor_shape")
    sizes = torch.tensor(info.shape, dtype=torch.int32, device=PartialState().device)
    return sizes.unsqueeze(1), TENSOR_TYPE_TO_INT[info.dtype]


def _only_tensor(tensor: Tensor | None, operation: str) -> tuple[int, TensorInformation]:
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
    owners = {rank: info for rank, info in enumerate(infos) if info is not None}
    if len(owners) != 1:
        raise ValueError(
            f"{operation}: exactly one rank must pass a tensor; ranks {list(owners)} did"
        )
    (owner,) = owners.items()
    return owner


@dataclass
class TensorInformation:
    """A tensor's shape and dtype, as a placeholder in nested data."""

    shape: torch.Size
    dtype: torch.dtype


def is_tensor_information(tensor_info: object) -> bool:
    """Whether `tensor_info` stands for a tensor."""
    return isinstance(tensor_info, TensorInformation)


def get_data_structure(data: object) -> Any:
    """Replace every tensor in nested `data` with a `TensorInformation`."""

    def describe(tensor: Tensor) -> TensorInformation:
        return TensorInformation(shape=tensor.shape, dtype=tensor.dtype)

    return trees.map_leaves(describe, data)


def initialize_tensors(data_structure: object) -> Any:
    """The inverse of `get_data_structure`: replace every `TensorInformation` with an uninitialized tensor."""

    def create(info: TensorInformation) -> Tensor:
        return torch.empty(info.shape, dtype=info.dtype)

    return trees.map_leaves(create, data_structure, is_tensor_information)
