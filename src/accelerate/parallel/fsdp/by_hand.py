# SPDX-License-Identifier: Apache-2.0
"""The API's functions for those who shard with FSDP2 by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from ...config.fsdp import EFFICIENT_LOADING
from ...core import env
from ...core.errors import PrepareError
from ...core.modules import direct_parameters
from ...runtime import mesh
from .. import materialize
from ..activation import checkpoint_activations
from ..sharded_optimizer import ParameterPlaces, repoint_all
from . import state as fsdp_state
from .strategy import shard_model
from .units import select_units

T = TypeVar("T")

# `accelerator` gives the plugin, the device and the mesh.


def fsdp2_prepare_model(accelerator: Any, model: nn.Module) -> nn.Module:
    """Shard a model in place as `accelerator.prepare` does; optimizers are unchanged."""
    if isinstance(model, FSDPModule):
        return model
    layout, device_mesh = accelerator.parallelism_config, accelerator.torch_device_mesh
    if layout is None or device_mesh is None:
        layout = mesh.all_sharded(dist.get_world_size())
        device_mesh = mesh.build_mesh(layout, dist.get_world_size(), accelerator.device.type)
    shards = mesh.fsdp_mesh(layout, device_mesh, accelerator.device)
    return shard_model(model, accelerator.state.fsdp_plugin, shards, accelerator.device)


def fsdp2_prepare_auto_wrap_policy(
    fsdp2_plugin: Any, model: nn.Module
) -> Callable[[nn.Module], bool] | None:
    """Return the plugin's wrap policy, which tells whether a module is a separate unit; None without a policy."""
    plugin = copy.copy(fsdp2_plugin)
    plugin.set_auto_wrap_policy(model)
    units = select_units(model, plugin.auto_wrap_policy, set())
    if plugin.auto_wrap_policy is None:
        return None
    return lambda module: any(module is unit for unit in units)


def fsdp2_apply_ac(accelerator: Any, model: nn.Module) -> nn.Module:
    """Make the units of the plugin's wrap policy recompute activations in the backward pass, in place."""
    plugin = copy.copy(accelerator.state.fsdp_plugin)
    plugin.set_auto_wrap_policy(model)
    units = select_units(model, plugin.auto_wrap_policy, set())
    checkpoint_activations(
        model, units, accelerator.device, bool(plugin.activation_checkpointing_offload)
    )
    return model


def fsdp2_load_full_state_dict(
    accelerator: Any,
    model: nn.Module,
    full_sd: Mapping[str, torch.Tensor],
    cpu_offload: bool = False,
) -> None:
    """Fill a sharded model from a full state on rank 0; parameters without storage get storage."""
    materialize.allocate(model, accelerator.device, torch.device("cpu") if cpu_offload else None)
    fsdp_state.load_full_model_state(model, dict(full_sd), accelerator.device)


def enable_fsdp_ram_efficient_loading() -> None:
    """Make libraries that load weights before `prepare` do so only on rank 0 (FSDP_CPU_RAM_EFFICIENT_LOADING)."""
    env.publish({EFFICIENT_LOADING: True})


def disable_fsdp_ram_efficient_loading() -> None:
    """Make libraries that load weights before `prepare` do so on every rank."""
    env.publish({EFFICIENT_LOADING: False})


def ensure_weights_retied(
    param_init_fn: Callable[[nn.Module], object], model: nn.Module, device: torch.device
) -> Callable[[nn.Module], object]:
    """`param_init_fn` that gives parameters which are tied in `model` one new parameter, on `device`, everywhere."""
    ties: dict[tuple[int, str], int] = {}
    for number, places in enumerate(ParameterPlaces(model).shared()):
        ties.update({(id(module), name): number for module, name in places})
    if not ties:
        return param_init_fn
    made: dict[int, nn.Parameter] = {}

    def init_and_tie(module: nn.Module) -> nn.Module:
        param_init_fn(module)
        for name, parameter in direct_parameters(module).items():
            number = ties.get((id(module), name))
            if number is None:
                continue
            if number not in made:
                # Only what this call has given storage counts: a parameter left on meta is not it.
                if not parameter.is_meta:
                    made[number] = parameter
                else:
                    made[number] = nn.Parameter(
                        torch.empty_like(parameter, device=device),
                        requires_grad=parameter.requires_grad,
                    )
            module.register_parameter(name, made[number])
        return module

    return init_and_tie


def fsdp2_switch_optimizer_parameters(
    optimizer: torch.optim.Optimizer, mapping: Mapping[nn.Parameter | int, nn.Parameter]
) -> None:
    """Have an optimizer train sharded parameters; `mapping` leads from each former one, or its `data_ptr()`, to it.

    Raises PrepareError where the mapping knows none of a group's parameters: the group would train nothing.
    """
    sharded = set(mapping.values())
    pairs: list[tuple[nn.Parameter, nn.Parameter]] = []
    for index, group in enumerate(optimizer.param_groups):
        trains_sharded = False
        for former in group["params"]:
            present = mapping.get(former)
            if present is None:
                # A parameter without storage (meta) has the address 0 like any other of its kind.
                present = mapping.get(former.data_ptr() or -1, former)
            if present is not former:
                pairs.append((former, present))
            trains_sharded = trains_sharded or present in sharded
        if group["params"] and not trains_sharded:
            raise PrepareError(
                f"none of the parameters in the optimizer's group {index} belongs to the sharded "
                "model, so the group would not train anything. Create the optimizer from the "
                "model that is prepared."
            )
    repoint_all([optimizer], pairs)


def fsdp2_canonicalize_names(named_params: Mapping[str, T]) -> dict[str, T]:
    """Return a mapping under the names of the plain model.

    Args:
        named_params: name in the prepared model, with the prefixes of wrappers -> value.
    """
    return {materialize.canonical_name(name): value for name, value in named_params.items()}


def get_fsdp2_grad_scaler(**kwargs: Any) -> torch.amp.GradScaler:
    """A gradient scaler for sharded parameters: an overflow on one rank is an overflow on all."""
    return torch.amp.GradScaler(**kwargs)
