# SPDX-License-Identifier: Apache-2.0
"""Gathering rows of which each rank has another number: exactly the real rows, in rank order, none twice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..core.errors import ConfigurationError
from ..runtime.calls import Call
from ..runtime.channel import signature
from ..state import PartialState
from . import flat, objects, transport, verify

OPERATION = "gather_for_metrics"


def gather_counted(
    data: object, counts: Sequence[int], group: dist.ProcessGroup | None = None
) -> Any:
    """Gather the first `counts[r]` rows of each rank `r`, joined along dimension 0 in rank order, in one message.

    Args:
        data: nested tensors. A tensor without dimensions is one row of each rank whose count is not 0.
        counts: the rows of each rank, the same list on every rank. Rows beyond the count are not sent.
        group: the ranks; None for all.

    Returns:
        The same structure with the joined tensors. On one process, its first rows.

    Raises:
        TypeError: a value that is not a tensor.
        ConfigurationError: a tensor has fewer rows than its rank's count.
    """
    call = Call(OPERATION, data, f"counts={tuple(counts)}", 0)
    distributed, rank = _begin(call, counts, group)
    outline: list[Any] = []
    leaves = flat.tensors_in(data, OPERATION, outline)
    leaves = flat.checked(leaves, OPERATION)
    if not leaves:
        return data
    count = counts[rank]
    mine = [_first_rows(leaf, count, rank) for leaf in leaves]
    if not distributed:
        return flat.replace(data, mine)
    rows = []
    for count in counts:
        sizes = []
        for leaf in leaves:
            if leaf.dim():
                sizes.append(count)
            else:
                sizes.append(min(count, 1))
        rows.append(sizes)
    # The same on every rank: dtypes, and shapes but for the rows.
    kinds = tuple((leaf.dtype, leaf.shape[1:]) for leaf in mine)
    keys = flat.keys_of(outline)
    sign = signature(OPERATION, tuple(counts), keys, kinds)
    gathered = _gather_rows(mine, rows, group, sign, call)
    return flat.replace(data, gathered)


def gather_objects_counted(
    data: Any, counts: Sequence[int], group: dist.ProcessGroup | None = None
) -> list[Any]:
    """The first `counts[r]` elements of each rank's iterable `data`, in rank order, as one list."""
    call = Call(OPERATION, None, f"objects, counts={tuple(counts)}")
    distributed, rank = _begin(call, counts, group)
    mine = list(data)[: counts[rank]]
    if not distributed:
        return mine
    joined: list[Any] = []
    everywhere = objects.gather_each(mine, group, OPERATION, f"{counts=}")
    for elements in everywhere:
        joined.extend(elements)
    return joined


def _begin(call: Call, counts: Sequence[int], group: dist.ProcessGroup | None) -> tuple[bool, int]:
    """(whether there are other ranks, this rank's number in the group)."""
    state = PartialState()
    distributed = state.use_distributed
    rank, world = 0, 1
    if distributed:
        if state.debug:
            verify.agree(call.operation, call.data, group, call.options, call.free_dim)
        group = transport.group_of(group)
        rank = group.rank()
        world = group.size()
    if len(counts) != world:
        raise ConfigurationError(f"{OPERATION}: {len(counts)} counts were passed for {world} ranks")
    return distributed, rank


def _first_rows(leaf: Tensor, count: int, rank: int) -> Tensor:
    if leaf.dim() == 0:
        row = leaf.view(1)
        return row[: min(count, 1)]
    if leaf.shape[0] < count:
        raise ConfigurationError(
            f"{OPERATION}: rank {rank} has {count} samples in this batch but passed a tensor of "
            f"shape {list(leaf.shape)}: dimension 0 must have one row per sample. Use `gather` "
            "for anything else"
        )
    return leaf[:count]


def _gather_rows(
    leaves: Sequence[Tensor],
    rows: Sequence[Sequence[int]],
    group: dist.ProcessGroup | None,
    sign: bytes,
    call: Call,
) -> list[Tensor]:
    """Every rank's `leaves` joined; `rows[rank][index]` is the size of dimension 0 there."""
    group = transport.group_of(group)
    device = flat.lone_device(leaves)
    target = transport.carrier(group, device)
    widths = []
    for leaf in leaves:
        elements = leaf.shape[1:].numel()
        widths.append(elements * leaf.dtype.itemsize)
    sizes = []
    for counts in rows:
        sizes.append([count * width for count, width in zip(counts, widths, strict=True)])
    # Each rank's row has its own tensors without gaps; only its end is filled up to the longest.
    longest = max(map(sum, sizes))
    row = flat.pack(leaves, target, longest)
    stacked = transport.checked_all_gather(row, group, sign, call)
    pieces = []
    for content, lengths in zip(stacked, sizes, strict=True):
        filled = content[: sum(lengths)]
        pieces.append(filled.split_with_sizes(lengths))
    joined = []
    for index, leaf in enumerate(leaves):
        content = torch.cat([tensors[index] for tensors in pieces])
        # Not -1: rows may have no elements.
        number = sum(counts[index] for counts in rows)
        value = content.view(leaf.dtype).view(number, *leaf.shape[1:])
        joined.append(value.to(leaf.device))
    return joined
