# SPDX-License-Identifier: Apache-2.0
"""Buffers of small gathers. They are kept, so a gather that is repeated costs only a few calls of torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..runtime.calls import Call
from ..runtime.channel import HEADER, Channel
from ..torch_internals import foreach
from . import flat

# Where the tensors of a row begin: every dtype is aligned.
_ALIGNED = 16


class GatherBuffer:
    """A message of one shape through a channel: its header, and typed views of the channel's memory.

    `targets` are the tensors sent to the other ranks, then those of this rank's slot. `incoming` are those of all
    slots. They are valid within one call only: received tensors are cloned.
    """

    def __init__(
        self,
        specs: flat.Specs,
        channel: Channel,
        sign: bytes,
    ) -> None:
        self.channel = channel
        sizes = flat.sizes_of(specs)
        size = sum(sizes)
        number = len(specs)

        def negative_width(index: int) -> int:
            _, dtype = specs[index]
            return -dtype.itemsize

        # Wide dtypes come first: each is aligned to its own width without a gap.
        order = sorted(range(number), key=negative_width)
        width = HEADER + flat.aligned(size, _ALIGNED)
        others = channel.world - 1
        self.header: bytes = sign + size.to_bytes(HEADER - len(sign), "little", signed=True)
        self.splits: list[int] = channel.splits(width)
        with torch.inference_mode(False):
            sent = torch.zeros(others, width, dtype=torch.uint8, device="cpu")
            sent[:, :HEADER] = torch.tensor(list(self.header), dtype=torch.uint8)
            self.sent: Tensor = sent.view(-1)
            to_others: list[Any] = [None] * number
            to_slot: list[Any] = [None] * number
            self.incoming: list[Any] = [None] * number
            start = HEADER
            for index in order:
                shape, dtype = specs[index]
                stop = start + sizes[index]
                shape_sent: Sequence[int] = (others, *shape)
                if others == 1:
                    # The copy needs no dimension for the ranks.
                    shape_sent = shape
                content = _typed(sent[:, start:stop], dtype)
                to_others[index] = content.view(shape_sent)
                slots = _typed(channel.slots[:, start:stop], dtype)
                slot = slots[channel.rank]
                to_slot[index] = slot.view(shape)
                self.incoming[index] = slots.view(channel.world, *shape)
                start = stop
        self.targets: list[Any] = to_others + to_slot
        self.likes: list[Tensor] = flat.stacked_likes(specs, channel.world)

    def gather(
        self,
        leaves: list[Tensor],
        group: dist.ProcessGroup,
        data: object,
    ) -> Sequence[Tensor]:
        """The `leaves` (of `data`) of all ranks, each joined along dimension 0, in fresh memory."""
        if torch.is_grad_enabled() and any(leaf.requires_grad for leaf in leaves):
            leaves = [leaf.detach() for leaf in leaves]
        foreach.copy_(self.targets, leaves + leaves)
        call = Call("gather", data)
        self.channel.swap(group, self.header, self.sent, self.splits, call)
        gathered = []
        for value, like in zip(self.incoming, self.likes, strict=True):
            fresh = value.clone()
            gathered.append(fresh.view_as(like))
        return gathered


def _typed(content: Tensor, dtype: torch.dtype) -> Tensor:
    """Columns of bytes viewed as `dtype`. Torch cannot view zero columns as a wider dtype."""
    if content.shape[1]:
        return content.view(dtype)
    return torch.zeros(content.shape, dtype=dtype, device="cpu")


def _key(leaves: Sequence[Tensor], outline: Sequence[object]) -> Any:
    """What a buffer depends on."""
    kinds = [(leaf.shape, leaf.dtype, leaf.device, leaf.layout) for leaf in leaves]
    return tuple(outline), tuple(kinds)


def known(
    leaves: Sequence[Tensor], outline: Sequence[object], channel: Channel
) -> GatherBuffer | None:
    """The buffer of an equal message before: its leaves need no further check. None where there is none."""
    try:
        key = _key(leaves, outline)
    except RuntimeError:
        # A ragged (nested) tensor has no shape.
        return None
    buffer: GatherBuffer | None = channel.memory.get(key)
    return buffer


def created(
    leaves: Sequence[Tensor], outline: Sequence[object], channel: Channel
) -> GatherBuffer | None:
    """A new buffer for plain leaves; None where the message is large, or its tensors are not all on the CPU."""
    specs = flat.specs_of(leaves)
    size = sum(flat.sizes_of(specs))
    if size > channel.capacity - _ALIGNED:
        return None
    if not all(leaf.is_cpu for leaf in leaves):
        return None
    sign = flat.signature_of("gather", leaves, outline)
    buffer = GatherBuffer(specs, channel, sign)
    key = _key(leaves, outline)
    channel.remember(key, buffer)
    return buffer
