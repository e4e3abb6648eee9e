# SPDX-License-Identifier: Apache-2.0
"""What sharded and split models send in an optimizer step, told from how their parameters lie."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from .base import Traffic


def shard_traffic(model: nn.Module, backwards: int) -> list[Traffic]:
    """FSDP2: every unit is gathered for each forward, again for its backward where it was resharded between, and its
    gradients are scattered once. Bytes are those of whole units, as they are gathered."""
    gathers, gathered, scatters, scattered, copies, copied = 0, 0, 0, 0, 0, 0
    for _, group, resharded in shard_groups(model):
        again = 1 + resharded
        gathers += backwards * again
        gathered += backwards * again * sum(_whole(p, group.mp_policy.param_dtype) for p in group.fsdp_params)
        trained = [p for p in group.fsdp_params if p.sharded_param.requires_grad]
        if not trained:
            continue
        dtype = group.mp_policy.reduce_dtype or group.mp_policy.param_dtype
        size = sum(_whole(p, dtype) for p in trained)
        scatters, scattered = scatters + 1, scattered + size
        if group._is_hsdp:
            copies, copied = copies + 1, copied + size // group.mesh_info.shard_mesh_size
    found = [Traffic("all-gather of parameters", gathers, gathered)]
    found.append(Traffic("reduce-scatter of gradients", scatters, scattered))
    if copies:
        found.append(Traffic("all-reduce of gradients between copies", copies, copied))
    return [one for one in found if one.messages]


def shard_dtypes(model: nn.Module) -> tuple[str, str] | None:
    """(computes in, gradients are averaged in) of a model that FSDP2 shards, None for any other."""
    for _, group, _ in shard_groups(model):
        policy = group.mp_policy
        compute = policy.param_dtype
        return _name(compute), _name(policy.reduce_dtype or compute)
    return None


def _name(dtype: torch.dtype | None) -> str:
    return "the parameters' dtype" if dtype is None else str(dtype).removeprefix("torch.")


def shard_groups(model: nn.Module) -> Iterator[tuple[nn.Module, Any, bool]]:
    """(module, its group of parameters, whether that is resharded between forward and backward) of each FSDP2 unit."""
    root = None
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        root = root or module
        state = module._get_fsdp_state()
        # torch decides for the outermost unit at its first forward: what it gathers last is needed first.
        kept = module is root and state._auto_reshard_after_forward
        for group in state._fsdp_param_groups:
            yield module, group, bool(group._reshard_after_forward) and not kept


def _whole(parameter: Any, dtype: torch.dtype | None) -> int:
    return int(parameter._orig_size.numel()) * (dtype or parameter.orig_dtype).itemsize


def split_traffic(model: nn.Module, backwards: int) -> list[Traffic]:
    """Tensor parallelism: a sum over the ranks where a split meets: after rows in the forward, before columns in the
    backward. Bytes are those of one token."""
    ends = {"forward": (0, 0), "backward": (0, 0)}
    for module in model.modules():
        weight = module._parameters.get("weight")
        if not isinstance(module, nn.Linear) or not isinstance(weight, DTensor):
            continue
        names = weight.device_mesh.mesh_dim_names or ()
        place = weight.placements[names.index("tp")] if "tp" in names else None
        if not isinstance(place, Shard):
            continue
        when, width = ("forward", module.out_features) if place.dim == 1 else ("backward", module.in_features)
        messages, sent = ends[when]
        ends[when] = messages + backwards, sent + backwards * width * weight.dtype.itemsize
    return [
        Traffic(f"sums of activations over tp, {when}", messages, sent, " a token")
        for when, (messages, sent) in ends.items()
        if messages
    ]
