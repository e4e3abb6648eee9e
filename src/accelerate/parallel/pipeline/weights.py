# SPDX-License-Identifier: Apache-2.0
"""Weights on their way to the stages: each rank keeps those of its own, with the values that the first rank has."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...core.errors import PrepareError
from .. import materialize


def own_names(model: nn.Module, holders: Mapping[int, set[int]], own: Collection[int]) -> set[str]:
    """Plain names of the parameters and read buffers that stages with units of `own` numbers hold, tied ones' too."""
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return {materialize.canonical_name(name) for name, tensor in named if holders.get(id(tensor), set()) & set(own)}


def absent_modules(model: nn.Module, units: tuple[str, ...], own: Collection[int]) -> list[nn.Module]:
    return [model.get_submodule(name) for number, name in enumerate(units) if number not in own]


@torch.no_grad()
def deal(model: nn.Module, names: set[str], absent: list[nn.Module], device: torch.device) -> bool:
    """Give the parameters and buffers in `names`, and the buffers of present modules, rank 0's values on `device`.

    All other tensors lose their memory. Every rank calls it with a model of the same structure. False: rank 0 has no
    weights (they are on meta), and those of the own stages are to be initialised.
    """
    listed = list(materialize.named_tensors(model))
    _check_same([(name, tuple(tensor.shape), tensor.dtype) for name, tensor in listed], device)
    meta = materialize.gather_flags(any(tensor.is_meta for _, tensor in listed), device, None)
    strange = {id(buffer) for module in absent for buffer in module.buffers()}
    wanted = [
        name in names or not (isinstance(tensor, nn.Parameter) or id(tensor) in strange) for name, tensor in listed
    ]
    if not meta[0]:
        for (_, tensor), keep in zip(listed, wanted, strict=True):
            _spread(tensor, keep, device)
    kept = {id(tensor) for (_, tensor), keep in zip(listed, wanted, strict=True) if keep}
    _forget(model, kept, device, all_meta=meta[0])
    return not meta[0]


def _spread(tensor: torch.Tensor, keep: bool, device: torch.device) -> None:
    """One tensor from rank 0 to all; on meta it is filled later, when the model's own has memory."""
    shared = dist.get_world_size() > 1
    if dist.get_rank() == 0:
        value = tensor.data.to(device).contiguous()
    else:
        value = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    if shared:
        dist.broadcast(value, src=0)
    if keep:
        tensor.__dict__["_dealt"] = value


def _forget(model: nn.Module, kept: set[int], device: torch.device, all_meta: bool) -> None:
    """Put dealt values in their places, and tensors on meta in those of the others. What is tied stays tied."""
    seen: dict[int, torch.Tensor] = {}
    former: list[torch.Tensor] = []
    for module in model.modules():
        for kind in (module._parameters, module._buffers):
            for name, tensor in kind.items():
                if tensor is None:
                    continue
                if id(tensor) not in seen:
                    former.append(tensor)
                    seen[id(tensor)] = _placed(tensor, id(tensor) in kept, all_meta)
                kind[name] = seen[id(tensor)]  # type: ignore[assignment]


def _placed(tensor: torch.Tensor, keep: bool, all_meta: bool) -> torch.Tensor:
    if keep and all_meta and tensor.is_meta:
        return tensor
    if keep:
        value = tensor.__dict__.pop("_dealt", None)
        value = tensor.data if value is None else value
        if not tensor.is_meta:
            # The object stays: an optimizer may hold it.
            tensor.data = value
            return tensor
    else:
        value = tensor.data.to("meta")
    if not isinstance(tensor, nn.Parameter):
        return value
    present = nn.Parameter(value, requires_grad=tensor.requires_grad)
    present.__dict__.update(tensor.__dict__)
    return present


def _check_same(listed: list[tuple[str, Any, Any]], device: torch.device) -> None:
    told = [listed if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(told, src=0, device=device)
    first = told[0] or []
    if [entry[:2] for entry in first] != [entry[:2] for entry in listed]:
        different = next(
            (a[0] for a, b in zip(first, listed, strict=False) if a[:2] != b[:2]), "the number of tensors"
        )
        raise PrepareError(f"this rank's model is another than rank 0's ({different}): all ranks must build the same")


def initialise(stages: Iterable[nn.Module], device: torch.device, group: dist.ProcessGroup | None) -> None:
    """Give units without weights their first values, the same on all ranks of `group`, which hold the same stage."""
    for stage in stages:
        if materialize.where_meta(stage) is None:
            continue
        materialize.allocate(stage, device)
        materialize.initialise(stage, device, group)
