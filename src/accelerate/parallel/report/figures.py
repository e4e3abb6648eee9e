# SPDX-License-Identifier: Apache-2.0
"""What a rank sends in an optimizer step by kind of message, and the memory that it uses by kind of bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import nn

from ...core import trees


@dataclass(frozen=True)
class CommunicationVolume:
    """Messages of one kind that a rank sends in an optimizer step.

    Fields:
        what: the collective and what it carries.
        messages: how many; None where another library decides that.
        sent: their total bytes.
        unit: what `sent` is counted per, for example " a token".
        about: an upper bound where `messages` is None; otherwise the number of messages is an estimate.
    """

    what: str
    messages: int | None
    sent: float
    unit: str = ""
    about: bool = False


class VolumeCounter:
    """Adds up messages by kind. Those of one kind have one unit."""

    def __init__(self, unit: str = "") -> None:
        self.unit = unit
        self._counts: dict[str, tuple[int, float]] = {}

    def add(self, what: str, sent: float, messages: int = 1) -> None:
        """Count messages of a kind that have so many bytes in all."""
        before = self._counts.get(what, (0, 0))
        self._counts[what] = (before[0] + messages, before[1] + sent)

    def volumes(self, about: str | None = None) -> list[CommunicationVolume]:
        """The messages by kind. The number of those of the kind `about` is an estimate."""
        return [
            CommunicationVolume(what, messages, sent, self.unit, what == about)
            for what, (messages, sent) in self._counts.items()
        ]


# Kinds of bytes. Gradients have their largest size between two backwards. Buckets are not in the sum: most of them
# exist during a backward only, in the size that the library is configured for.
PARAMETERS, BUFFERS, GRADIENTS, MASTER_WEIGHTS = (
    "parameters",
    "buffers",
    "gradients",
    "master weights",
)
STATE, BUCKETS = "optimizer state", "buckets"
KINDS = (PARAMETERS, BUFFERS, GRADIENTS, MASTER_WEIGHTS, STATE, BUCKETS)


def unseen(tensors: Iterable[torch.Tensor], seen: set[int]) -> Iterator[torch.Tensor]:
    """The tensors whose ids are not in `seen`, which is extended."""
    for tensor in tensors:
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield tensor


def of_buffers(models: Sequence[nn.Module]) -> int:
    """Bytes of the buffers of models, each counted once."""
    return local_bytes(set(chain.from_iterable(model.buffers() for model in models)))


def local_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of tensors; of a DTensor those of this rank's shard."""
    size = 0
    for tensor in tensors:
        if hasattr(tensor, "to_local"):
            tensor = tensor.to_local()
        size += tensor.nbytes
    return size


def allocated_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the storages behind tensors, each counted once."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def tensors_in(value: object) -> list[torch.Tensor]:
    """The tensors in lists and dicts of any depth."""
    return list(trees.leaves(value))
