# SPDX-License-Identifier: Apache-2.0
"""Buffers of small gathers. They are kept, so a gather that is repeated costs only a few calls of torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

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

    def __init__(self, specs: flat.Specs, channel: Channel, sign: bytes) -> None:
        self.channel = channel
        sizes = flat.sizes_of(specs)
        # Wide dtypes come first: each is aligned to its own width without a gap.
        order = sorted(range(len(specs)), key=lambda index: -specs[index][1].itemsize)
        length = flat.aligned(sum(sizes), _ALIGNED)
        others = channel.world - 1
        self.header: bytes = sign + sum(sizes).to_bytes(HEADER - len(sign), "little", signed=True)
        with torch.inference_mode(False):
            sent = torch.zeros(others, HEADER + length, dtype=torch.uint8, device="cpu")
            sent[:, :HEADER] = torch.tensor(list(self.header), dtype=torch.uint8)
            self.sent: torch.Tensor = sent.view(-1)
            self.splits: list[int] = channel.splits(HEADER + length)
            targets: list[Any] = [None] * (2 * len(specs))
            self.incoming: list[Any] = [None] * len(specs)
            start = HEADER
            for index in order:
                shape, dtype = specs[index]
                stop = start + sizes[index]
                shape_sent: Sequence[int] = (others, *shape)
                if others == 1:
                    # The copy needs no dimension for the ranks.
                    shape_sent = shape
                targets[index] = _typed(sent[:, start:stop], dtype).view(shape_sent)
                slots = _typed(channel.slots[:, start:stop], dtype)
                targets[len(specs) + index] = slots[channel.rank].view(shape)
                self.incoming[index] = slots.view(channel.world, *shape)
                start = stop
        self.targets = targets
        self.likes: list[torch.Tensor] = flat.stacked_likes(specs, channel.world)

    def gather(
        self, leaves: list[torch.Tensor], group: dist.ProcessGroup, data: object
    ) -> Sequence[torch.Tensor]:
        """The `leaves` (of `data`) of all ranks, each joined along dimension 0, in fresh memory."""
        if torch.is_grad_enabled() and any(leaf.requires_grad for leaf in leaves):
            leaves = [leaf.detach() for leaf in leaves]
        foreach.copy_(self.targets, leaves + leaves)
        self.channel.swap(group, self.header, self.sent, self.splits, Call("gather", data))
        return [
            value.clone().view_as(like)
            for value, like in zip(self.incoming, self.likes, strict=True)
        ]


def _typed(content: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Columns of bytes viewed as `dtype`. Torch cannot view zero columns as a wider dtype."""
    if content.shape[1]:
        return content.view(dtype)
    return torch.zeros(content.shape, dtype=dtype, device="cpu")


def _key(leaves: Sequence[torch.Tensor], outline: Sequence[object]) -> Any:
    """What a buffer depends on."""
    return tuple(outline), tuple(
        [(leaf.shape, leaf.dtype, leaf.device, leaf.layout) for leaf in leaves]
    )


def known(
    leaves: Sequence[torch.Tensor], outline: Sequence[object], channel: Channel
) -> GatherBuffer | None:
    """The buffer of an equal message before: its leaves need no further check. None where there is none."""
    try:
        buffer: GatherBuffer | None = channel.memory.get(_key(leaves, outline))
    except RuntimeError:
        # A ragged (nested) tensor has no shape.
        return None
    return buffer


def created(
    leaves: Sequence[torch.Tensor], outline: Sequence[object], channel: Channel
) -> GatherBuffer | None:
    """A new buffer for plain leaves; None where the message is large, or its tensors are not all on the CPU."""
    specs = flat.specs_of(leaves)
    if sum(flat.sizes_of(specs)) > channel.capacity - _ALIGNED or not all(
        leaf.is_cpu for leaf in leaves
    ):
        return None
    sign = flat.signature_of("gather", leaves, outline)
    buffer = GatherBuffer(specs, channel, sign)
    channel.remember(_key(leaves, outline), buffer)
    return buffer
