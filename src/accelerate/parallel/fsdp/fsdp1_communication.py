# SPDX-License-Identifier: Apache-2.0
"""What FSDP1 sends in an optimizer step, computed from the layout of its flat parameters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from ..prepared import CommunicationVolume, VolumeCounter


def flat_volume(model: nn.Module, backwards: int) -> list[CommunicationVolume]:
    """Messages of a window of so many backwards. Bytes are those of unsharded units."""
    found, sums = VolumeCounter(), "all-reduce of gradients between replicas"
    for unit, handle in flat_handles(model):
        flat, kind = handle.flat_param, handle._sharding_strategy.name
        trained = flat.requires_grad
        if kind == "NO_SHARD":
            if trained:
                found.add(sums, flat.numel() * handle._reduce_dtype.itemsize)
            continue
        numel = flat._sharded_size.numel() * handle.world_size
        # Resharded: for each forward, and for the backward but of the root. Else kept from the first forward of a
        # window to its last backward.
        times = backwards * (1 if unit is model else 2) if kind in ("FULL_SHARD", "HYBRID_SHARD") else 1
        found.add("all-gather of parameters", times * numel * handle._fwd_bwd_param_dtype.itemsize, times)
        if not trained:
            continue
        size = numel * handle._reduce_dtype.itemsize
        found.add("reduce-scatter of gradients", size)
        if "HYBRID" in kind:
            found.add(sums, size // handle.world_size)
    return found.volumes()


def unsharded_gradients(model: nn.Module) -> int:
    """Bytes by which unsharded gradients are larger than this rank's shards of them."""
    larger = 0
    for _, handle in flat_handles(model):
        flat = handle.flat_param
        if flat.requires_grad and handle.uses_sharded_strategy:
            dtype = handle._fwd_bwd_param_dtype if handle._keep_low_precision_grads else flat.dtype
            numel = flat._unpadded_unsharded_size.numel() * dtype.itemsize
            larger += numel - flat._sharded_size.numel() * flat.dtype.itemsize
    return larger


def flat_dtypes(model: nn.Module) -> tuple[torch.dtype, torch.dtype] | None:
    """(computes in, gradients are reduced in); None for a model without parameters."""
    return next(((one._fwd_bwd_param_dtype, one._reduce_dtype) for _, one in flat_handles(model)), None)


def flat_handles(model: nn.Module) -> Iterator[tuple[nn.Module, Any]]:
    """(unit, handle of its flat parameter) of each unit with parameters."""
    for unit in FullyShardedDataParallel.fsdp_modules(model):
        handle: Any = unit._handle
        if handle is not None:
            yield unit, handle
