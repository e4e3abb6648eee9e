# SPDX-License-Identifier: Apache-2.0
"""Sharded tensors on the host of rank 0, many with one message of each rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from .checksums import counts_here, local_blocks
from .weights import plan_shards

_WINDOW = 64 << 20  # bytes of full tensors in one message


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
    if not sharded:
        return full
    blocks = {name: list(local_blocks(t)) if counts_here(t) else [] for name, t in sharded.items()}
    windows = plan_shards(sharded, _WINDOW)
    # Of all ranks, the most bytes in each message.
    sizes = torch.tensor(
        [sum(block.nbytes for name in names for block, _ in blocks[name]) for names in windows],
        dtype=torch.int64, device=device,
    )  # fmt: skip
    dist.all_reduce(sizes, dist.ReduceOp.MAX)
    # By rank: of each tensor, where its blocks begin and their shapes.
    own_places = {name: [(at, tuple(block.shape)) for block, at in found] for name, found in blocks.items()}
    places: list[Any] = [None] * dist.get_world_size()
    dist.gather_object(own_places, places if is_first else None)
    for names, size in zip(windows, sizes.tolist(), strict=True):
        message = torch.empty(size, dtype=torch.uint8, device=device)
        at = 0
        for name in names:
            for block, _ in blocks[name]:
                message[at : at + block.nbytes] = block.reshape(-1).view(torch.uint8).to(device)
                at += block.nbytes
        received = [torch.empty_like(message) for _ in places] if is_first else None
        dist.gather(message, received)
        if received is None:
            continue
        full.update({name: torch.empty(sharded[name].shape, dtype=sharded[name].dtype) for name in names})
        for own, data in zip(places, received, strict=True):
            at = 0
            for name in names:
                for offsets, shape in own[name]:
                    end = at + torch.Size(shape).numel() * full[name].element_size()
                    target = full[name]
                    for dimension, (offset, length) in enumerate(zip(offsets, shape, strict=True)):
                        target = target.narrow(dimension, offset, length)
                    # A copy begins at an address that any dtype may have.
                    target.copy_(data[at:end].clone().view(target.dtype).view(shape))
                    at = end
    return full
