# SPDX-License-Identifier: Apache-2.0
"""The memory that a rank uses for its models and optimizers, in bytes by kind."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

import torch
from torch import nn

from ...core import trees
from ..gradients import local

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
    return sum(local(tensor).numel() * tensor.dtype.itemsize for tensor in tensors)


def allocated_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the storages behind tensors, each counted once."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def tensors_in(value: object) -> list[torch.Tensor]:
    """The tensors in lists and dicts of any depth."""
    return list(trees.leaves(value))
