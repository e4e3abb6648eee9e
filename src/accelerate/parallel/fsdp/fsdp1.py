# SPDX-License-Identifier: Apache-2.0
"""Fully sharded data parallelism through torch's older FullyShardedDataParallel (FSDP1).

For configurations with `fsdp_version=1`, as long as torch has it; FSDP2 is the default.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import CustomPolicy

from ...config.fsdp import FullyShardedDataParallelPlugin, give_storage
from ...core.devices import kind_of
from ...core.errors import CheckpointError, ConfigurationError
from ...core.modules import move_module, moves_in_place
from ...core.topology import Topology
from ...parallelism_config import ParallelismConfig
from ...precision.base import Precision
from ...runtime import group
from ...runtime.mesh import describe
from ...torch_internals.compiled import uncompiled
from ...torch_internals.fsdp1 import reshard
from .. import gradients, materialize
from ..activation import checkpoint_activations
from ..base import Bundle, Strategy, one_shard_each
from ..optimizer_step import check_flat_shards
from ..prepared import GroupShapes, PreparedModel, PreparedOptimizer
from ..sharded_optimizer import check_trained
from ..unwrap import require_state_dict
from . import fsdp1_state, requirements
from . import state as fsdp_state
from .fsdp1_state import PlainModel
from .units import fill_policy, find_modules, keep_unpacked, select_units, upcast

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Fsdp1Model(PreparedModel):
    """A model whose units' parameters FSDP1 has flattened.

    Fields:
        plain: what the model was before.
        device: that of the run.
        plugin: says which state a checkpoint stores, and where a full one is.
        saves_shards: whether a checkpoint stores shards (`state_dict_type`).
    """

    is_partial = True

    def __init__(
        self,
        module: nn.Module,
        precision: Precision,
        device: torch.device,
        plugin: FullyShardedDataParallelPlugin,
        plain: PlainModel | None,
    ) -> None:
        super().__init__(module, precision)
        self.device = device
        self.plugin = plugin
        # LOCAL_STATE_DICT's are stored as shards too, so that any layout can load them.
        self.saves_shards: bool = plugin.state_dict_type.name != "FULL_STATE_DICT"  # type: ignore[union-attr]
        self._plain = plain

    @property
    def plain(self) -> PlainModel:
        """The names and shapes before flattening. Raises CheckpointError for a model not prepared for training."""
        if self._plain is None:
            raise CheckpointError(
                f"{type(self.inner).__name__} was not prepared for training with FSDP1: its state cannot be loaded"
            )
        return self._plain

    @property
    def inner(self) -> nn.Module:
        """The FSDP1 module."""
        module: nn.Module = uncompiled(self.module)
        return module

    @property
    def hooked(self) -> nn.Module:
        """The user's model, with flattened parameters."""
        wrapper: Any = self.inner
        model: nn.Module = wrapper.module
        return model

    @property
    def template(self) -> nn.Module | None:
        """The user's names and shapes."""
        if self._plain is None:
            return None
        return self._plain.skeleton

    def new_parameters(self) -> dict[str, nn.Parameter]:
        """Trainable parameters that the model did not have when it was flattened."""
        known = None if self._plain is None else self._plain.names
        return {
            name: parameter
            for name, parameter in materialize.named_parameters(self.inner)
            if known is not None and parameter.requires_grad and id(parameter) not in known
        }

    # -- the step

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Torch's `no_sync`; unsharded parameters and unused ones wait as well."""
        sharded = self.inner
        if not isinstance(sharded, FullyShardedDataParallel):
            yield
            return
        with sharded.no_sync(), gradients.deferred(self.reducers):
            yield

    def trained_names(self) -> set[str]:
        """The plain names of the parameters that train."""
        names: set[str] = set()
        for parameter in self.inner.parameters():
            if parameter.requires_grad:
                names.update(self.plain.names[id(parameter)])
        return names

    def reshard(self) -> None:
        """Reshard the units that a forward without a backward has left gathered."""
        reshard(self.inner)

    # -- state

    def state_dict(self) -> dict[str, Any]:
        """The full state under the user's names: on the host of rank 0, empty on the other ranks."""
        return fsdp1_state.full_model_state(self.inner, self.plugin.state_dict_config)

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Load a full state, which only rank 0 needs to have; every rank calls it."""
        fsdp1_state.load_full_model_state(self.inner, self.plain, state, self.device, strict)

    def prepared_optimizer(self, optimizer: Any) -> PreparedOptimizer:
        """An optimizer of flattened parameters."""
        return Fsdp1Optimizer(optimizer, self)


class Fsdp1Optimizer(PreparedOptimizer):
    """An optimizer of a `Fsdp1Model`."""

    model: Fsdp1Model

    def _groups(self) -> list[list[str]]:
        return self.model.plain.groups(self.inner)

    def state_dict(self) -> dict[str, Any]:
        """The full state as that of a single process: on rank 0, empty on the other ranks."""
        config = self.model.plugin.optim_state_dict_config
        return fsdp_state.full_optimizer_state(self.model.inner, self.inner, self._groups(), config)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the optimizer state of a single process, which only rank 0 needs to have; every rank calls it."""
        fsdp_state.load_full_optimizer_state(self.model.inner, self.inner, state, self._groups())

    def group_shapes(self) -> GroupShapes:
        """Names and shapes in each group, before flattening."""
        shapes = self.model.plain.shapes
        return [{name: shapes[name] for name in names} for names in self._groups()]


class FullyShardedDataParallel1(Strategy):
    """Each rank keeps a shard of each unit's flattened parameters; a unit is gathered to compute."""

    name = "FSDP1"
    views_matrices = False
    data_shard = property(one_shard_each)

    def __init__(
        self,
        device: torch.device,
        precision: Precision,
        plugin: FullyShardedDataParallelPlugin,
        parallelism: ParallelismConfig | None = None,
    ) -> None:
        fill_policy(plugin, precision)
        self.plugin = plugin
        if plugin.cpu_offload.offload_params and device.type == "cpu":  # type: ignore[union-attr]
            raise ConfigurationError(
                "cpu_offload: on the CPU, the shards are already in host memory, and torch's "
                "FSDP1 fails when it copies them there. Remove it, or set fsdp_version=2."
            )
        if not dist.is_initialized():
            group.start_alone(kind_of(device))
        super().__init__(device, precision)
        self.sharding: ShardingStrategy = ShardingStrategy.NO_SHARD
        if dist.get_world_size() > 1:
            self.sharding = plugin.sharding_strategy  # type: ignore[assignment]
        self.shards: DeviceMesh = _shard_mesh(self.sharding, parallelism, device)

    def as_prepared(self, module: nn.Module, plain: PlainModel | None = None) -> Fsdp1Model:
        """A prepared model with the plugin's kind of checkpoint."""
        return Fsdp1Model(module, self.precision, self.device, self.plugin, plain)

    def prepare(self, bundle: Bundle) -> list[PreparedModel]:
        """Shard each model, and re-point optimizers that were made before."""
        if bundle.evaluation:
            return super().prepare(bundle)
        if self.sharding is not ShardingStrategy.NO_SHARD or not self.plugin.use_orig_params:
            for optimizer in bundle.optimizers:
                # Its parameters still have their shapes.
                check_flat_shards(optimizer, "FSDP1", "set fsdp_version=2 (FSDP_VERSION=2)")
        prepared_models: list[PreparedModel] = []
        for model in bundle.models:
            prepared = self.prepare_model(model)
            if self.sharding is not ShardingStrategy.NO_SHARD:
                require_state_dict(prepared.module)
            prepared_models.append(prepared)
            self.prepared.add([prepared])
        for optimizer in bundle.optimizers:
            fsdp1_state.repoint(optimizer, self._plain_models(self.prepared))
        for optimizer in bundle.earlier:
            fsdp1_state.repoint(optimizer, self._plain_models(prepared_models))
        check_trained(bundle, prepared_models, self.prepared)
        return prepared_models

    def _plain_models(self, models: Iterable[PreparedModel]) -> list[PlainModel]:
        sharded = [prepared for prepared in models if isinstance(prepared, Fsdp1Model)]
        return [prepared._plain for prepared in sharded if prepared._plain is not None]

    def backward(self, loss: torch.Tensor, **kwargs: object) -> None:
        """The backward, and the gradients of parameters that FSDP1 does not shard."""
        super().backward(loss, **kwargs)
        for prepared in self.prepared:
            gradients.finish(prepared.reducers)

    def prepare_model(self, model: nn.Module, evaluation: bool = False) -> Fsdp1Model:
        """Everything that is done to one model, in its order."""
        model = self.precision.wrap_forward(model)
        model = self.apply_transforms(model, before_layout=True)
        plain: PlainModel | None = None
        ignored: list[nn.Module] = []
        if evaluation:
            pass
        elif isinstance(model, FullyShardedDataParallel):
            # Its user has sharded it.
            plain = PlainModel(model)
            plain.attach(model)
        else:
            if self.transforms and not self.plugin.use_orig_params:
                raise ConfigurationError(
                    "torch.compile needs use_orig_params=True under FSDP1 "
                    "(FSDP_USE_ORIG_PARAMS=true)"
                )
            flattened = chain.from_iterable(
                other.parts() for other in self._plain_models(self.prepared)
            )
            requirements.check(
                model, self.name, self.plugin.ignored_modules, self.prepared, flattened
            )
            keep_unpacked(model)
            if materialize.where_meta(model) is None and not moves_in_place(model, self.device):
                # torch would move each unit by an assignment to `data`.
                move_module(model, self.device)
            # The names and shapes before flattening.
            plain = PlainModel(model)
            upcast(model, self.plugin)
            ignored = find_modules(model, self.plugin.ignored_modules)
            model = _shard(model, self.plugin, self.sharding, self.shards, self.device, ignored)
            if self.plugin.activation_checkpointing:
                wrappers = FullyShardedDataParallel.fsdp_modules(model)
                units = [wrapper.module for wrapper in wrappers if wrapper is not model]
                checkpoint_activations(model, units, self.device)
            plain.attach(model)
        self.precision.after_layout(model)
        # Compilation is the last of these.
        prepared = self.as_prepared(self.apply_transforms(model, before_layout=False), plain)
        if not evaluation:
            # In an order that is the same on all ranks.
            unsharded = dict.fromkeys(chain.from_iterable(m.parameters() for m in ignored))
            prepared.reducers = [gradients.UnreducedGradients(self.gradient_group, unsharded)]
        return prepared

    def clip_grad_norm(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0
    ) -> torch.Tensor:
        """Clip shards and replicated parameters together (torch clips one complete model, not in double precision)."""
        listed = list(parameters)
        group_ = self.shards.get_group(self.shards.ndim - 1)
        elsewhere: set[int] = set()
        # The first rank counts what is replicated.
        if dist.get_rank(group_):
            elsewhere.update(map(id, listed))
            for plain in self._plain_models(self.prepared):
                elsewhere.difference_update(map(id, plain.split))
        return gradients.clip_grad_norm(
            listed, max_norm, norm_type, (group_,), self.device, elsewhere
        )


def _shard_mesh(
    sharding: ShardingStrategy, layout: ParallelismConfig | None, device: torch.device
) -> DeviceMesh:
    """One dimension of shards, or (copies, shards) for the hybrid strategies: by the layout, else by the machines."""
    world = dist.get_world_size()
    hybrid = sharding.name.lstrip("_").startswith("HYBRID_SHARD")
    if layout is not None:
        other = [name for name in ("tp", "cp", "sp", "pp") if layout.sizes[name] > 1]
        if other:
            raise ConfigurationError(
                f"{describe(layout)}: FSDP1 does not work with {', '.join(other)}; set "
                "fsdp_version=2"
            )
        if layout.dp_replicate_enabled and not hybrid:
            raise ConfigurationError(
                f"{describe(layout)}: FSDP1 makes replicas only with "
                f"sharding_strategy=HYBRID_SHARD, but here it is {sharding.name}. Set "
                "HYBRID_SHARD, or fsdp_version=2"
            )
    if not hybrid:
        return init_device_mesh(device.type, (world,), mesh_dim_names=("dp_shard",))
    if layout:
        copies = layout.sizes["dp_replicate"]
    else:
        copies = world // Topology.from_environment().local_world_size
    if copies < 1 or world % copies:
        raise ConfigurationError(
            f"sharding_strategy={sharding.name}: {world} processes cannot be divided among "
            f"{copies} machines"
        )
    return init_device_mesh(
        device.type, (copies, world // copies), mesh_dim_names=("dp_replicate", "dp_shard")
    )


def _shard(
    model: nn.Module,
    plugin: FullyShardedDataParallelPlugin,
    sharding: ShardingStrategy,
    shards: DeviceMesh,
    device: torch.device,
    ignored: list[nn.Module],
) -> FullyShardedDataParallel:
    policy = _policy(model, plugin, ignored)
    sync, init = bool(plugin.sync_module_states), plugin.param_init_fn
    for module in ignored:
        materialize.allocate(module, device)
        move_module(module, device)
        tensors = dict(materialize.named_tensors(module))
        materialize.make_equal(tensors.values(), device, None)
    filled = init
    if init is give_storage:
        # It only allocates: if rank 0 has no weights, the modules initialize themselves.
        filled = None
    is_empty = False
    if sync:
        has_meta = materialize.where_meta(model) is not None
        is_empty = materialize.gather_flags(has_meta, device, None)[0]
    if sync and (device.type == "cpu" or (is_empty and filled is None)):
        # torch does not synchronize parameters in host memory.
        materialize.allocate(model, device)
        if is_empty:
            materialize.initialise(model, device, None, filled)
        else:
            tensors = dict(materialize.named_tensors(model))
            materialize.make_equal(tensors.values(), device, None)
        sync, init = False, None
    with warnings.catch_warnings():
        # torch deprecates this version and NO_SHARD, which the user has chosen.
        warnings.simplefilter("ignore", FutureWarning)
        return FullyShardedDataParallel(
            model,
            sharding_strategy=sharding,
            cpu_offload=plugin.cpu_offload,  # type: ignore[arg-type]
            auto_wrap_policy=policy,
            backward_prefetch=plugin.backward_prefetch,  # type: ignore[arg-type]
            mixed_precision=plugin.mixed_precision_policy,  # type: ignore[arg-type]
            ignored_modules=ignored,
            param_init_fn=init,
            device_id=device,
            sync_module_states=sync,
            forward_prefetch=bool(plugin.forward_prefetch),
            limit_all_gathers=plugin.limit_all_gathers,
            use_orig_params=bool(plugin.use_orig_params),
            device_mesh=shards,
        )


def _policy(
    model: nn.Module, plugin: FullyShardedDataParallelPlugin, ignored: list[nn.Module]
) -> CustomPolicy:
    """The plugin's policy, without the units that would flatten only one end of a tied parameter."""
    options = copy.copy(plugin)
    options.set_auto_wrap_policy(model)
    skipped = set(chain.from_iterable(module.parameters() for module in ignored))
    # In evaluation this layer gives the weights of the modules inside to a kernel, without calling them.
    undivided = (nn.TransformerEncoderLayer,)
    units = select_units(model, options.auto_wrap_policy, skipped, undivided)  # type: ignore[arg-type]
    return CustomPolicy(set(units).__contains__)
