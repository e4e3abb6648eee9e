# SPDX-License-Identifier: Apache-2.0
"""What a rank holds for its models and optimizers: bytes, by kind."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

# Kinds of bytes. Gradients are counted as large as they get between two backwards; buckets stand beside the sum, as
# most of them are there during a backward only, and as large as a library is told to make them.
PARAMETERS, BUFFERS, GRADIENTS, MASTERS = "parameters", "buffers", "gradients", "masters"
STATE, BUCKETS = "optimizer state", "buckets"


def of_model(model: nn.Module, masters: Iterable[torch.Tensor], seen: set[int]) -> dict[str, int]:
    """Bytes of a model whose gradients lie as its parameters do, without tensors whose id is in `seen` (extended)."""
    parameters = list(_unseen(model.parameters(), seen))
    return {
        PARAMETERS: local_bytes(parameters),
        GRADIENTS: local_bytes(p for p in parameters if p.requires_grad),
        MASTERS: local_bytes(_unseen(masters, seen)),
    }


def _unseen(tensors: Iterable[torch.Tensor], seen: set[int]) -> Iterator[torch.Tensor]:
    for tensor in tensors:
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield tensor


def of_buffers(models: Sequence[nn.Module]) -> int:
    return local_bytes({id(b): b for model in models for b in model.buffers()}.values())


def of_optimizers(optimizers: Sequence[torch.optim.Optimizer]) -> int:
    return local_bytes(
        value
        for optimizer in optimizers
        for entry in optimizer.state.values()
        for value in entry.values()
        if isinstance(value, torch.Tensor)
    )


def local_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of tensors, of DTensors those of this rank's part."""
    return sum(_local(tensor).numel() * tensor.dtype.itemsize for tensor in tensors)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    # torch's DTensor takes long to import: a run without one does not wait for it.
    return getattr(tensor, "_local_tensor", tensor)


def allocated_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the storages behind tensors, each once: several may be parts of one."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def tensors_in(held: Any) -> list[torch.Tensor]:
    """The tensors in lists and dicts of any depth."""
    if isinstance(held, torch.Tensor):
        return [held]
    if isinstance(held, dict):
        held = list(held.values())
    return [tensor for one in held for tensor in tensors_in(one)] if isinstance(held, (list, tuple)) else []
