# SPDX-License-Identifier: Apache-2.0
"""Fully sharded data parallelism: torch's `fully_shard` (FSDP2)."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from ...collectives import transport
from ...config.fsdp import FullyShardedDataParallelPlugin
from ...core.devices import kind_of
from ...core.errors import ConfigurationError, PrepareError
from ...core.modules import replace_data
from ...parallelism_config import ParallelismConfig
from ...placement.subclasses import is_quantized_layer
from ...precision.base import Precision
from ...precision.modules import find_regions
from ...runtime import group, mesh
from ...runtime.channel import backends_of
from .. import materialize
from ..activation import checkpoint_activations
from ..adopted.layout import find_layout, reducers_of
from ..gradients import UnreducedGradients
from ..methods import running
from ..sharded import ShardedModel, ShardedStrategy
from ..tensor import strategy as tensor
from . import requirements
from .units import (
    fill_policy,
    find_modules,
    keep_unpacked,
    select_units,
    units_of_rare_dtypes,
    upcast,
    with_regions,
)

T = TypeVar("T")


class Fsdp2Model(ShardedModel):
    """A model whose units FSDP2 shards."""

    _syncs = True  # whether a backward reduces gradients

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

    def new_parameters(self) -> dict[str, nn.Parameter]:
        """Trainable parameters that no unit has: nothing averages their gradients."""
        known = {id(p) for reducer in self.reducers for p in getattr(reducer, "parameters", ())}
        return {
            name: parameter
            for name, parameter in self.inner.named_parameters()
            if parameter.requires_grad
            and not isinstance(parameter, DTensor)
            and id(parameter) not in known
        }

    def added_parameter(self, name: str) -> PrepareError:
        """The error for a parameter of `new_parameters`."""
        return requirements.added_parameter(name, type(self.inner).__name__, "FSDP2")


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
        sent = backends_of(transport.group_of(None))
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
            return prepared
        requirements.check(model, self.name, self.plugin.ignored_modules, self.prepared)
        keep_unpacked(model)
        split = None
        if self.tensor_group is not None and self.mesh is not None:
            split = functools.partial(
                tensor.split_model, ranks=self.mesh["tp"], options=self.layout.tp_handler
            )
        shard_model(
            model,
            self.plugin,
            self.shards,
            self.device,
            split=split,
            full_outputs=self.full_outputs,
            regions=find_regions(model, self.precision.modules),
        )
        self.cast_parameters(model)
        rest = [parameter for parameter in model.parameters() if not isinstance(parameter, DTensor)]
        if rest:
            prepared.reducers.append(UnreducedGradients(self.gradient_group, rest))
        return prepared


def shard_model(
    model: nn.Module,
    plugin: FullyShardedDataParallelPlugin,
    shards: dist.DeviceMesh,
    device: torch.device,
    ranks: dist.ProcessGroup | None = None,
    split: Callable[[nn.Module], object] | None = None,
    full_outputs: bool = False,
    unsharded: Iterable[nn.Parameter] = (),
    regions: Mapping[nn.Module, torch.dtype] | None = None,
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
        regions: modules that compute in a dtype of their own. They are units too; `split` is then None.
    """
    # The units, by the plugin's policy.
    options = copy.copy(plugin)
    options.set_auto_wrap_policy(model)
    ignored = {
        p for module in find_modules(model, plugin.ignored_modules) for p in module.parameters()
    }
    ignored.update(unsharded)
    # `fully_shard` refuses the former, and its reduction of gradients the latter. They stay replicas.
    ignored.update(p for p in model.parameters() if p.ndim == 0 or p.numel() == 0)
    units = select_units(model, options.auto_wrap_policy, ignored)  # type: ignore[arg-type]
    units, added = with_regions(model, units, ignored, regions or {})
    dtype_of = {
        id(module): dtype
        for region, dtype in (regions or {}).items()
        for module in region.modules()
    }
    upcast(model, plugin)
    for parameter in model.parameters():
        if (
            parameter not in ignored
            and not isinstance(parameter, DTensor)
            and not parameter.is_contiguous()
        ):
            # `fully_shard` refuses another layout in memory, as of a transposed weight.
            replace_data(parameter, parameter.detach().contiguous())
    rare_units = units_of_rare_dtypes(model, units, ignored)

    # Their values, where only some ranks have them. Parameters and layers that follow are other objects.
    ids = {id(parameter) for parameter in ignored}
    ignored_names = {name for name, tensor in materialize.named_tensors(model) if id(tensor) in ids}
    names = {id(module): name for name, module in model.named_modules()}
    # A quantized layer keeps scales beside its weight: it is complete on each rank, or on none.
    from_first = bool(plugin.cpu_ram_efficient_loading) and not any(
        map(is_quantized_layer, model.modules())
    )
    weights = materialize.Weights(model, device, ranks, from_first)

    if split is not None:
        if weights.are_everywhere:
            # Tensor parallelism slices the weights, which must be equal before.
            materialize.make_equal(_not_sharded_yet(model), device, ranks)
        split(model)
        present = dict(model.named_modules())
        rare_units, units = (
            [present[names[id(unit)]] for unit in listed] for listed in (rare_units, units)
        )

    if plugin.activation_checkpointing:
        blocks = [unit for unit in units if unit not in added]
        offload = bool(plugin.activation_checkpointing_offload)
        wrappers = dict(
            zip(blocks, checkpoint_activations(model, blocks, device, offload), strict=True)
        )
        dtype_of |= {
            id(wrappers[block]): dtype_of[id(block)] for block in blocks if id(block) in dtype_of
        }
        units = [wrappers.get(unit, unit) for unit in units]

    policy = plugin.mixed_precision_policy or MixedPrecisionPolicy()
    for unit in [*rare_units, *units, model]:
        if weights.are_everywhere and split is None:
            materialize.make_equal(_not_sharded_yet(unit), device, ranks)
        reshard = plugin.reshard_after_forward
        if unit is model and full_outputs:
            policy = dataclasses.replace(policy, output_dtype=torch.float32)  # type: ignore[type-var]
        if unit is model and reshard:
            # The backward needs the root's parameters first: torch keeps them by default.
            reshard = None
        named = materialize.named_parameters(model) if ignored_names else ()
        dtype = dtype_of.get(id(unit))
        fully_shard(
            unit,
            mesh=shards,
            reshard_after_forward=reshard,  # type: ignore[arg-type]
            mp_policy=policy if dtype is None else MixedPrecisionPolicy(dtype, dtype),  # type: ignore[arg-type]
            offload_policy=plugin.cpu_offload,  # type: ignore[arg-type]
            ignored_params={parameter for name, parameter in named if name in ignored_names},
        )

    if isinstance(plugin.cpu_offload, CPUOffloadPolicy):
        home = torch.device("cpu")
    else:
        home = device
    weights.fill(model, home, plugin.param_init_fn)
    if plugin.reshard_after_forward:
        model.register_forward_hook(_reshard_after_evaluation)
    return model


def _reshard_after_evaluation(model: nn.Module, *_: object) -> None:
    """The forward hook of the outermost unit. torch keeps it unsharded for a backward, which may not come.

    What is written to unsharded parameters then is lost.
    """
    if not torch.is_grad_enabled() and model not in running:
        model.reshard()  # type: ignore[operator]


def _not_sharded_yet(unit: nn.Module) -> list[torch.Tensor]:
    """The tensors that `fully_shard(unit)` will shard: those of no unit inside."""
    inner = {
        id(tensor)
        for module in unit.modules()
        if isinstance(module, FSDPModule)
        for tensor in (*module.parameters(), *module.buffers())
    }
    return [tensor for tensor in (*unit.parameters(), *unit.buffers()) if id(tensor) not in inner]
