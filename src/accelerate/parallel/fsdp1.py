# SPDX-License-Identifier: Apache-2.0
"""Fully sharded data parallelism as it was before `fully_shard`: torch's FullyShardedDataParallel (FSDP1).

FSDP2 is the main road; this one runs configurations that ask for version 1, while torch has it.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from ..config.fsdp import FullyShardedDataParallelPlugin, give_storage
from ..core.devices import kind_of
from ..core.errors import ConfigurationError, PrepareError
from ..parallelism_config import ParallelismConfig
from ..precision.base import Precision
from ..runtime import group
from ..runtime.mesh import describe
from ..runtime.topology import Topology
from . import fsdp1_state, fsdp1_traffic, materialize, memory, norms
from .activation import checkpoint_activations
from .base import Bundle, Traffic
from .fsdp1_state import PlainModel
from .fsdp1_unused import UnusedParameters
from .fsdp2 import upcast
from .fully_sharded import FullySharded, refuse_unshardable
from .optimizer_scope import refuse_parts
from .pretrained import ask_for_state
from .traffic import dtype_name
from .units import find_modules, owning_units, select_units

try:
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
    from torch.distributed.fsdp.wrap import CustomPolicy
except ImportError as error:
    raise ConfigurationError(
        f"torch {torch.__version__} has no FSDP1 (FullyShardedDataParallel): set fsdp_version=2 (FSDP_VERSION=2)"
    ) from error

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class FullyShardedDataParallel1(FullySharded):
    """Each rank keeps a slice of units' flattened parameters, and gathers a unit when it computes."""

    name = "FSDP1"
    version = 1
    holds_parts = True

    def spread(self, device: torch.device, precision: Precision, parallelism: ParallelismConfig | None) -> None:
        if self.plugin.cpu_offload.offload_params and device.type == "cpu":  # type: ignore[union-attr]
            raise ConfigurationError(
                "cpu_offload: the shards are in host memory on the CPU anyway, and torch's FSDP1 fails when it copies "
                "them there. Leave it out, or set fsdp_version=2."
            )
        if not dist.is_initialized():
            group.start_alone(kind_of(device).backend)
        super().spread(device, precision, parallelism)
        asked = self.plugin.sharding_strategy
        self.sharding: Any = asked if dist.get_world_size() > 1 else ShardingStrategy.NO_SHARD
        self.shards = _shard_mesh(self.sharding, parallelism, device)
        self._plain: dict[int, PlainModel] = {}
        # Of which parameters a rank holds its own part.
        self._split: set[int] = set()
        self._unused = UnusedParameters(device)

    @property
    def is_sharded(self) -> bool:  # type: ignore[override]
        """Whether state is saved in parts. LOCAL_STATE_DICT's are shards too, so that any layout can load them."""
        return self.plugin.state_dict_type.name != "FULL_STATE_DICT"  # type: ignore[union-attr]

    @property
    def data_shard(self) -> tuple[int, int]:
        return dist.get_rank(), dist.get_world_size()

    def prepare(self, bundle: Bundle) -> Bundle:
        """Shard each model; optimizers that were made before go on with what became of their parameters."""
        if bundle.evaluation:
            return super().prepare(bundle)
        if self.sharding is not ShardingStrategy.NO_SHARD or not self.plugin.use_orig_params:
            for optimizer in bundle.optimizers:
                # While it holds the parameters in their shapes.
                refuse_parts(optimizer, "FSDP1", "set fsdp_version=2 (FSDP_VERSION=2)")
        for position, model in enumerate(bundle.models):
            model = self.wrap_model(self.transformed(self.precision.wrap_forward(model), before=True))
            bundle.models[position] = self.transformed(model)
            if self.sharding is not ShardingStrategy.NO_SHARD:
                ask_for_state(bundle.models[position])
        for optimizer in bundle.optimizers:
            fsdp1_state.repoint(optimizer, list(self._plain.values()))
            if not self.plugin.use_orig_params:
                self._unused.keep(optimizer)
        return bundle

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        super().backward(loss, **kwargs)
        self._unused.settle()

    def wrap_model(self, model: nn.Module) -> nn.Module:
        if isinstance(model, FullyShardedDataParallel):
            self._register(model, PlainModel(model))
            return model
        if self.transforms and not self.plugin.use_orig_params:
            raise ConfigurationError(
                "torch.compile works on FSDP1 with use_orig_params=True (FSDP_USE_ORIG_PARAMS=true)"
            )
        refuse_unshardable(model, self.name, self.plugin.ignored_modules)
        plain = PlainModel(model)
        upcast(model, self.plugin)
        ignored = find_modules(model, self.plugin.ignored_modules)
        sharded = _shard(model, self.plugin, self.sharding, self.shards, self.device, ignored)
        if self.plugin.activation_checkpointing:
            units = [unit.module for unit in FullyShardedDataParallel.fsdp_modules(sharded) if unit is not sharded]
            checkpoint_activations(sharded, units, self.device)
        self.whole.add(sharded, {parameter for module in ignored for parameter in module.parameters()})
        self._register(sharded, plain)
        return sharded

    def _register(self, sharded: nn.Module, plain: PlainModel) -> None:
        plain.attach(sharded)
        self._plain[id(sharded)] = plain
        self._split |= {id(parameter) for parameter in plain.split_parameters()}
        self._unused.add(sharded, compiled=bool(self.transforms))

    def _plain_of(self, model: nn.Module) -> PlainModel:
        return self._plain[id(self.unwrap(model))]

    @contextlib.contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        sharded = self.unwrap(model)
        if not isinstance(sharded, FullyShardedDataParallel):
            yield
            return
        with sharded.no_sync(), self.whole.deferred(sharded), self._unused.deferred(sharded):
            yield

    def clip_grad_norm(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0
    ) -> torch.Tensor:
        # torch's own method clips whole models only, and not in double precision.
        listed = list(parameters)
        return norms.clip_parts_grad_norm(
            [parameter for parameter in listed if id(parameter) in self._split],
            [parameter for parameter in listed if id(parameter) not in self._split],
            max_norm,
            norm_type,
            self.shards.get_group(self.shards.ndim - 1),
            self.device,
        )

    def clip_grad_value(self, parameters: Iterable[torch.Tensor], clip_value: float) -> None:
        norms.clip_grad_value(parameters, clip_value)

    def traffic(self, model: nn.Module, backwards: int) -> list[Traffic]:
        return [*fsdp1_traffic.flat_traffic(self.unwrap(model), backwards), *super().traffic(model, backwards)]

    def held(self, models: Sequence[nn.Module], windows: bool) -> dict[str, int]:
        found = super().held(models, windows)
        if windows:
            # Until the window's last backward every rank keeps whole gradients.
            found[memory.GRADIENTS] += sum(fsdp1_traffic.unsharded_gradients(self.unwrap(model)) for model in models)
        return found

    def dtypes(self, model: nn.Module) -> tuple[str, str]:
        found = fsdp1_traffic.flat_dtypes(self.unwrap(model))
        return super().dtypes(model) if found is None else (dtype_name(found[0]), dtype_name(found[1]))

    def state_dict(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """The full state under the plain names: on the host of rank 0, empty on the other ranks."""
        return fsdp1_state.full_model_state(self.unwrap(model))

    def load_state_dict(self, model: nn.Module, state: dict[str, torch.Tensor], strict: bool = True) -> None:
        """Take a full state, which rank 0 alone needs to hold. Every rank calls it."""
        fsdp1_state.load_full_model_state(self.unwrap(model), self._plain_of(model), state, self.device, strict)

    def optimizer_state_dict(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The full state as `optimizer.state_dict()` of a plain run gives it: on rank 0, empty on the other ranks."""
        return fsdp1_state.full_optimizer_state(self.unwrap(model), optimizer, self._plain_of(model))

    def load_optimizer_state_dict(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]
    ) -> None:
        """Take a plain run's optimizer state, which rank 0 alone needs to hold. Every rank calls it."""
        fsdp1_state.load_full_optimizer_state(self.unwrap(model), optimizer, self._plain_of(model), state)

    def unwrap(self, model: nn.Module) -> nn.Module:
        inner = getattr(model, "_orig_mod", model)
        return inner if isinstance(inner, nn.Module) else model

    def plain(self, model: nn.Module) -> nn.Module:
        return self._plain_of(model).skeleton

    def plain_groups(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[dict[str, list[int]]]:
        plain = self._plain_of(model)
        inner = getattr(optimizer, "optimizer", optimizer)
        return [{name: plain.shapes[name] for name in names} for names in plain.groups(inner)]


def _shard_mesh(sharding: Any, layout: ParallelismConfig | None, device: torch.device) -> DeviceMesh:
    """One dimension of shards, or (copies, shards) for the hybrid strategies: by the layout, else by the machines."""
    world = dist.get_world_size()
    hybrid = sharding.name.lstrip("_").startswith("HYBRID_SHARD")
    if layout is not None:
        other = [name for name in ("tp", "cp", "sp", "pp") if layout.sizes[name] > 1]
        if other:
            raise ConfigurationError(
                f"{describe(layout)}: FSDP1 does not compose with {', '.join(other)}; set fsdp_version=2"
            )
        if layout.dp_replicate_enabled and not hybrid:
            raise ConfigurationError(
                f"{describe(layout)}: FSDP1 makes copies with sharding_strategy=HYBRID_SHARD, which is "
                f"{sharding.name} here. Set it, or fsdp_version=2"
            )
    if not hybrid:
        return init_device_mesh(device.type, (world,), mesh_dim_names=("dp_shard",))
    copies = layout.sizes["dp_replicate"] if layout else world // Topology.from_environment().local_world_size
    if copies < 1 or world % copies:
        raise ConfigurationError(
            f"sharding_strategy={sharding.name}: {world} processes are not {copies} equal machines"
        )
    return init_device_mesh(device.type, (copies, world // copies), mesh_dim_names=("dp_replicate", "dp_shard"))


def _shard(
    model: nn.Module,
    plugin: FullyShardedDataParallelPlugin,
    sharding: Any,
    shards: DeviceMesh,
    device: torch.device,
    ignored: list[nn.Module],
) -> FullyShardedDataParallel:
    policy = _policy(model, plugin, ignored)
    sync, init = bool(plugin.sync_module_states), plugin.param_init_fn
    for module in ignored:
        materialize.allocate(module, device)
        module.to(device)
        materialize.make_equal((tensor for _, tensor in materialize.named_tensors(module)), device, None)
    # Giving storage alone leaves what was in it: where rank 0 has no weights, modules fill themselves.
    filled = init if init is not give_storage else None
    empty = sync and materialize.gather_flags(materialize.where_meta(model) is not None, device, None)[0]
    if sync and (device.type == "cpu" or (empty and filled is None)):
        # torch refuses to make parameters equal that are in host memory.
        _make_equal(model, device, filled, empty)
        sync, init = False, None
    with warnings.catch_warnings():
        # Known to who asks for them: NO_SHARD is deprecated, and so is the version.
        warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed.fsdp")
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


def _policy(model: nn.Module, plugin: FullyShardedDataParallelPlugin, ignored: list[nn.Module]) -> Any:
    """The plugin's policy, without the units that would flatten only one end of a tied parameter.

    Raises PrepareError for parameters that FSDP1 cannot flatten together.
    """
    options = copy.copy(plugin)
    options.set_auto_wrap_policy(model)
    policy: Any = options.auto_wrap_policy
    if policy is not None and not callable(policy):
        # One of torch's that chooses modules in a way of its own.
        return policy
    whole = {parameter for module in ignored for parameter in module.parameters()}
    units = select_units(model, policy, whole)
    if not plugin.use_orig_params:
        _check_frozen(model, units, whole)
    chosen = {id(unit) for unit in units}
    return CustomPolicy(lambda module: id(module) in chosen)


def _check_frozen(model: nn.Module, units: list[nn.Module], ignored: set[nn.Parameter]) -> None:
    members: dict[int, list[tuple[str, nn.Parameter]]] = {}
    owners = owning_units(model, units)
    for name, parameter in model.named_parameters():
        if parameter not in ignored:
            members.setdefault(next(iter(owners[id(parameter)])), []).append((name, parameter))
    for listed in members.values():
        frozen = [name for name, parameter in listed if not parameter.requires_grad]
        if frozen and len(frozen) < len(listed):
            trained = next(name for name, parameter in listed if parameter.requires_grad)
            raise PrepareError(
                f"frozen and trained parameters in the same unit ({', '.join(frozen[:5])}; {trained}): "
                "use_orig_params=False makes one parameter of a unit. Set use_orig_params=True "
                "(FSDP_USE_ORIG_PARAMS=true), or fsdp_version=2"
            )


def _make_equal(model: nn.Module, device: torch.device, init: Callable[[nn.Module], Any] | None, empty: bool) -> None:
    """Give every rank the weights of rank 0, which the others may have built without storage; `empty`: so has it."""
    materialize.allocate(model, device)
    if empty:
        materialize.initialise(model, device, None, init)
        return
    materialize.make_equal((tensor for _, tensor in materialize.named_tensors(model)), device, None)
