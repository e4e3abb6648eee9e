# SPDX-License-Identifier: Apache-2.0
"""Fully sharded data parallelism: torch's `fully_shard` (FSDP2)."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from ...collectives import transport
from ...config.fsdp import EFFICIENT_LOADING, FullyShardedDataParallelPlugin
from ...core import env
from ...core.devices import kind_of
from ...core.errors import ConfigurationError, PrepareError
from ...parallelism_config import ParallelismConfig
from ...precision.base import Precision
from ...runtime import group, mesh
from .. import materialize
from ..activation import checkpoint_activations
from ..adopted.sharing import find_layout, reducers_of
from ..gradients import refuse_gradient_hooks, refuse_later_hooks
from ..remap import ParameterPlaces, lay_out_state
from ..report.communication import shard_gradients
from ..sharded import ShardedModel, ShardedStrategy
from ..tensor import strategy as tensor
from . import state as fsdp_state
from .common import UnreducedGradients, added_parameter, fill_policy, keep_unpacked, refuse_unshardable
from .copies import support_averages
from .double_backward import KeptUnsharded
from .inference_mode import allow_inference_mode
from .units import find_modules, select_units, shard_groups, shards_of, units_of_rare_dtypes

T = TypeVar("T")


class Fsdp2Model(ShardedModel):
    """A model whose units FSDP2 shards."""

    _syncs = True  # whether a backward reduces gradients
    kept: KeptUnsharded | None = None  # for gradients of gradients

    @functools.cached_property
    def outer_units(self) -> list[FSDPModule]:
        """The FSDP2 units that are in no other one."""
        units = [module for module in self.inner.modules() if isinstance(module, FSDPModule)]
        nested = {id(child) for unit in units for child in unit.modules() if child is not unit}
        return [unit for unit in units if id(unit) not in nested]

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards in this context do not reduce gradients; blocks may be nested."""
        before, self._syncs = self._syncs, False
        for unit in self.outer_units:
            unit.set_requires_gradient_sync(False)
        try:
            with super().no_sync():
                yield
        finally:
            self._syncs = before
            for unit in self.outer_units:
                unit.set_requires_gradient_sync(before)

    def reshard(self) -> None:
        """Reshard all FSDP2 units."""
        if self.kept is not None:
            self.kept.reshard()
        else:
            super().reshard()

    def new_parameters(self) -> dict[str, nn.Parameter]:
        """Trainable parameters that no unit has: nothing averages their gradients."""
        known = {id(p) for reducer in self.reducers for p in getattr(reducer, "parameters", ())}
        return {
            name: parameter
            for name, parameter in self.inner.named_parameters()
            if parameter.requires_grad and not isinstance(parameter, DTensor) and id(parameter) not in known
        }

    def added_parameter(self, name: str) -> PrepareError:
        """The error for a parameter of `new_parameters`."""
        return added_parameter(name, type(self.inner).__name__, "FSDP2")

    def window_gradients(self) -> int:
        """Those of FSDP2's units, unsharded, and of all others."""
        return shard_gradients(self.inner)


class FullyShardedDataParallel(ShardedStrategy):
    """Each rank keeps a shard of every parameter, gradient and optimizer state; units are gathered to compute."""

    name = "FSDP2"

    def __init__(
        self,
        device: torch.device,
        precision: Precision,
        plugin: FullyShardedDataParallelPlugin,
        parallelism: ParallelismConfig | None = None,
    ) -> None:
        self.full_outputs: bool = fill_policy(plugin, 2, precision)
        super().__init__(device, precision, parallelism)
        sent = transport.capabilities_of(transport.group_of(None)).kinds
        if plugin.offloads_shards and device.type not in ("cpu", "meta") and "cpu" not in sent:
            raise ConfigurationError(
                f"cpu_offload keeps shards and gradients in host memory, and the process group ({dist.get_backend()}) "
                f"sends tensors of {device.type} devices only. Make the Accelerator before any other state, or join "
                f"the group with backend={group.with_host(kind_of(device))!r}"
            )
        self.plugin = plugin
        self.shards: dist.DeviceMesh = mesh.fsdp_mesh(self.layout, self.mesh, device)
        self.gradient_group: dist.ProcessGroup | None = mesh.group_of(self.mesh, "dp_cp")

    def as_prepared(self, module: nn.Module) -> Fsdp2Model:
        """A prepared model with the plugin's kind of checkpoint."""
        return Fsdp2Model(
            module, self.precision, self.device, self.sequence,
            saves_shards=self.plugin.state_dict_type.name == "SHARDED_STATE_DICT",  # type: ignore[union-attr]
        )  # fmt: skip

    def lay_out(self, model: nn.Module) -> Fsdp2Model:
        """Shard one model in place; one that is sharded already is only cast."""
        prepared = self.as_prepared(model)
        if isinstance(model, FSDPModule):
            _, averages = find_layout([model])
            self.cast_parameters(model)
            prepared.reducers = reducers_of(model, averages, self.gradient_group)
            return self._watched(prepared)
        refuse_unshardable(model, self.name, self.plugin.ignored_modules)
        keep_unpacked(model)
        refuse_gradient_hooks(model, self.name)
        self._refuse_shared(model)
        split = None
        if self.layout.tp_enabled and self.mesh is not None:
            split = functools.partial(tensor.split_model, ranks=self.mesh["tp"], options=self.layout.tp_handler)
        shard_model(model, self.plugin, self.shards, self.device, split=split, full_outputs=self.full_outputs)
        self.cast_parameters(model)
        refuse_later_hooks(shard.sharded_param for shard in shards_of([model]))
        rest = [parameter for parameter in model.parameters() if not isinstance(parameter, DTensor)]
        prepared.reducers.append(UnreducedGradients(self.gradient_group, rest))
        return self._watched(prepared)

    def _watched(self, prepared: Fsdp2Model) -> Fsdp2Model:
        allow_inference_mode(prepared.inner)
        prepared.kept = KeptUnsharded(prepared.inner)
        support_averages(prepared.inner)
        for module in prepared.inner.modules():
            if isinstance(module, FSDPModule):
                type(module).zero_grad = _zero_grad  # type: ignore[assignment, method-assign]
        return prepared

    def backward(self, loss: torch.Tensor, **kwargs: object) -> None:
        """As the base class; after a backward that created a graph, all units are unsharded."""
        found = [prepared.kept for prepared in self.prepared if isinstance(prepared, Fsdp2Model) and prepared.kept]
        active = [kept for kept in found if kept.active]
        for kept in active:
            kept.gather()
        super().backward(loss, **kwargs)
        for kept in active:
            kept.reduce()
        for kept in found:
            if kept.active:
                kept.show_shards()

    def _refuse_shared(self, model: nn.Module) -> None:
        """Raise PrepareError for a parameter that another model has, which is sharded already."""
        own = {id(p) for unit in model.modules() if isinstance(unit, FSDPModule) for p in unit.parameters()}
        for name, parameter in model.named_parameters():
            if isinstance(parameter, DTensor) and parameter.device_mesh == self.shards and id(parameter) not in own:
                raise PrepareError(
                    f"{name} is a parameter of another model too, which {self.name} has sharded already, and torch "
                    "shards a parameter in one model only. Put both into one nn.Module and prepare that, or use DDP"
                )


def _zero_grad(unit: nn.Module, set_to_none: bool = True) -> None:
    """Clear the gradients of the shards, too.

    torch keeps the outermost unit unsharded between a forward and its backward, so `parameters()` are then other
    tensors than the optimizer's.
    """
    super(FSDPModule, unit).zero_grad(set_to_none)  # type: ignore[misc]
    for _, parameters, _ in shard_groups(unit):
        for shard in parameters.fsdp_params:
            gradient = shard.sharded_param.grad
            if set_to_none:
                shard.sharded_param.grad = None
            elif gradient is not None:
                gradient.detach_().zero_()


def shard_model(
    model: nn.Module,
    plugin: FullyShardedDataParallelPlugin,
    shards: dist.DeviceMesh,
    device: torch.device,
    ranks: dist.ProcessGroup | None = None,
    split: Callable[[nn.Module], object] | None = None,
    full_outputs: bool = False,
    unsharded: Iterable[nn.Parameter] = (),
) -> nn.Module:
    """Shard a model in place over `shards`: one dimension, or (copies, shards).

    The order is: tensor parallelism (`split`), activation checkpointing, sharding.

    Args:
        model: changed in place.
        plugin: the units, mixed precision, offload.
        shards: the mesh of the shards.
        device: that of the run.
        ranks: those with the same model before this (None: all). They get the weights of the first of them: if only
            that one has any (`cpu_ram_efficient_loading`, or the others built the model without storage) one tensor
            at a time; if none has, each module is initialized alone.
        split: applied first.
        full_outputs: convert what the model returns to fp32.
        unsharded: parameters that stay unsharded, in addition to those of `plugin.ignored_modules`.
    """
    options = copy.copy(plugin)
    options.set_auto_wrap_policy(model)
    ignored = {p for module in find_modules(model, plugin.ignored_modules) for p in module.parameters()}
    ignored.update(unsharded)
    # `fully_shard` refuses the former, and its reduction of gradients the latter. They stay replicas.
    ignored.update(p for p in model.parameters() if p.ndim == 0 or p.numel() == 0)
    units = select_units(model, options.auto_wrap_policy, ignored)  # type: ignore[arg-type]
    # To find them again when the objects are replaced.
    ids = {id(parameter) for parameter in ignored}
    ignored_names = {name for name, tensor in materialize.named_tensors(model) if id(tensor) in ids}
    upcast(model, plugin)
    for parameter in model.parameters():
        if parameter not in ignored and not isinstance(parameter, DTensor) and not parameter.is_contiguous():
            # `fully_shard` refuses another layout in memory, as of a transposed weight.
            parameter.data = parameter.data.contiguous()
    rare = units_of_rare_dtypes(model, units, ignored)
    home = torch.device("cpu") if isinstance(plugin.cpu_offload, CPUOffloadPolicy) else device

    def shard(equal: bool) -> None:
        modules = units
        if split is not None:
            if equal:
                # Tensor parallelism slices the weights, which must be equal before.
                materialize.make_equal(_not_sharded_yet(model), device, ranks)
            split(model)
        if plugin.activation_checkpointing:
            modules = checkpoint_activations(model, units, device, bool(plugin.activation_checkpointing_offload))
        policy = plugin.mixed_precision_policy or MixedPrecisionPolicy()
        for unit in [*rare, *modules, model]:
            if equal and split is None:
                materialize.make_equal(_not_sharded_yet(unit), device, ranks)
            reshard = plugin.reshard_after_forward
            if unit is model and full_outputs:
                policy = dataclasses.replace(policy, output_dtype=torch.float32)  # type: ignore[type-var]
            if unit is model and reshard:
                # The backward needs the root's parameters first: torch keeps them by default.
                reshard = None
            named = materialize.named_parameters(model) if ignored_names else ()
            fully_shard(
                unit,
                mesh=shards,
                reshard_after_forward=reshard,  # type: ignore[arg-type]
                mp_policy=policy,  # type: ignore[arg-type]
                offload_policy=plugin.cpu_offload,  # type: ignore[arg-type]
                ignored_params={parameter for name, parameter in named if name in ignored_names},
            )

    from_first = bool(plugin.cpu_ram_efficient_loading)
    materialize.lay_out(model, device, shard, ranks, home, from_first, plugin.param_init_fn)
    return model


def _not_sharded_yet(unit: nn.Module) -> list[torch.Tensor]:
    """The tensors that `fully_shard(unit)` will shard: those of no unit inside."""
    inner = {
        id(tensor)
        for module in unit.modules()
        if isinstance(module, FSDPModule)
        for tensor in (*module.parameters(), *module.buffers())
    }
    return [tensor for tensor in (*unit.parameters(), *unit.buffers()) if id(tensor) not in inner]


def upcast(model: nn.Module, plugin: FullyShardedDataParallelPlugin) -> None:
    """Under mixed precision convert parameters to fp32: FSDP casts them for the computation."""
    policy = plugin.mixed_precision_policy
    if policy is None or getattr(policy, "param_dtype", None) in (None, torch.float32):
        return
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.dtype in (torch.float16, torch.bfloat16):
            parameter.data = parameter.data.to(torch.float32)


# The API's functions for those who shard by hand. `accelerator` gives the plugin, the device and the mesh.


def fsdp2_prepare_model(accelerator: Any, model: nn.Module) -> nn.Module:
    """Shard a model in place as `accelerator.prepare` would; optimizers are not touched."""
    if isinstance(model, FSDPModule):
        return model
    layout, device_mesh = accelerator.parallelism_config, accelerator.torch_device_mesh
    if layout is None or device_mesh is None:
        layout = mesh.all_sharded(dist.get_world_size())
        device_mesh = mesh.build_mesh(layout, dist.get_world_size(), accelerator.device.type)
    shards = mesh.fsdp_mesh(layout, device_mesh, accelerator.device)
    return shard_model(model, accelerator.state.fsdp_plugin, shards, accelerator.device)


def fsdp2_apply_ac(accelerator: Any, model: nn.Module) -> nn.Module:
    """Have the units that the plugin's wrap policy finds recompute in the backward, in place."""
    plugin = copy.copy(accelerator.state.fsdp_plugin)
    plugin.set_auto_wrap_policy(model)
    units = select_units(model, plugin.auto_wrap_policy, set())
    checkpoint_activations(model, units, accelerator.device, bool(plugin.activation_checkpointing_offload))
    return model


def fsdp2_load_full_state_dict(
    accelerator: Any, model: nn.Module, full_sd: Mapping[str, torch.Tensor], cpu_offload: bool = False
) -> None:
    """Fill a sharded model from a full state that rank 0 holds; parameters without storage get one."""
    materialize.allocate(model, accelerator.device, torch.device("cpu") if cpu_offload else None)
    fsdp_state.load_full_model_state(model, dict(full_sd), accelerator.device)


def enable_fsdp_ram_efficient_loading() -> None:
    """Have libraries that load weights before `prepare` do so on rank 0 only (FSDP_CPU_RAM_EFFICIENT_LOADING)."""
    env.publish({EFFICIENT_LOADING: True})


def disable_fsdp_ram_efficient_loading() -> None:
    """Have libraries that load weights before `prepare` do so on every rank."""
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
        for name, parameter in list(module._parameters.items()):
            number = ties.get((id(module), name))
            if number is None or parameter is None:
                continue
            if number not in made:
                # Only what this call has given storage counts: a parameter left on meta is not it.
                made[number] = (
                    parameter
                    if not parameter.is_meta
                    else nn.Parameter(
                        torch.empty_like(parameter, device=device), requires_grad=parameter.requires_grad
                    )
                )
            module._parameters[name] = made[number]
        return module

    return init_and_tie


def fsdp2_switch_optimizer_parameters(
    optimizer: torch.optim.Optimizer, mapping: Mapping[nn.Parameter | int, nn.Parameter]
) -> None:
    """Have an optimizer train sharded parameters; `mapping` leads from each former one, or its `data_ptr()`, to it.

    Raises PrepareError where the mapping knows none of a group's parameters: the group would train nothing.
    """
    present = {id(parameter) for parameter in mapping.values()}
    known = {former if isinstance(former, int) else id(former): found for former, found in mapping.items()}

    def lookup(former: nn.Parameter) -> nn.Parameter:
        found = known.get(id(former))
        # A parameter without storage (meta) has the address 0 like any other of its kind.
        return found if found is not None else known.get(former.data_ptr() or -1, former)

    for index, own_group in enumerate(optimizer.param_groups):
        changed = [lookup(former) for former in own_group["params"]]
        if changed and not any(id(parameter) in present for parameter in changed):
            raise PrepareError(
                f"none of the {len(changed)} parameters of the optimizer's group {index} is a parameter of the "
                "sharded model: it would train nothing. Make the optimizer from the model that is prepared."
            )
        for former, now in zip(own_group["params"], changed, strict=True):
            if former is not now and former in optimizer.state:
                optimizer.state[now] = lay_out_state(optimizer.state.pop(former), former, now)
        own_group["params"] = changed


def fsdp2_canonicalize_names(named_params: Mapping[str, T]) -> dict[str, T]:
    """Return a mapping under the names of the plain model.

    Args:
        named_params: name in the prepared model, with the prefixes of wrappers -> value.
    """
    return {materialize.canonical_name(name): value for name, value in named_params.items()}


def get_fsdp2_grad_scaler(**kwargs: Any) -> torch.amp.GradScaler:
    """A gradient scaler for sharded parameters: an overflow on one rank is an overflow on all."""
    return torch.amp.GradScaler(**kwargs)
