# SPDX-License-Identifier: Apache-2.0
"""Which blocks of a sharded tensor each rank contributes to the full one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

# Where a block begins in the full tensor, and its shape.
Place = tuple[tuple[int, ...], tuple[int, ...]]

# Places of every rank by the mesh, the placements and the shape of a tensor; empty on other ranks than 0.
PlacesByRank = dict[Any, list[list[Place]]]

# What torch computes for placements and a shape takes longer than reading a small shard.
_known: WeakKeyDictionary[DeviceMesh, dict[object, list[Place]]] = WeakKeyDictionary()


def local_blocks(tensor: DTensor) -> Iterator[tuple[torch.Tensor, tuple[int, ...]]]:
    """The blocks of `block_places`, and where each begins."""
    local = tensor.to_local()
    at = 0
    for offsets, sizes in block_places(tensor):
        split = next(
            (
                dim
                for dim, (all_, here) in enumerate(zip(local.shape, sizes, strict=True))
                if all_ != here
            ),
            0,
        )
        if local.ndim:
            block = local.narrow(split, at, sizes[split])
        else:
            block = local
        at += sizes[split] if local.ndim else 0
        yield block, offsets


def block_places(tensor: DTensor) -> list[Place]:
    """Which blocks of the full tensor this rank adds: of ranks that have the same block one adds it.

    They are several where FSDP2 and tensor parallelism split one dimension.
    """
    mesh, placements = tensor.device_mesh, tensor.placements
    known = _known.setdefault(mesh, {})
    places = known.get((placements, tensor.shape))
    if places is not None:
        return places
    coordinate = mesh.get_coordinate() or ()
    is_copy = any(
        at for at, placement in zip(coordinate, placements, strict=True) if placement.is_replicate()
    )
    if is_copy or not (mesh.mesh == 0).any():
        chunks = []
    else:
        chunks = tensor.__create_chunk_list__()
    places = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in chunks if chunk.sizes.numel()]
    known[placements, tensor.shape] = places
    return places


def learn_places(tensors: Iterable[DTensor], known: PlacesByRank) -> None:
    """Add `block_places` of every rank to what is known. Every rank calls it; without unknown ones nothing is sent."""
    unknown = {key: tensor for tensor in tensors if (key := layout_of(tensor)) not in known}
    if unknown:
        found: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object([block_places(tensor) for tensor in unknown.values()], found)
        known.update(
            {key: [places[at] for places in found or ()] for at, key in enumerate(unknown)}
        )


def layout_of(tensor: DTensor) -> object:
    """The key of a tensor in `PlacesByRank`."""
    return tensor.device_mesh, tensor.placements, tensor.shape
