# SPDX-License-Identifier: Apache-2.0
"""Averages of the weights of sharded models (EMA, SWA): `copy.deepcopy`, and torch's operation on lists of tensors.

torch's `copy.deepcopy` of a model that FSDP2 shards raises an error. Here the copy is sharded as the model is, by
`fully_shard`. Its units are resharded after each forward, so that its parameters are always the shards, which an
average updates.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from ...core.errors import PrepareError
from ..materialize import local_shard
from . import units
from .inference_mode import allow_inference_mode

if TYPE_CHECKING:
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState


def support_mixed_lists() -> None:
    """Let `torch._foreach_lerp_` take lists of DTensors and plain tensors.

    `torch.optim.swa_utils` gives it parameters and buffers of one dtype together, and torch refuses mixed lists.
    """
    DTensor._op_dispatcher._custom_op_handlers[torch.ops.aten._foreach_lerp_.Scalar] = _lerp


def _lerp(op_call: object, args: tuple[Any, ...], kwargs: Mapping[str, object]) -> None:
    averages, values, weight = args
    pairs = [_local(average, value) for average, value in zip(averages, values, strict=True)]
    torch._foreach_lerp_([average for average, _ in pairs], [value for _, value in pairs], weight)


def _local(average: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's shards of a tensor and of the one it is averaged with, in the layout of the first."""
    if not isinstance(average, DTensor):
        return average, value.full_tensor() if isinstance(value, DTensor) else value
    if not isinstance(value, DTensor):
        return average.to_local(), local_shard(value, average)
    return average.to_local(), value.redistribute(average.device_mesh, average.placements).to_local()


def support_averages(model: nn.Module) -> None:
    """Let `copy.deepcopy` copy the FSDP2 units of a model, and averages replace its weights after an evaluation."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            type(module).__deepcopy__ = _deepcopy  # type: ignore[attr-defined]
    if isinstance(model, FSDPModule) and model._get_fsdp_state()._auto_reshard_after_forward:
        model.register_forward_hook(_reshard_after_evaluation)


def _reshard_after_evaluation(model: nn.Module, *_: object) -> None:
    """The forward hook of the outermost unit. torch keeps it unsharded for a backward, which may not come.

    What is written to unsharded parameters then is lost, and an average cannot be combined with them.
    """
    if not torch.is_grad_enabled():
        model.reshard()  # type: ignore[operator]


@dataclass(eq=False)
class NoState:
    """Is in a copied module what FSDP2's state of the unit is in the original one, until the copy is sharded."""

    state: FSDPState


def _deepcopy(unit: nn.Module, memo: dict[int, Any]) -> nn.Module:
    assert isinstance(unit, FSDPModule)
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
    copied.__setstate__(copy.deepcopy(unit.__reduce_ex__(4)[2], memo))
    return copied


def _reshard(module: FSDPModule) -> None:
    for group in units.groups(module._get_fsdp_state()):
        kept = getattr(group, "_kept", None)
        if kept is not None:
            kept.reshard()
    module.reshard()


def shards(state: FSDPState) -> list[FSDPParam]:
    """FSDP2's object for each parameter of a unit."""
    return [shard for group in units.groups(state) for shard in group.fsdp_params]


def hook_numbers(state: FSDPState) -> set[int]:
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


def _shard_again(state: FSDPState, memo: dict[int, Any], mesh: DeviceMesh) -> None:
    """Shard the copy of one unit as the unit is, with the same values; one without parameters over `mesh`."""
    mesh = next((group.mesh_info.mesh for group in units.groups(state)), mesh)
    modules = [memo[id(module)] for module in state._modules]
    fulls = [_unsharded(shard) for shard in shards(state)]
    shard_unit(state, modules, fulls, memo, mesh, reshard=True)
    for shard in shards(state):
        source, (module, name) = shard.sharded_param, places_of(shard, memo)[0]
        present = module._parameters[name]
        assert isinstance(source, DTensor) and isinstance(present, DTensor)
        with torch.no_grad():
            present.to_local().copy_(source.to_local())
        memo[id(source)] = present


def shard_unit(
    state: FSDPState,
    modules: list[nn.Module],
    fulls: list[nn.Parameter],
    memo: Mapping[int, Any],
    mesh: DeviceMesh,
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
        offload_policy=groups[0].offload_policy if groups and offload else OffloadPolicy(),
        ignored_params=rest,
    )


def places_of(shard: FSDPParam, memo: Mapping[int, Any]) -> list[tuple[nn.Module, str]]:
    """Where the copy has a parameter: (module, name) of each of its places."""
    info = shard._module_info
    places = [(info.module, info.param_name), *zip(info.shared_modules, info.shared_param_names, strict=True)]
    return [(memo[id(module)], name) for module, name in places]


def _unsharded(shard: FSDPParam) -> nn.Parameter:
    """A parameter as `fully_shard` was given it. It has no values: `fully_shard` frees it at once."""
    sharded = shard.sharded_param
    full = torch.empty(shard._orig_size, dtype=sharded.dtype, device=shard.device)
    if shard.is_dtensor:
        spec = unsharded_spec(shard)
        full = DTensor.from_local(
            full, spec.mesh, spec.placements, run_check=False, shape=spec.shape, stride=spec.stride
        )
    return nn.Parameter(full, requires_grad=sharded.requires_grad)


def unsharded_spec(shard: FSDPParam) -> DTensorSpec:
    """The layout of a parameter that was a DTensor when `fully_shard` was given it."""
    # Before torch 2.12 it has another name.
    spec: DTensorSpec = getattr(shard, "_unsharded_dtensor_spec", None) or shard._tp_spec  # type: ignore[attr-defined]
    return spec
