# SPDX-License-Identifier: Apache-2.0
"""Small messages that are sent again and again: their buffers are kept, so a gather costs a few calls of torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from . import flat, transport

# Bytes that a message may have. Above, it takes so long itself that nothing is saved here.
LARGEST = 64 << 10
# How many buffers are kept.
KEPT = 8

# One call copies or clones many tensors. torch 2.11 and 2.12 may lack the second.
_copy_all: Any = torch._foreach_copy_
_clone_all: Any = getattr(torch, "_foreach_clone", lambda tensors: [tensor.clone() for tensor in tensors])


class Lane:
    """The buffers of one shape of message between the ranks of one group, on the CPU.

    Where all tensors have as many rows (a batch), the message holds first row after first row, second after second:
    then a tensor's rows lie evenly apart over all ranks, and the joined tensor is one view. Else the message holds
    tensor after tensor, and the view has the ranks as a dimension of its own.

    `outgoing` and `incoming` are such views, of the tensors' own dtypes. They are used within one call only: what is
    received is cloned. The message is kept once for every rank that it goes to.
    """

    def __init__(self, specs: flat.Specs, world: int) -> None:
        rows = {shape[0] if shape else 0 for shape, _ in specs}
        blocks = max(rows) if len(rows) == 1 else 0
        self.likes = None if blocks else flat.stacked_likes(specs, world)
        blocks = blocks or 1
        sizes = [size // blocks for size in flat.sizes_of(specs)]
        self.outgoing: list[Any] = [None] * len(specs)
        self.incoming: list[Any] = [None] * len(specs)
        # Wide dtypes come first: each is aligned to its own width without a gap.
        order = sorted(range(len(specs)), key=lambda place: -specs[place][1].itemsize)
        length = flat.aligned(sum(sizes), specs[order[0]][1].itemsize)
        # Tensors made in inference mode could not be written to outside of it.
        with torch.inference_mode(False):
            self.sent = torch.zeros(world * blocks * length, dtype=torch.uint8, device="cpu")
            self.received = torch.zeros_like(self.sent)
            start = 0
            for place in order:
                (shape, dtype), stop = specs[place], start + sizes[place]
                inner = shape if self.likes else shape[1:]
                sent, received = (
                    _typed(buffer.view(world * blocks, length)[:, start:stop], dtype)
                    for buffer in (self.sent, self.received)
                )
                self.outgoing[place] = sent.view(world, *shape)
                self.incoming[place] = received.view(world * blocks, *inner)
                start = stop

    def gather(self, leaves: list[torch.Tensor], group: dist.ProcessGroup) -> Sequence[torch.Tensor]:
        """The `leaves` of all ranks, each joined along dimension 0, in fresh memory."""
        if torch.is_grad_enabled() and any(leaf.requires_grad for leaf in leaves):
            leaves = [leaf.detach() for leaf in leaves]
        _copy_all(self.outgoing, leaves)
        if self.sent.numel():
            transport.exchange(self.received, self.sent, group)
        joined: Sequence[torch.Tensor] = _clone_all(self.incoming)
        if self.likes is None:
            return joined
        return [value.view_as(like) for value, like in zip(joined, self.likes, strict=True)]


def _typed(content: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Columns of bytes viewed as `dtype`; of no bytes no wider dtype can be viewed."""
    return content.view(dtype) if content.shape[1] else torch.zeros(content.shape, dtype=dtype, device="cpu")


_lanes: dict[Any, Lane] = {}


def _key(leaves: Sequence[torch.Tensor], group: dist.ProcessGroup) -> Any:
    """All that a lane depends on. Each group has its own: threads may use groups at the same time."""
    specs = tuple([(leaf.shape, leaf.dtype, leaf.device, leaf.layout) for leaf in leaves])
    return group.group_name, group.size(), specs


def known(leaves: Sequence[torch.Tensor], group: dist.ProcessGroup) -> Lane | None:
    """The lane that has served such a message before: such leaves need no further check."""
    try:
        return _lanes.get(_key(leaves, group))
    except RuntimeError:
        # A ragged (nested) tensor has no shape.
        return None


def opened(leaves: Sequence[torch.Tensor], group: dist.ProcessGroup) -> Lane | None:
    """A new lane for plain leaves on one device; None where lanes are of no use: not gloo's host memory, or large."""
    specs = flat.specs_of(leaves)
    length = sum(flat.sizes_of(specs))
    if not (leaves[0].is_cpu and length <= LARGEST and transport.spreads(length, group)):
        return None
    while len(_lanes) >= KEPT:
        del _lanes[next(iter(_lanes))]
    lane = _lanes[_key(leaves, group)] = Lane(specs, group.size())
    return lane
