# SPDX-License-Identifier: Apache-2.0
"""Tensors that ranks have, or have shards of, joined in host memory of rank 0, and replicas that are not equal."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from ..parallel.gradients import local

# Elements that are kept of a tensor of a large model, at positions that depend on its name alone.
ELEMENTS = 4096

Tensors = dict[str, torch.Tensor]


def rank() -> int:
    """The rank of this process."""
    if dist.is_initialized():
        return dist.get_rank()
    return 0


def from_ranks(value: Any) -> list[Any]:
    """The value of each rank, on rank 0; nothing on the others. All ranks call it."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] | None = None
    if rank() == 0:
        values = [None] * dist.get_world_size()
    dist.gather_object(value, values)
    return values or []


def on_all_ranks(value: Any) -> list[Any]:
    """The value of each rank, on all of them."""
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The full tensor of a sharded one. All ranks that have shards of it call it."""
    if isinstance(tensor, DTensor):
        return tensor.full_tensor()
    return tensor


def join(tensors: Mapping[str, torch.Tensor], is_large: bool = False) -> Tensors:
    """Copies of full tensors in host memory of rank 0; nothing on the others. All ranks call it.

    Args:
        tensors: by name, those of which this rank has all or a shard.
        is_large: keep some elements of each tensor, and its norm. A rank has one full tensor at a time then.
    """
    first_ranks: dict[str, int] = {}
    for index, names in enumerate(on_all_ranks(list(tensors))):
        for name in names:
            first_ranks.setdefault(name, index)
    copies: Tensors = {}
    for name, tensor in tensors.items():
        # Ranks with another shard take part.
        full = plain(tensor.detach())
        if first_ranks[name] != rank():
            continue
        if is_large:
            copies.update(elements_of(name, full))
        else:
            copies[name] = full.to("cpu", copy=True)
    if rank():
        from_ranks(copies)
        return {}
    for copies_of_rank in from_ranks({}):
        copies.update(copies_of_rank)
    return copies


def elements_of(name: str, tensor: torch.Tensor) -> Tensors:
    """Some elements of a tensor, and its norm; a tensor of few elements as it is."""
    size = tensor.numel()
    if size <= ELEMENTS:
        return {name: tensor.to("cpu", copy=True)}
    seed = zlib.crc32(name.encode())
    generator = torch.Generator().manual_seed(seed)
    positions = torch.randint(size, (ELEMENTS,), generator=generator)
    elements = tensor.flatten()[positions.to(tensor.device)]
    # The norm of integers is one of floating-point numbers.
    dtype = torch.promote_types(tensor.dtype, torch.float32)
    norm = torch.linalg.vector_norm(tensor.to(dtype))
    return {
        name: elements.cpu(),
        f"{name} norm": norm.cpu(),
    }


class Checksum(NamedTuple):
    """Of this rank's shard of a tensor.

    Fields:
        shard: equal on ranks that have the same shard.
        total: the sum of its elements.
        rounding: what may differ in it.
    """

    shard: tuple[int, ...]
    total: float
    rounding: float


def different_replica(tensors: Mapping[str, torch.Tensor]) -> tuple[str, int, int] | None:
    """The first tensor that is not the same on all ranks which have the same shard: (name, rank, other rank).

    All ranks call it. Rank 0 gets the answer, the others None.
    """
    checksums: dict[str, Checksum] = {}
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            checksums[name] = _checksum(tensor.detach())
    first: dict[Any, tuple[int, float]] = {}
    for index, checksums_of_rank in enumerate(from_ranks(checksums)):
        for name, checksum in checksums_of_rank.items():
            replica = name, checksum.shard
            if replica not in first:
                first[replica] = index, checksum.total
            other, total = first[replica]
            if abs(checksum.total - total) > checksum.rounding:
                return name, other, index
    return None


def _checksum(tensor: torch.Tensor) -> Checksum:
    values = local(tensor)
    total = values.sum(dtype=torch.float64)
    size = torch.linalg.vector_norm(values, 1, dtype=torch.float64)
    rounding = torch.finfo(values.dtype).eps
    shard: list[int] = []
    if isinstance(tensor, DTensor):
        coordinate = tensor.device_mesh.get_coordinate() or ()
        for index, placement in zip(coordinate, tensor.placements, strict=False):
            if not placement.is_replicate():
                shard.append(index)
    return Checksum(
        shard=tuple(shard),
        total=float(total),
        rounding=rounding * float(size),
    )
