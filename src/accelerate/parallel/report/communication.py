# SPDX-License-Identifier: Apache-2.0
"""What sharded and tensor-parallel models send in an optimizer step, computed from the layout of their parameters."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ...torch_internals.fsdp2 import (
    group_parameters,
    module_parameter,
    shard_groups,
    sharded_parameter,
)
from ..tensor.layers import ColumnLinear, RowEmbedding, RowLinear
from .figures import CommunicationVolume, VolumeCounter, local_bytes


def shard_volume(model: nn.Module, backwards: int) -> list[CommunicationVolume]:
    """Messages of FSDP2 in a window of so many backwards, with the bytes of unsharded units.

    Each unit is gathered for each forward, and again for the backward if it was resharded in between; its gradients
    are scattered once. A unit without trainable parameters is gathered for a backward only if one passes through it:
    the number is then an upper bound.
    """
    counter = VolumeCounter()
    gather = "all-gather of parameters"
    is_bound = False
    for _, group, resharded in shard_groups(model):
        times: int = backwards * (1 + resharded)
        ranks: int = group.mesh_info.shard_mesh_size  # type: ignore[attr-defined]
        parameters = group_parameters(group)
        dtype = group.mp_policy.param_dtype
        size = sum(_unsharded_bytes(parameter, dtype, ranks) for parameter in parameters)
        counter.add(gather, times * size, times)
        trained = [p for p in parameters if sharded_parameter(p).requires_grad]
        if not trained:
            is_bound = is_bound or resharded
            continue
        dtype = group.mp_policy.reduce_dtype or dtype
        size = sum(_unsharded_bytes(p, dtype, ranks) for p in trained)
        counter.add("reduce-scatter of gradients", size)
        if group.mesh_info.replicate_mesh_dim is not None:
            counter.add("all-reduce of gradients between replicas", size // ranks)
    if is_bound:
        return counter.volumes(about=gather)
    return counter.volumes()


def shard_gradients(model: nn.Module, roots: Iterable[nn.Module]) -> int:
    """Bytes of the gradients of FSDP2's units in `roots` before they are scattered, and of all others in `model`."""
    unsharded = 0
    inside: set[int] = set()
    for _, group, _ in itertools.chain.from_iterable(map(shard_groups, roots)):
        ranks: int = group.mesh_info.shard_mesh_size  # type: ignore[attr-defined]
        dtype = group.mp_policy.reduce_dtype or group.mp_policy.param_dtype
        for shard in group_parameters(group):
            # In a step, units have other parameters.
            inside.add(id(module_parameter(shard)))
            if sharded_parameter(shard).requires_grad:
                unsharded += _unsharded_bytes(shard, dtype, ranks)
    return unsharded + local_bytes(
        p for p in model.parameters() if p.requires_grad and id(p) not in inside
    )


def shard_dtypes(model: nn.Module) -> tuple[torch.dtype | None, torch.dtype | None] | None:
    """(computes in, gradients are averaged in) of the policy of FSDP2's units; None without units."""
    for _, group, _ in shard_groups(model):
        policy = group.mp_policy
        return policy.param_dtype, policy.reduce_dtype or policy.param_dtype
    return None


def _unsharded_bytes(parameter: Any, dtype: torch.dtype | None, ranks: int) -> int:
    """Bytes of a parameter that `ranks` ranks shard equally, with padding."""
    numel: int = parameter.padded_sharded_param_size.numel() * ranks
    return numel * (dtype or sharded_parameter(parameter).dtype).itemsize


def tensor_parallel_volume(model: nn.Module, backwards: int) -> list[CommunicationVolume]:
    """Messages of tensor parallelism, with the bytes of one token.

    Activations are summed where a split ends, gradients where it begins; layers with the same input share a sum. Along
    the sequence a sum becomes a scatter in one direction, and a gather in the other.
    """
    split = [
        module
        for module in model.modules()
        if isinstance(module, (ColumnLinear, RowLinear, RowEmbedding))
    ]
    along = any(isinstance(module, RowLinear) and module.along_sequence for module in split)
    counter = VolumeCounter(" a token")

    def count(what: str, module: nn.Linear | nn.Embedding, width: int) -> None:
        counter.add(what, backwards * width * module.weight.dtype.itemsize, backwards)

    seen: set[int] = set()
    for module in split:
        if isinstance(module, RowEmbedding):
            count("sums of activations over tp, forward", module, module.embedding_dim)
            continue
        if isinstance(module, RowLinear):
            if along:
                count("scatters of activations over tp, forward", module, module.out_features)
                count("gathers of gradients over tp, backward", module, module.out_features)
            else:
                count("sums of activations over tp, forward", module, module.out_features)
            continue
        if module.gathered:
            count("gathers of outputs over tp, forward", module, module.out_features)
        if id(module.shared) in seen:
            continue
        seen.add(id(module.shared))
        if along and not module.gathered:
            count("gathers of activations over tp, forward", module, module.in_features)
            count("scatters of gradients over tp, backward", module, module.in_features)
        else:
            count("sums of gradients over tp, backward", module, module.in_features)
    return counter.volumes()
