# SPDX-License-Identifier: Apache-2.0
"""Sharded tensors on the host of rank 0: which blocks each rank adds to the full tensor, and their transfer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from .weights import plan_shards

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


_WINDOW = 64 << 20  # bytes of full tensors that are on their way at a time


@torch.no_grad()
def gather_on_host(
    tensors: Mapping[str, torch.Tensor], device: torch.device, places: PlacesByRank
) -> dict[str, torch.Tensor]:
    """Copies of full tensors in the host memory of rank 0; empty on other ranks. Every rank calls it.

    Args:
        tensors: the same names on all ranks: DTensors, and tensors that all ranks have.
        device: through which the ranks communicate.
        places: what earlier calls have found; those of these tensors are added.
    """
    # Those with the largest elements first: in a message, each block then begins at a multiple of its element's size.
    names = sorted(tensors, key=lambda name: -tensors[name].element_size())
    sharded = {name: tensor for name in names if isinstance(tensor := tensors[name], DTensor)}
    learn_places(sharded.values(), places)
    is_first = dist.get_rank() == 0
    if is_first:
        full = {n: t.detach().to("cpu", copy=True) for n, t in tensors.items() if n not in sharded}
    else:
        full = {}
    for window in plan_shards(sharded, _WINDOW):
        own = [block.detach() for name in window for block, _ in local_blocks(sharded[name])]
        if is_first:
            full.update(
                {
                    name: torch.empty(sharded[name].shape, dtype=sharded[name].dtype)
                    for name in window
                }
            )
            blocks = [
                [
                    _part(full[name], *place)
                    for name in window
                    for place in places[layout_of(sharded[name])][rank]
                ]
                for rank in range(dist.get_world_size())
            ]
            _receive(blocks[1:], device)
            for block, source in zip(blocks[0], own, strict=True):
                block.copy_(source)
        elif own:
            # As bytes: a backend does not know all dtypes.
            message = torch.cat([block.contiguous().view(-1).view(torch.uint8) for block in own])
            _communicate([dist.P2POp(dist.isend, message, 0)])
    return full


def _part(full: torch.Tensor, offsets: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
    return full[
        tuple(slice(offset, offset + size) for offset, size in zip(offsets, shape, strict=True))
    ]


def _receive(blocks: Sequence[Sequence[torch.Tensor]], device: torch.device) -> None:
    """Fill the blocks of each other rank, from rank 1 on, with one message of this rank."""
    messages = [
        torch.empty(sum(b.nbytes for b in row), dtype=torch.uint8, device=device) for row in blocks
    ]
    _communicate(
        [dist.P2POp(dist.irecv, m, rank) for rank, m in enumerate(messages, 1) if m.numel()]
    )
    for row, message in zip(blocks, messages, strict=True):
        if row:
            pieces = message.cpu().split([block.nbytes for block in row])
        else:
            pieces = ()
        for block, piece in zip(row, pieces, strict=True):
            block.copy_(piece.view(block.dtype).view(block.shape))


def _communicate(requests: list[dist.P2POp]) -> None:
    for work in dist.batch_isend_irecv(requests) if requests else ():
        work.wait()
