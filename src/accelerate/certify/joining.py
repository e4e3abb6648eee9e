# SPDX-License-Identifier: Apache-2.0
"""Tensors that ranks have, or have shards of, joined in host memory of rank 0, and replicas that are not equal."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from ..parallel.fsdp.state import full_on_host
from ..parallel.gradients import local
from ..parallel.materialize import local_shard

# Elements that are kept of a tensor of a large model, at positions that depend on its name alone.
ELEMENTS = 4096

Tensors = dict[str, torch.Tensor]


class Part(NamedTuple):
    """What a rank has of the elements of a tensor that are kept.

    Fields:
        shape: of the full tensor.
        positions: of these elements in the flattened tensor. values: the elements.
        shard: equal on ranks that have the same shard. squares: the sum of squares of the shard.
    """

    shape: torch.Size
    positions: torch.Tensor
    values: torch.Tensor
    shard: tuple[int, ...]
    squares: float


def rank() -> int:
    """The rank of this process."""
    return dist.get_rank() if dist.is_initialized() else 0


def from_ranks(value: Any) -> list[Any]:
    """The value of each rank, on rank 0; nothing on the others. All ranks call it."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
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
        is_large: keep some elements of each tensor, and its norm. No rank gets a full tensor then.
    """
    if is_large:
        parts = {name: part_of(name, tensor) for name, tensor in tensors.items()}
        return _joined_parts(from_ranks(parts))
    first: dict[str, int] = {}
    for index, names in enumerate(on_all_ranks(list(tensors))):
        for name in names:
            first.setdefault(name, index)
    full: Tensors = {}
    for name, tensor in tensors.items():
        if first[name] == rank():
            full[name] = full_on_host(tensor)
        else:
            # The others need this rank's shard.
            plain(tensor)
    joined: Tensors = {}
    for tensors_of_rank in from_ranks(full if rank() else {}):
        joined.update(tensors_of_rank)
    if rank():
        return {}
    return full | joined


def part_of(name: str, tensor: torch.Tensor) -> Part:
    """What this rank has of a tensor."""
    tensor = tensor.detach()
    values = local(tensor)
    count = tensor.numel()
    positions = torch.arange(count)
    if count > ELEMENTS:
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        positions = torch.randint(count, (ELEMENTS,), generator=generator).unique()
    shard: tuple[int, ...] = ()
    places = torch.unravel_index(positions, tensor.shape)
    if isinstance(tensor, DTensor):
        shard = _shard_of(tensor)
        is_here = torch.full(positions.shape, values.numel() > 0)
        local_places = []
        for dimension, indices in enumerate(places):
            local_indices = torch.full((tensor.shape[dimension],), -1)
            rows = _rows(tensor, dimension)
            local_indices[rows] = torch.arange(len(rows))
            local_places.append(local_indices[indices])
            is_here &= local_places[-1] >= 0
        positions = positions[is_here]
        places = tuple(indices[is_here] for indices in local_places)
    squares = float(torch.linalg.vector_norm(values, dtype=torch.float64)) ** 2
    chosen = values[tuple(indices.to(values.device) for indices in places)]
    return Part(tensor.shape, positions, chosen.reshape(-1).cpu(), shard, squares)


def _rows(tensor: DTensor, dimension: int) -> torch.Tensor:
    """The indices along a dimension that this rank's shard has, in its order."""
    size = tensor.shape[dimension]
    sizes = [1] * tensor.ndim
    for other in range(tensor.ndim):
        if any(placement.is_shard(other) for placement in tensor.placements):
            # So that each rank has a piece of the other dimensions.
            sizes[other] = tensor.device_mesh.size()
    sizes[dimension] = size
    view = [1] * tensor.ndim
    view[dimension] = size
    indices = torch.arange(size, device=tensor.device).view(view).expand(sizes)
    rows = local_shard(indices, tensor).movedim(dimension, 0)
    return rows.reshape(len(rows), -1)[:, 0].cpu()


def _shard_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """The place of this rank in the dimensions of the mesh over which a tensor is sharded."""
    if not isinstance(tensor, DTensor):
        return ()
    coordinate = tensor.device_mesh.get_coordinate() or ()
    places = zip(coordinate, tensor.placements, strict=False)
    return tuple(index for index, placement in places if not placement.is_replicate())


def _joined_parts(ranks: list[dict[str, Part]]) -> Tensors:
    names = dict.fromkeys(name for parts in ranks for name in parts)
    joined: Tensors = {}
    for name in names:
        parts = {parts[name].shard: parts[name] for parts in reversed(ranks) if name in parts}
        positions = torch.cat([part.positions for part in parts.values()])
        values = torch.cat([part.values for part in parts.values()])
        values = values[positions.argsort()]
        shape = next(iter(parts.values())).shape
        if shape.numel() > ELEMENTS:
            squares = sum(part.squares for part in parts.values())
            joined[f"{name} norm"] = torch.tensor(squares, dtype=torch.float64).sqrt()
        else:
            values = values.view(shape)
        joined[name] = values
    return joined


class Checksum(NamedTuple):
    """Of this rank's shard of a tensor; equal shards have equal sums, up to rounding."""

    shard: tuple[int, ...]
    total: float
    size: float
    rounding: float


def different_replica(tensors: Mapping[str, torch.Tensor]) -> tuple[str, int, int] | None:
    """The first tensor that is not the same on all ranks which have the same shard: (name, rank, other rank).

    All ranks call it. Rank 0 gets the answer, the others None.
    """
    sums: dict[str, Checksum] = {}
    for name, tensor in tensors.items():
        values = local(tensor.detach())
        if values.is_floating_point():
            total = float(values.sum(dtype=torch.float64))
            size = float(torch.linalg.vector_norm(values, 1, dtype=torch.float64))
            sums[name] = Checksum(_shard_of(tensor), total, size, torch.finfo(values.dtype).eps)
    first: dict[tuple[str, tuple[int, ...]], tuple[int, Checksum]] = {}
    for index, sums_of_rank in enumerate(from_ranks(sums)):
        for name, checksum in sums_of_rank.items():
            other, expected = first.setdefault((name, checksum.shard), (index, checksum))
            if abs(checksum.total - expected.total) > expected.rounding * expected.size:
                return name, other, index
    return None
