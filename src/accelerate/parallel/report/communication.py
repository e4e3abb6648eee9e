# SPDX-License-Identifier: Apache-2.0
"""What sharded and tensor-parallel models send in an optimizer step, computed from the layout of their parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from ..fsdp.units import flat_units, shard_groups
from ..prepared import CommunicationVolume, VolumeCounter
from ..tensor.layers import ColumnLinear, RowEmbedding, RowLinear
from .memory import local_bytes

if TYPE_CHECKING:
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam


def shard_volume(model: nn.Module, backwards: int) -> list[CommunicationVolume]:
    """Messages of FSDP2 in a window of so many backwards, with the bytes of unsharded units.

    Each unit is gathered for each forward, and again for the backward if it was resharded in between; its gradients
    are scattered once. A unit without trainable parameters is gathered for a backward only if one passes through it:
    the number is then an upper bound.
    """
    found, gather, is_bound = VolumeCounter(), "all-gather of parameters", False
    for _, group, resharded in shard_groups(model):
        times: int = backwards * (1 + resharded)
        ranks: int = group.mesh_info.shard_mesh_size  # type: ignore[attr-defined]
        size = sum(_unsharded_bytes(p, group.mp_policy.param_dtype, ranks) for p in group.fsdp_params)
        found.add(gather, times * size, times)
        trained = [p for p in group.fsdp_params if p.sharded_param.requires_grad]
        if not trained:
            is_bound = is_bound or resharded
            continue
        dtype = group.mp_policy.reduce_dtype or group.mp_policy.param_dtype
        size = sum(_unsharded_bytes(p, dtype, ranks) for p in trained)
        found.add("reduce-scatter of gradients", size)
        if group._is_hsdp:
            found.add("all-reduce of gradients between replicas", size // ranks)
    return found.volumes(about=gather if is_bound else None)


def shard_gradients(model: nn.Module) -> int:
    """FSDP2: bytes of the gradients before they are scattered, which a window accumulates unsharded."""
    shards = [(p, group.mp_policy) for _, group, _ in shard_groups(model) for p in group.fsdp_params]
    # In a step, units have other parameters.
    inside = {id(getattr(p, name, None)) for p, _ in shards for name in ("sharded_param", "_unsharded_param")}
    unsharded = sum(
        p._orig_size.numel() * (policy.reduce_dtype or policy.param_dtype or p.sharded_param.dtype).itemsize
        for p, policy in shards
        if p.sharded_param.requires_grad
    )
    return unsharded + local_bytes(p for p in model.parameters() if p.requires_grad and id(p) not in inside)


def shard_dtypes(model: nn.Module) -> tuple[str, str] | None:
    """(computes in, gradients are averaged in) of a model that FSDP2 shards, None for any other."""
    for _, group, _ in shard_groups(model):
        compute = group.mp_policy.param_dtype
        return dtype_name(compute), dtype_name(group.mp_policy.reduce_dtype or compute)
    return None


def dtype_name(dtype: torch.dtype | None) -> str:
    """A dtype in words; None is the parameters' own."""
    return "the parameters' dtype" if dtype is None else str(dtype).removeprefix("torch.")


def _unsharded_bytes(parameter: FSDPParam, dtype: torch.dtype | None, ranks: int) -> int:
    """Bytes of a parameter that `ranks` ranks shard equally, with padding."""
    return parameter.padded_sharded_param_size.numel() * ranks * (dtype or parameter.sharded_param.dtype).itemsize


def flat_volume(model: nn.Module, backwards: int) -> list[CommunicationVolume]:
    """Messages of FSDP1 in a window of so many backwards. Bytes are those of unsharded units."""
    found, sums = VolumeCounter(), "all-reduce of gradients between replicas"
    for unit, handle, _ in flat_units(model):
        flat, kind = handle.flat_param, handle._sharding_strategy.name
        trained = flat.requires_grad
        computed: torch.dtype = handle._fwd_bwd_param_dtype  # type: ignore[assignment]
        reduced: torch.dtype = handle._reduce_dtype  # type: ignore[assignment]
        if kind == "NO_SHARD":
            if trained:
                found.add(sums, flat.numel() * reduced.itemsize)
            continue
        numel = flat._sharded_size.numel() * handle.world_size
        # Resharded: for each forward, and for the backward but of the root. Else kept from the first forward of a
        # window to its last backward.
        times = backwards * (1 if unit is model else 2) if kind in ("FULL_SHARD", "HYBRID_SHARD") else 1
        found.add("all-gather of parameters", times * numel * computed.itemsize, times)
        if not trained:
            continue
        size = numel * reduced.itemsize
        found.add("reduce-scatter of gradients", size)
        if "HYBRID" in kind:
            found.add(sums, size // handle.world_size)
    return found.volumes()


def flat_gradients(model: nn.Module) -> int:
    """FSDP1: bytes by which unsharded gradients are larger than this rank's shards of them."""
    larger = 0
    for _, handle, _ in flat_units(model):
        flat = handle.flat_param
        if flat.requires_grad and handle.uses_sharded_strategy:
            dtype = (handle._fwd_bwd_param_dtype if handle._keep_low_precision_grads else None) or flat.dtype
            numel = flat._unpadded_unsharded_size.numel() * dtype.itemsize
            larger += numel - flat._sharded_size.numel() * flat.dtype.itemsize
    return larger


def tensor_parallel_volume(model: nn.Module, backwards: int) -> list[CommunicationVolume]:
    """Messages of tensor parallelism, with the bytes of one token.

    Activations are summed where a split ends, gradients where it begins; layers with the same input share a sum. Along
    the sequence a sum becomes a scatter in one direction, and a gather in the other.
    """
    split = [module for module in model.modules() if isinstance(module, (ColumnLinear, RowLinear, RowEmbedding))]
    along = any(isinstance(module, RowLinear) and module.along_sequence for module in split)
    found = VolumeCounter(" a token")

    def count(what: str, module: nn.Linear | nn.Embedding, width: int) -> None:
        found.add(what, backwards * width * module.weight.dtype.itemsize, backwards)

    seen: set[int] = set()
    for module in split:
        if isinstance(module, RowEmbedding):
            count("sums of activations over tp, forward", module, module.embedding_dim)
            continue
        if isinstance(module, RowLinear):
            count(f"{'scatters' if along else 'sums'} of activations over tp, forward", module, module.out_features)
            if along:
                count("gathers of gradients over tp, backward", module, module.out_features)
            continue
        if module.gathered:
            count("gathers of outputs over tp, forward", module, module.out_features)
        if id(module.shared) in seen:
            continue
        seen.add(id(module.shared))
        if along and not (module.gathered or module.as_dtensor):
            count("gathers of activations over tp, forward", module, module.in_features)
            count("scatters of gradients over tp, backward", module, module.in_features)
        else:
            count("sums of gradients over tp, backward", module, module.in_features)
    return found.volumes()
