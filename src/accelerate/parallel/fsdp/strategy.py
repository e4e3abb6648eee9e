# SPDX-License-Identifier: Apache-2.0
"""Fully sharded data parallelism: torch's `fully_shard` (FSDP2)."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from ...collectives import transport
from ...config.fsdp import FullyShardedDataParallelPlugin
from ...core.devices import kind_of
from ...core.errors import ConfigurationError
from ...optimizer import parameters_of
from ...parallelism_config import ParallelismConfig
from ...placement.subclasses import is_quantized_layer
from ...precision.base import Precision
from ...precision.modules import find_regions
from ...runtime import group, mesh
from ...runtime.channel import backends_of
from ...torch_internals.fsdp2 import sharded_parameter, shards_of, waiting_gradients
from .. import materialize
from ..adopted.layout import find_layout, reducers_of
from ..compile import Compile
from ..gradients import GradientReducer, UnreducedGradients
from ..sharded import ShardedModel, ShardedStrategy
from ..tensor import strategy as tensor
from ..tensor.between import Region, look_first
from ..unwrap import running_methods
from . import requirements
from .units import Units, fill_policy, keep_unpacked, plan_units


class Fsdp2Model(ShardedModel):
    """A model whose units FSDP2 shards."""

    _syncs = True  # whether a backward reduces gradients
    _has_waited = False  # whether a backward has ever left its gradients to a later one

    @functools.cached_property
    def outer_units(self) -> list[FSDPModule]:
        """The FSDP2 units that are in no other one."""
        units = [module for module in self.inner.modules() if isinstance(module, FSDPModule)]
        nested: set[nn.Module] = set()
        for unit in units:
            if unit not in nested:
                nested.update(unit.modules())
                nested.discard(unit)
        return [unit for unit in units if unit not in nested]

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards in this context do not reduce gradients; blocks may be nested."""
        before, self._syncs = self._syncs, False
        self._has_waited = True
        for unit in self.outer_units:
            unit.set_requires_gradient_sync(False)
        try:
            with super().no_sync():
                yield
        finally:
            self._syncs = before
            for unit in self.outer_units:
                unit.set_requires_gradient_sync(before)

    def drop_waiting_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """FSDP2 keeps them with the unsharded parameters, which an optimizer does not know."""
        if not self._has_waited:
            return
        trained = set(map(id, parameters_of(optimizer)))
        for shard in shards_of(self.units()):
            if id(sharded_parameter(shard)) in trained:
                for owner, attribute in waiting_gradients(shard):
                    setattr(owner, attribute, None)

    def new_parameters(self) -> dict[str, nn.Parameter]:
        """Trainable parameters that no unit has: nothing averages their gradients."""
        averaged: set[nn.Parameter] = set()
        for reducer in self.reducers:
            averaged.update(getattr(reducer, "parameters", ()))
        parameters = dict(self.inner.named_parameters())
        plain = {name: p for name, p in parameters.items() if not isinstance(p, DTensor)}
        return {name: p for name, p in plain.items() if p.requires_grad and p not in averaged}


class FullyShardedDataParallel(ShardedStrategy):
    """Each rank keeps a shard of every parameter, gradient and optimizer state; units are gathered to compute."""

    name = "FSDP2"
    api_method = "_prepare_fsdp2"
    api_function = "parallel.fsdp.by_hand.fsdp2_prepare_model"

    def __init__(
        self,
        device: torch.device,
        precision: Precision,
        plugin: FullyShardedDataParallelPlugin,
        parallelism: ParallelismConfig | None = None,
    ) -> None:
        fill_policy(plugin, precision)
        super().__init__(device, precision, parallelism)
        sent = backends_of(transport.group_of(None))
        if plugin.offloads_shards and device.type not in ("cpu", "meta") and "cpu" not in sent:
            raise ConfigurationError(
                "cpu_offload keeps shards and gradients in host memory, but the process group "
                f"({dist.get_backend()}) sends only tensors on {device.type} devices. Create the "
                "Accelerator before any other state, or join the group with "
                f"backend={group.with_host(kind_of(device))!r}"
            )
        self.plugin = plugin
        # The gradient of a scaled loss is too large for fp16.
        self.full_outputs: bool = plugin.policy_is_filled and precision.scaler is not None
        self.shards: dist.DeviceMesh = mesh.fsdp_mesh(self.layout, self.mesh, device)
        self.gradient_group: dist.ProcessGroup | None = mesh.group_of(self.mesh, "dp_cp")
        self.replicas: dist.ProcessGroup | None = self.gradient_group or dist.group.WORLD

    def prepare_model(self, model: nn.Module, evaluation: bool = False) -> Fsdp2Model:
        """Everything that is done to one model, in its order."""
        # Precision.
        # The units' policy has the dtype of what they return.
        model = self.precision.wrap_forward(model, full_outputs=evaluation)
        model = self.apply_transforms(model, before_layout=True)
        reducers: list[GradientReducer] = []
        split: list[Region] = []
        if evaluation:
            pass
        elif isinstance(model, FSDPModule):
            # Its user has sharded it.
            _, averages = find_layout([model])
            self.cast_parameters(model)
            reducers = reducers_of(model, averages, self.gradient_group)
        else:
            plugin = self.plugin
            requirements.check(model, self.name, plugin.ignored_modules, self.prepared)
            keep_unpacked(model)
            regions = None
            if self.precision.modules:
                regions = find_regions(model, self.precision.modules)
            units = plan_units(model, plugin, regions=regions)
            # From here on the model may have no values.
            weights = take_weights(model, plugin, self.device)

            # Tensor parallelism.
            if self.tensor_group is not None and self.mesh is not None:
                # Ranks cut their shards out of equal weights.
                weights.make_all_equal(model)
                split = tensor.split_model(model, self.mesh["tp"], self.layout.tp_handler)
                units.find_again()

            # Activation checkpointing.
            if plugin.activation_checkpointing:
                units.recompute(self.device, bool(plugin.activation_checkpointing_offload))

            # Sharding, and values.
            shard_units(units, weights, plugin, self.shards, self.full_outputs)

            if not any(isinstance(transform, Compile) for transform in self.transforms):
                # Its hooks would be compiled.
                requirements.refuse_writes(model)

            # Master weights; gradients that FSDP2 does not reduce.
            self.cast_parameters(model)
            plain = [p for p in model.parameters() if not isinstance(p, DTensor)]
            if plain:
                reducers.append(UnreducedGradients(self.gradient_group, plain))
        self.precision.after_layout(model)

        # Compilation.
        model = self.apply_transforms(model, before_layout=False)
        if split:
            look_first(model, split)
        if self.sequence is not None:
            self.sequence.watch(model, self.precision)
        prepared = self.as_prepared(model)
        prepared.reducers = reducers
        return prepared

    def as_prepared(self, module: nn.Module) -> Fsdp2Model:
        """A prepared model with the plugin's kind of checkpoint."""
        return Fsdp2Model(
            module, self.precision, self.device, self.sequence,
            saves_shards=self.plugin.state_dict_type.name == "SHARDED_STATE_DICT",  # type: ignore[union-attr]
        )  # fmt: skip


def shard_model(
    model: nn.Module,
    plugin: FullyShardedDataParallelPlugin,
    shards: dist.DeviceMesh,
    device: torch.device,
    ranks: dist.ProcessGroup | None = None,
    full_outputs: bool = False,
    unsharded: Iterable[nn.Parameter] = (),
) -> nn.Module:
    """Shard a model, or a stage of a pipeline, in place over `shards`: one dimension, or (copies, shards).

    Args:
        model: changed in place.
        plugin: the units, mixed precision, offload.
        shards: the mesh of the shards.
        device: that of the run.
        ranks: those with the same model before this (None: all); see `materialize.Weights`.
        full_outputs: convert what the model returns to fp32.
        unsharded: parameters that stay unsharded, in addition to those of `plugin.ignored_modules`.
    """
    units = plan_units(model, plugin, unsharded)
    weights = take_weights(model, plugin, device, ranks)
    if plugin.activation_checkpointing:
        units.recompute(device, bool(plugin.activation_checkpointing_offload))
    shard_units(units, weights, plugin, shards, full_outputs)
    return model


def take_weights(
    model: nn.Module,
    plugin: FullyShardedDataParallelPlugin,
    device: torch.device,
    ranks: dist.ProcessGroup | None = None,
) -> materialize.Weights:
    """The values of a model, which has no storage until it is sharded if only some ranks have them."""
    # A quantized layer keeps scales beside its weight: it is complete on each rank, or on none.
    is_quantized = any(is_quantized_layer(module) for module in model.modules())
    from_first = bool(plugin.cpu_ram_efficient_loading) and not is_quantized
    return materialize.Weights(model, device, ranks, from_first)


def shard_units(
    units: Units,
    weights: materialize.Weights,
    plugin: FullyShardedDataParallelPlugin,
    shards: dist.DeviceMesh,
    full_outputs: bool = False,
) -> None:
    """Shard the units of a model in place, children before parents, and give it its values."""
    model = units.model
    policy = plugin.mixed_precision_policy or MixedPrecisionPolicy()
    ignored = {p for name, p in materialize.named_parameters(model) if name in units.ignored}
    for unit in [*units.rare, *units.modules, model]:
        weights.make_equal(_not_sharded_yet(unit))
        unit_policy, reshard = policy, plugin.reshard_after_forward
        if unit is model:
            if full_outputs:
                unit_policy = dataclasses.replace(policy, output_dtype=torch.float32)  # type: ignore[type-var]
            if reshard:
                # The backward needs the root's parameters first: torch keeps them by default.
                reshard = None
        if id(unit) in units.dtypes:
            dtype = units.dtypes[id(unit)]
            unit_policy = MixedPrecisionPolicy(dtype, dtype)
        fully_shard(
            unit,
            mesh=shards,
            reshard_after_forward=reshard,  # type: ignore[arg-type]
            mp_policy=unit_policy,  # type: ignore[arg-type]
            offload_policy=plugin.cpu_offload,  # type: ignore[arg-type]
            ignored_params=ignored,
        )
    home = weights.device
    if isinstance(plugin.cpu_offload, CPUOffloadPolicy):
        home = torch.device("cpu")
    weights.fill(model, home, plugin.param_init_fn)
    if plugin.reshard_after_forward:
        model.register_forward_hook(_reshard_after_evaluation)


def _reshard_after_evaluation(model: nn.Module, *_: object) -> None:
    """The forward hook of the outermost unit. torch keeps it unsharded for a backward, which may not come.

    What is written to unsharded parameters then is lost.
    """
    if not torch.is_grad_enabled() and model not in running_methods:
        model.reshard()  # type: ignore[operator]


def _not_sharded_yet(unit: nn.Module) -> list[torch.Tensor]:
    """The tensors that `fully_shard(unit)` will shard: those of no unit inside."""
    inner: set[torch.Tensor] = set()
    for module in unit.modules():
        if isinstance(module, FSDPModule):
            inner.update(module.parameters(), module.buffers())
    return [tensor for tensor in (*unit.parameters(), *unit.buffers()) if tensor not in inner]
