# SPDX-License-Identifier: Apache-2.0
"""`copy.deepcopy` of a model that FSDP2 shards, for averages of its weights (EMA, SWA): torch's raises an error.

The copy is sharded as the model is, by `fully_shard`. Its units are resharded after each forward, so that its
parameters are always the shards, which an average updates.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from ...core.errors import PrepareError
from . import units
from .inference_mode import allow_inference_mode


def support_averages(model: nn.Module) -> None:
    """Let `copy.deepcopy` copy the FSDP2 units of a model, and averages replace its weights after an evaluation."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            kind: Any = type(module)
            kind.__deepcopy__ = _deepcopy
    if isinstance(model, FSDPModule) and model._get_fsdp_state()._auto_reshard_after_forward:
        model.register_forward_hook(_reshard_after_evaluation)


def _reshard_after_evaluation(model: Any, *_: object) -> None:
    """The forward hook of the outermost unit. torch keeps it unsharded for a backward, which may not come.

    What is written to unsharded parameters then is lost, and an average cannot be combined with them.
    """
    if not torch.is_grad_enabled():
        model.reshard()


class NoState:
    """Is in a copied module what FSDP2's state of the unit is in the original one, until the copy is sharded."""

    def __init__(self, state: Any) -> None:
        self.state = state


def _deepcopy(unit: Any, memo: dict[int, Any]) -> nn.Module:
    if id(unit._get_fsdp_state()) in memo:
        return copy_module(unit, memo)
    # The outermost unit of this copy: the units inside are copied with it.
    inside = [module for module in unit.modules() if isinstance(module, FSDPModule)]
    states = {id(state): state for state in (module._get_fsdp_state() for module in inside)}
    for module in inside:
        _reshard(module)
    for key, state in states.items():
        memo[key] = NoState(state)
        for shard in shards(state):
            memo[id(shard.sharded_param)] = shard.sharded_param
    copied = copy_module(unit, memo)
    handles = {number for state in states.values() for number in hook_numbers(state)}
    for each in copied.modules():
        forget_state(each, handles)
    # Children first, as the model was sharded.
    meshes = [group.mesh_info.mesh for state in states.values() for group in units.groups(state)]
    for state in reversed(states.values()):
        if meshes:
            _shard_again(state, memo, meshes[0])
    allow_inference_mode(copied)
    return copied


def copy_module(unit: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """The copy of one unit as a module of the user's class."""
    kind: Any = next(kind for kind in type(unit).__mro__ if not issubclass(kind, FSDPModule))
    copied: nn.Module = kind.__new__(kind)
    memo[id(unit)] = copied
    reduced: Any = unit.__reduce_ex__(4)
    copied.__setstate__(copy.deepcopy(reduced[2], memo))
    return copied


def _reshard(module: Any) -> None:
    for group in units.groups(module._get_fsdp_state()):
        kept = getattr(group, "_kept", None)
        if kept is not None:
            kept.reshard()
    module.reshard()


def shards(state: Any) -> list[Any]:
    """FSDP2's object for each parameter of a unit."""
    return [shard for group in units.groups(state) for shard in group.fsdp_params]


def hook_numbers(state: Any) -> set[int]:
    """The keys of the hooks that FSDP2 has registered for a unit."""
    found = [state._pre_forward_hook_handle, state._post_forward_hook_handle]
    found += [shard._post_load_hook_handle for shard in shards(state)]
    for group in units.groups(state):
        found += group._module_to_pre_save_state_dict_hook_handle.values()
        found += group._module_to_pre_load_state_dict_hook_handle.values()
    single = [one for handle in found for one in getattr(handle, "handles", [handle])]
    return {handle.id for handle in single}


def forget_state(module: nn.Module, handles: set[int]) -> None:
    """Remove from a copied module what `fully_shard` adds."""
    for name, hooks in vars(module).items():
        if name.endswith(("hooks", "hooks_with_kwargs", "hooks_always_called")):
            for number in handles & hooks.keys():
                del hooks[number]
    kept: Any = vars(module).get(STATE_KEY, {})
    for function in [function for function, state in kept.items() if isinstance(state, NoState)]:
        del kept[function]
        vars(module).get(REGISTRY_KEY, {}).pop(function.__name__, None)


def _shard_again(state: Any, memo: dict[int, Any], mesh: Any) -> None:
    """Shard the copy of one unit as the unit is, with the same values; one without parameters over `mesh`."""
    mesh = next((group.mesh_info.mesh for group in units.groups(state)), mesh)
    modules = [memo[id(module)] for module in state._modules]
    fulls = [_unsharded(shard) for shard in shards(state)]
    shard_unit(state, modules, fulls, memo, mesh, reshard=True)
    for shard in shards(state):
        source, (module, name) = shard.sharded_param, places_of(shard, memo)[0]
        present: Any = module._parameters[name]
        with torch.no_grad():
            present.to_local().copy_(source.to_local())
        memo[id(source)] = present


def shard_unit(
    state: Any,
    modules: list[nn.Module],
    fulls: list[nn.Parameter],
    memo: Mapping[int, Any],
    mesh: Any,
    reshard: bool | None,
    offload: bool = True,
) -> None:
    """`fully_shard` of the copy of one unit, with the unit's placements and policies.

    Args:
        state: FSDP2's of the unit that was copied.
        modules: the copies of its modules.
        fulls: for each of its `shards`, the parameter that is sharded.
        memo: id of a module -> its copy.
        mesh: of the shards.
        reshard: `reshard_after_forward`.
        offload: whether the shards are on the host if those of the unit are.
    """
    groups = units.groups(state)
    if len(groups) > 1 or any(getattr(group.mesh_info, "is_spmd_mesh", False) for group in groups):
        raise PrepareError(
            f"copy.deepcopy: {type(state._modules[0]).__name__} was sharded by fully_shard with a mesh for each "
            "parameter, which is not copied. Build the model again, load the state (get_state_dict) and prepare it"
        )
    placements = {}
    for shard, full in zip(shards(state), fulls, strict=True):
        placements[id(full)] = shard.fsdp_placement
        for module, name in places_of(shard, memo):
            module._parameters[name] = full
    rest = {p for module in modules for p in module.parameters() if id(p) not in placements}
    fully_shard(
        modules if len(modules) > 1 else modules[0],
        mesh=mesh,
        reshard_after_forward=reshard,
        shard_placement_fn=lambda parameter: placements[id(parameter)],
        mp_policy=state._mp_policy,
        **({"offload_policy": groups[0].offload_policy} if groups and offload else {}),
        ignored_params=rest,
    )


def places_of(shard: Any, memo: Mapping[int, Any]) -> list[tuple[nn.Module, str]]:
    """Where the copy has a parameter: (module, name) of each of its places."""
    info = shard._module_info
    places = [(info.module, info.param_name), *zip(info.shared_modules, info.shared_param_names, strict=True)]
    return [(memo[id(module)], name) for module, name in places]


def _unsharded(shard: Any) -> nn.Parameter:
    """A parameter as `fully_shard` was given it. It has no values: `fully_shard` frees it at once."""
    sharded = shard.sharded_param
    full = torch.empty(shard._orig_size, dtype=sharded.dtype, device=shard.device)
    if shard.is_dtensor:
        # `_tp_spec` before torch 2.12.
        spec = shard._unsharded_dtensor_spec if hasattr(shard, "_unsharded_dtensor_spec") else shard._tp_spec
        full = DTensor.from_local(
            full, spec.mesh, spec.placements, run_check=False, shape=spec.shape, stride=spec.stride
        )
    return nn.Parameter(full, requires_grad=sharded.requires_grad)
