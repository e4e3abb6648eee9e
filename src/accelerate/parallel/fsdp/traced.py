# SPDX-License-Identifier: Apache-2.0
"""A copy of a sharded model on fake tensors, to trace what its step needs: sharded in the same way, or with changes.

It is made at any moment of a step, from what torch keeps of the units. The model itself stays as it is, and no rank
sends anything.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule

from ...core.errors import PrepareError
from ..activation import checkpoint_activations
from ..prepared import Change
from ..report.ledger import as_dtensor, fake_copy, on_cpu
from . import units
from .copies import NoState, copy_module, forget_state, hook_numbers, shard_unit, shards, unsharded_spec

if TYPE_CHECKING:
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState


def changes(model: nn.Module) -> dict[Change, str]:
    """The changes of units that a trace can try, with what they are called."""
    found: dict[Change, str] = {}
    states = _states(model)
    if any(not _reshards(state) for state in states[1:]):
        found[Change(reshard=True)] = "reshard_after_forward=True"
    if states:
        found[Change(reduce=True)] = "GradientAccumulationPlugin(sync_each_batch=True)"
    if any(group.device.type != "cpu" for state in states for group in units.groups(state)) and not offloads(model):
        found[Change(offload=True)] = "keep the shards in host memory (fsdp_offload_params)"
    return found


def offloads(model: nn.Module) -> bool:
    """Whether shards are on the host between their uses, and the computation is not."""
    found = [group for state in _states(model) for group in units.groups(state)]
    return any(isinstance(group.offload_policy, CPUOffloadPolicy) and group.device.type != "cpu" for group in found)


def inner_units(model: nn.Module) -> list[nn.Module]:
    """The modules that are units inside of the outermost one, and in no other unit."""
    found = [module for state in _states(model)[1:] for module in state._modules]
    inside = {id(child) for module in found for child in module.modules() if child is not module}
    return [module for module in found if id(module) not in inside]


def fake_sharded_copy(
    model: nn.Module, change: Change, blocks: Iterable[nn.Module], memo: dict[int, Any] | None = None
) -> nn.Module:
    """The copy, with the change. Call it in a fake mode.

    Args:
        model: in any state of a step.
        change: of the copy.
        blocks: modules that recompute their activations.
        memo: id of an object -> what the copy has instead; extended.

    Raises:
        PrepareError: torch keeps too little of the units to shard the copy without other ranks.
    """
    states, memo = _states(model), {} if memo is None else memo
    fulls: dict[int, list[nn.Parameter]] = {}
    for state in states:
        memo[id(state)] = NoState(state)
        fulls[id(state)] = [_full(shard, memo) for shard in shards(state)]
    with contextlib.ExitStack() as stack:
        for kind in {type(module) for module in model.modules() if isinstance(module, FSDPModule)}:
            stack.enter_context(mock.patch.object(kind, "__deepcopy__", copy_module))
        copied = fake_copy(model, memo)
    handles = {number for state in states for number in hook_numbers(state)}
    for module in copied.modules():
        forget_state(module, handles)
    wrappers: dict[int, nn.Module] = {}
    if change.checkpointing:
        copies = [memo[id(block)] for block in blocks]
        wrapped = checkpoint_activations(copied, copies, torch.device("cpu"))
        wrappers = {id(block): wrapper for block, wrapper in zip(copies, wrapped, strict=True)}
    meshes = [group.mesh_info.mesh for state in states for group in units.groups(state)]
    # Children first, as the model was sharded.
    for state in reversed(states):
        modules = [memo[id(module)] for module in state._modules]
        modules = [wrappers.get(id(module), module) for module in modules]
        mesh = next((group.mesh_info.mesh for group in units.groups(state)), meshes[0])
        reshard = True if change.reshard and state is not states[0] else _reshards(state)
        auto = state._auto_reshard_after_forward or (change.reshard and state is states[0])
        shard_unit(
            state, modules, fulls[id(state)], memo, on_cpu(mesh, memo), None if auto else reshard, offload=False
        )
    return copied


def _states(model: nn.Module) -> list[FSDPState]:
    """What torch keeps of each unit, the outermost first."""
    found = [module._get_fsdp_state() for module in model.modules() if isinstance(module, FSDPModule)]
    return list({id(state): state for state in found}.values())


def _reshards(state: FSDPState) -> bool:
    """Whether a unit is resharded after its forward."""
    for group in units.groups(state):
        after = group.post_forward_mesh_info
        if after is not None and after is not group.mesh_info and not state._auto_reshard_after_forward:
            raise PrepareError("reshard_after_forward with a number of ranks makes groups of ranks")
        return bool(group._reshard_after_forward)
    return True


def _full(shard: FSDPParam, memo: dict[int, Any]) -> nn.Parameter:
    """The full parameter of the copy; `memo` has it for each parameter that a module may have instead of it now."""
    sharded = shard.sharded_param
    value = torch.empty(shard._orig_size, dtype=sharded.dtype, device="cpu")
    if shard.is_dtensor:
        value = as_dtensor(value, unsharded_spec(shard), memo)
    full = nn.Parameter(value, requires_grad=sharded.requires_grad)
    for name in ("sharded_param", "_unsharded_param", "_sharded_post_forward_param"):
        present = getattr(shard, name, None)
        if present is not None:
            memo[id(present)] = full
    return full
