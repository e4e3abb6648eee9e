# SPDX-License-Identifier: Apache-2.0
"""Collectives on one flat tensor, plain and checked, and the device of a message. All other modules send here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..core.errors import ConfigurationError
from ..runtime.calls import Call
from ..runtime.channel import HEADER, Channel, backends_of, channel_of
from ..runtime.communication import Collective
from ..state import PartialState

CPU = torch.device("cpu")

# On gloo, an all-to-all of as many copies as there are ranks takes half the time of an all-gather between two ranks,
# and a quarter among eight, up to about this many bytes in all: its messages do not wait for each other.
SPREAD_BYTES = 4 << 20

# `all_gather_into_tensor` is the older name of the same function. A torch without torch.distributed has neither.
all_gather_single: Any = getattr(dist, "all_gather_single", None)
if all_gather_single is None:
    all_gather_single = getattr(dist, "all_gather_into_tensor", None)

# Dtypes that every backend sends and reduces.
COMMON = frozenset(
    {
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int8,
        torch.uint8,
    }
)


def group_of(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """`group`, or the default one of the run. Raises ConfigurationError where this process has left it."""
    group = group or dist.group.WORLD
    if group is None:
        raise ConfigurationError(
            "this process left the process group of its run (by end_training() or "
            "destroy_process_group()): communicate before that"
        )
    return group


def check_source(operation: str, from_process: int, world: int) -> None:
    """Raise ConfigurationError unless `from_process` is a rank."""
    if not 0 <= from_process < world:
        raise ConfigurationError(
            f"{operation}: from_process={from_process} is not a rank of this run: ranks are 0 to {world - 1}"
        )


def carrier(group: dist.ProcessGroup, shared: torch.device | None) -> torch.device | None:
    """The device to which tensors must move before `group` can send them; None where they can stay.

    `shared` is the device that they share, None where they are on several.
    """
    devices = backends_of(group)
    if shared is not None and shared.type in devices:
        return None
    device = PartialState().device
    if device.type in devices:
        return device
    return torch.device(min(devices))


def home(group: dist.ProcessGroup) -> torch.device:
    """The device on which `group` sends what has no device (sizes, pickled objects)."""
    # A group of several backends (cpu:gloo,cuda:nccl) sends from the host without a copy.
    return carrier(group, CPU) or CPU


def all_gather(row: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Every rank's `row` (one-dimensional, equally long), stacked: shape `[ranks, length]`."""
    world = group.size()
    rows = torch.empty(world * row.shape[0], dtype=row.dtype, device=row.device)
    all_gather_into(rows, row, group)
    return rows.view(world, row.shape[0])


def all_gather_into(out: Tensor, tensor: Tensor, group: dist.ProcessGroup) -> None:
    """Fill `out` with every rank's `tensor`, in rank order; both are contiguous and have dimensions."""
    if not tensor.numel():
        return
    channel = channel_of(group)
    ranks = group.size()
    if channel is not None and tensor.is_cpu and tensor.nbytes * ranks <= SPREAD_BYTES:
        copies = torch.cat([tensor] * ranks)
        work = _begin_exchange(out, copies, group)
        channel.finish(work)
    else:
        all_gather_single(out, tensor, group=group)


def exchange(out: Tensor, slices: Tensor, group: dist.ProcessGroup) -> None:
    """Send each rank its slice of `slices`, and fill `out` with those received. All have the same size."""
    work = _begin_exchange(out, slices, group)
    work.wait()


def _begin_exchange(out: Tensor, slices: Tensor, group: dist.ProcessGroup) -> dist.Work:
    options = dist.distributed_c10d.AllToAllOptions()
    return group.alltoall_base(out, slices, [], [], options)


def broadcast(row: Tensor, source: int, group: dist.ProcessGroup) -> None:
    """Overwrite `row` with the one of rank `source` (its number within `group`)."""
    if row.numel():
        dist.broadcast(row, group=group, group_src=source)


def all_reduce(flat: Tensor, operation: object, group: dist.ProcessGroup) -> None:
    """Reduce `flat` in place over the ranks."""
    if flat.numel():
        dist.all_reduce(flat, op=operation, group=group)


def all_gather_numbers(
    numbers: Sequence[int],
    group: dist.ProcessGroup,
    sign: bytes,
    call: Call,
) -> list[list[int]]:
    """Every rank's list of integers (equally many on each)."""
    row = torch.tensor(numbers, dtype=torch.int64, device=home(group))
    rows = checked_all_gather(row.view(torch.uint8), group, sign, call)
    numbers_of_ranks: list[list[int]] = rows.contiguous().view(torch.int64).tolist()
    return numbers_of_ranks


# -- checked: on gloo the ranks compare headers first (`sign`: what must be the same); `call` is for the message.


def channel_for(group: dist.ProcessGroup, device: torch.device | None) -> Channel | None:
    """The channel in which ranks with tensors on `device` (None: on several) check their calls, if they can."""
    channel = channel_of(group)
    if channel is None or channel.serves_all:
        return channel
    if device is not None and device.type == "cpu":
        return channel
    return None


def checked_all_gather(
    row: Tensor,
    group: dist.ProcessGroup,
    sign: bytes,
    call: Call,
) -> Tensor:
    """`all_gather` of bytes. The result may be overwritten by the next message of the group."""
    channel = channel_for(group, row.device)
    if channel is not None:
        length = row.shape[0]
        if length <= channel.capacity:
            content = row.cpu().numpy()
            channel.swap_bytes(group, sign, content, length, call)
            rows = channel.rows(length)
            return rows.to(row.device)
        channel.agree(group, sign, call)
    with Collective(call):
        return all_gather(row, group)


def checked_broadcast(
    row: Tensor,
    source: int,
    group: dist.ProcessGroup,
    sign: bytes,
    call: Call,
) -> None:
    """`broadcast` of bytes."""
    channel = channel_for(group, row.device)
    if channel is not None:
        length = row.shape[0]
        if length <= channel.capacity:
            if group.rank() == source:
                content = row.detach().cpu().numpy()
                channel.swap_bytes(group, sign, content, length, call)
                return
            channel.swap_bytes(group, sign, b"", 0, call)
            received = channel.slots[source, HEADER : HEADER + length]
            row.detach().copy_(received)
            return
        channel.agree(group, sign, call)
    with Collective(call):
        broadcast(row, source, group)


def checked_all_reduce(
    flat: Tensor,
    operation: object,
    group: dist.ProcessGroup,
    sign: bytes,
    call: Call,
) -> None:
    """Reduce a flat contiguous tensor in place."""
    channel = channel_for(group, flat.device)
    if channel is not None:
        if flat.nbytes <= channel.capacity and flat.dtype in COMMON:
            content = flat.cpu().view(torch.uint8)
            channel.swap_bytes(group, sign, content.numpy(), flat.nbytes, call)
            if not flat.numel():
                return
            rows = channel.rows(flat.nbytes).view(flat.dtype)
            if operation == dist.ReduceOp.SUM:
                reduced = torch.sum(rows, 0, dtype=rows.dtype)
            elif operation == dist.ReduceOp.MAX:
                reduced = torch.amax(rows, 0)
            else:
                reduced = torch.amin(rows, 0)
            flat.copy_(reduced)
            return
        channel.agree(group, sign, call)
    with Collective(call):
        all_reduce(flat, operation, group)
