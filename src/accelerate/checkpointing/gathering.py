# SPDX-License-Identifier: Apache-2.0
"""Sharded tensors on the host of rank 0."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from .checksums import block_places, local_blocks
from .weights import plan_shards

_WINDOW = 64 << 20  # bytes of full tensors that are on their way at a time


@torch.no_grad()
def gather_on_host(tensors: Mapping[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    """Copies of full tensors in the host memory of rank 0; empty on other ranks. Every rank calls it.

    Args:
        tensors: the same names on all ranks: DTensors, and tensors that all ranks have.
        device: through which the ranks communicate.
    """
    sharded = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, DTensor)}
    is_first = dist.get_rank() == 0
    full = {n: t.detach().to("cpu", copy=True) for n, t in tensors.items() if n not in sharded} if is_first else {}
    places: list[Any] = [None] * dist.get_world_size()  # of each rank
    dist.gather_object({n: block_places(t) for n, t in sharded.items()}, places if is_first else None)
    for names in plan_shards(sharded, _WINDOW):
        own = [(name, block, at) for name in names for block, at in local_blocks(sharded[name])]
        if not is_first:
            _wait_for([dist.P2POp(dist.isend, _bytes(block), 0) for _, block, _ in own])
            continue
        full.update({name: torch.empty(sharded[name].shape, dtype=sharded[name].dtype) for name in names})
        requests: list[dist.P2POp] = []
        received: list[tuple[torch.Tensor, torch.Tensor]] = []
        for rank, theirs in enumerate(places[1:], 1):
            for name in names:
                for offsets, shape in theirs[name]:
                    target = _part(full[name], offsets, shape)
                    is_in_place = device.type == "cpu" and target.is_contiguous()
                    source = target if is_in_place else torch.empty(target.shape, dtype=target.dtype, device=device)
                    requests.append(dist.P2POp(dist.irecv, _bytes(source), rank))
                    received.append((target, source))
        for name, block, at in own:
            _part(full[name], at, block.shape).copy_(block)
        _wait_for(requests)
        for target, source in received:
            target.copy_(source)  # of itself: nothing is done
    return full


def _part(full: torch.Tensor, offsets: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
    return full[tuple(slice(offset, offset + size) for offset, size in zip(offsets, shape, strict=True))]


def _bytes(block: torch.Tensor) -> torch.Tensor:
    """What is sent: a backend does not know all dtypes."""
    return block.detach().contiguous().view(-1).view(torch.uint8)


def _wait_for(requests: list[dist.P2POp]) -> None:
    for work in dist.batch_isend_irecv(requests) if requests else ():
        work.wait()
