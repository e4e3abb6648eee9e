# SPDX-License-Identifier: Apache-2.0
"""Sharded tensors on the host of rank 0."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from .places import PlacesByRank, layout_of, learn_places, local_blocks
from .weights import plan_shards

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
