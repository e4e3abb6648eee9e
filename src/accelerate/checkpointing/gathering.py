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

from .files import in_file_order
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
    places = block_places(tensor)
    if len(places) == 1:
        yield local, places[0][0]
        return
    start = 0
    for offsets, sizes in places:
        split = 0
        while local.shape[split] == sizes[split]:
            split += 1
        yield local.narrow(split, start, sizes[split]), offsets
        start += sizes[split]


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
    is_copy = False
    for index, placement in zip(coordinate, placements, strict=True):
        if index and placement.is_replicate():
            is_copy = True
    places = []
    if not is_copy and (mesh.mesh == 0).any():
        for chunk in tensor.__create_chunk_list__():
            if chunk.sizes.numel():
                places.append((tuple(chunk.offsets), tuple(chunk.sizes)))
    known[placements, tensor.shape] = places
    return places


def learn_places(tensors: Iterable[DTensor], known: PlacesByRank) -> None:
    """Add `block_places` of every rank to what is known. Every rank calls it; without unknown ones nothing is sent."""
    layouts = {layout_of(tensor): tensor for tensor in tensors}
    unknown = [key for key in layouts if key not in known]
    if not unknown:
        return
    of_ranks: list[Any] | None = None
    if dist.get_rank() == 0:
        of_ranks = [None] * dist.get_world_size()
    places_here = [block_places(layouts[key]) for key in unknown]
    dist.gather_object(places_here, of_ranks)
    if of_ranks is None:
        of_ranks = []
    for index, key in enumerate(unknown):
        known[key] = [places[index] for places in of_ranks]


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
    sharded: dict[str, DTensor] = {}
    full: dict[str, torch.Tensor] = {}
    is_first = dist.get_rank() == 0
    for name, tensor in in_file_order(tensors).items():
        if isinstance(tensor, DTensor):
            sharded[name] = tensor
        elif is_first:
            full[name] = tensor.detach().to("cpu", copy=True)
    learn_places(sharded.values(), places)
    for window in plan_shards(sharded, _WINDOW):
        local: list[torch.Tensor] = []
        for name in window:
            local += [block.detach() for block, _ in local_blocks(sharded[name])]
        if is_first:
            blocks = _blocks_by_rank({name: sharded[name] for name in window}, places, full)
            _receive(blocks[1:], device)
            for block, source in zip(blocks[0], local, strict=True):
                block.copy_(source)
        elif local:
            # As bytes: a backend does not know all dtypes.
            flat = [block.contiguous().view(-1) for block in local]
            message = torch.cat([block.view(torch.uint8) for block in flat])
            _communicate([dist.P2POp(dist.isend, message, 0)])
    return full


def _blocks_by_rank(
    sharded: Mapping[str, DTensor], places: PlacesByRank, full: dict[str, torch.Tensor]
) -> list[list[torch.Tensor]]:
    """The blocks that each rank has of some tensors, as views of new full tensors, which are added to `full`."""
    blocks: list[list[torch.Tensor]] = [[] for _ in range(dist.get_world_size())]
    for name, tensor in sharded.items():
        target = torch.empty(tensor.shape, dtype=tensor.dtype)
        full[name] = target
        places_by_rank = places[layout_of(tensor)]
        for row, rank_places in zip(blocks, places_by_rank, strict=True):
            for offsets, shape in rank_places:
                row.append(_part(target, offsets, shape))
    return blocks


def _part(full: torch.Tensor, offsets: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
    for dimension, (offset, size) in enumerate(zip(offsets, shape, strict=True)):
        full = full.narrow(dimension, offset, size)
    return full


def _receive(blocks: Sequence[Sequence[torch.Tensor]], device: torch.device) -> None:
    """Fill the blocks of each other rank, from rank 1 on, with one message of this rank."""
    messages = []
    requests = []
    for rank, row in enumerate(blocks, 1):
        sizes = [block.nbytes for block in row]
        message = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
        messages.append((row, sizes, message))
        if row:
            requests.append(dist.P2POp(dist.irecv, message, rank))
    _communicate(requests)
    for row, sizes, message in messages:
        pieces = message.cpu().split(sizes)
        for block, piece in zip(row, pieces, strict=True):
            values = piece.view(block.dtype)
            block.copy_(values.view(block.shape))


def _communicate(requests: list[dist.P2POp]) -> None:
    if requests:
        for work in dist.batch_isend_irecv(requests):
            work.wait()
