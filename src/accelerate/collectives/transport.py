# SPDX-License-Identifier: Apache-2.0
"""The raw collectives on one flat tensor, and the device a message travels on. All files here send through this."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_group

from ..core.errors import ConfigurationError
from ..state import PartialState

# The name since torch 2.13; torch 2.11 and 2.12 have the older one.
_all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def group_of(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """`group`, or the default one of the run."""
    return _get_default_group() if group is None else group


def check_source(operation: str, from_process: int, world: int) -> None:
    if not 0 <= from_process < world:
        raise ConfigurationError(
            f"{operation}: from_process={from_process} is no rank of this run: ranks are 0 to {world - 1}"
        )


def carrier(group: dist.ProcessGroup, found: torch.device | None) -> torch.device | None:
    """The device to which tensors must move before `group` can send them; None where they can stay.

    `found` is the device that they share, None where they are on several.
    """
    kinds = [device.type for device in group._device_types]
    if found is not None and found.type in kinds:
        return None
    own = PartialState().device
    return own if own.type in kinds else torch.device(kinds[0])


def home(group: dist.ProcessGroup) -> torch.device:
    """The device on which `group` sends what was on no device before (sizes, pickled objects)."""
    # A group of several backends (cpu:gloo,cuda:nccl) sends from the host without a copy.
    cpu = torch.device("cpu")
    return carrier(group, cpu) or cpu


def all_gather(row: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Every rank's `row` (one-dimensional, equally long), stacked: shape `[ranks, length]`."""
    world = group.size()
    rows = torch.empty(world * row.shape[0], dtype=row.dtype, device=row.device)
    all_gather_into(rows, row, group)
    return rows.view(world, row.shape[0])


def all_gather_into(out: torch.Tensor, tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Fill `out` with every rank's `tensor`, in rank order. Both are contiguous and have dimensions."""
    if tensor.numel():
        _all_gather_single(out, tensor, group=group)


def broadcast(row: torch.Tensor, source: int, group: dist.ProcessGroup) -> None:
    """Overwrite `row` with the one of rank `source` (its number within `group`)."""
    if row.numel():
        dist.broadcast(row, group=group, group_src=source)


def all_reduce(flat: torch.Tensor, operation: Any, group: dist.ProcessGroup) -> None:
    if flat.numel():
        dist.all_reduce(flat, op=operation, group=group)


def all_gather_numbers(numbers: Sequence[int], group: dist.ProcessGroup) -> list[list[int]]:
    """Every rank's list of whole numbers (equally many on each)."""
    row = torch.tensor(numbers, dtype=torch.int64, device=home(group))
    found: list[list[int]] = all_gather(row, group).tolist()
    return found
