# SPDX-License-Identifier: Apache-2.0
"""The whole state of sharded models and optimizers: taken to rank 0, and spread from there."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from ..core.errors import CheckpointError
from . import materialize


def full_model_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """The whole state under plain names, copied to the host of rank 0; empty on the others. Every rank calls it."""
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    return _detached(state)


def load_full_model_state(
    model: nn.Module, state: Mapping[str, torch.Tensor], device: torch.device, strict: bool = True
) -> None:
    """Take a whole state, which rank 0 alone needs to hold, one tensor at a time. Every rank calls it.

    Raises PrepareError for a tensor of the model that the state lacks (with `strict`) or has in another shape, and
    CheckpointError for one that the model lacks.
    """
    targets = _state_tensors(model)
    known = {name for names, _ in targets for name in names}
    if strict and (unknown := [name for name in state if name not in known]):
        raise CheckpointError(f"the state holds {len(unknown)} tensors the model does not: {', '.join(unknown[:5])}")
    # A tied tensor has several names, and a state may hold it under any of them.
    chosen = [(next((name for name in names if name in state), names[0]), tensor) for names, tensor in targets]
    offered = [[name for name, _ in chosen]]
    dist.broadcast_object_list(offered, src=0, device=device)
    chosen = [(name, tensor) for name, (_, tensor) in zip(offered[0], chosen, strict=True)]
    materialize.spread(dict(state), chosen, device, strict=strict)


def _state_tensors(model: nn.Module) -> list[tuple[list[str], torch.Tensor]]:
    """(its plain names, tensor) for all that a state dict holds."""
    found: dict[int, tuple[list[str], torch.Tensor]] = {}
    persistent = {materialize.canonical_name(name) for name in model.state_dict()}
    for named in (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)):
        for name, tensor in named:
            name = materialize.canonical_name(name)
            if name in persistent:
                found.setdefault(id(tensor), ([], tensor))[0].append(name)
    return list(found.values())


def full_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The whole state by parameter name, copied to the host of rank 0; empty on the others. Every rank calls it."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    # What torch gives aliases the optimizer's counters, which its next step would change under the reader.
    return copy.deepcopy(get_optimizer_state_dict(model, _plain(optimizer), options=options))


def load_full_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Take a whole state, which rank 0 alone needs to hold. Every rank calls it."""
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, cpu_offload=False)
    set_optimizer_state_dict(model, _plain(optimizer), copy.deepcopy(dict(state)), options=options)


def _detached(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state that shares no memory with the model; names of one tied tensor share theirs with each other."""
    copies: dict[int, torch.Tensor] = {}

    def own(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in copies:
            copies[id(value)] = value.detach().clone()
        return copies[id(value)]

    return {name: own(value) for name, value in state.items()}


def _plain(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer inside a prepared one."""
    return getattr(optimizer, "optimizer", optimizer)
