# SPDX-License-Identifier: Apache-2.0
"""Fully sharded data parallelism through torch's older FullyShardedDataParallel (FSDP1).

For configurations with `fsdp_version=1`, as long as torch has it; FSDP2 is the default.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import CustomPolicy

from ...config.fsdp import FullyShardedDataParallelPlugin, give_storage
from ...core import trees
from ...core.devices import kind_of
from ...core.errors import CheckpointError, ConfigurationError, PrepareError
from ...core.modules import is_compiled_module, move_module, moves_in_place
from ...parallelism_config import ParallelismConfig
from ...precision.base import Precision
from ...runtime import group
from ...runtime.mesh import describe
from ...runtime.topology import Topology
from .. import gradients, materialize, norms
from ..activation import checkpoint_activations
from ..base import Bundle, Strategy, one_shard_each
from ..gradients import refuse_gradient_hooks, refuse_later_hooks
from ..optimizer_scope import refuse_flat_shards
from ..prepared import Change, CommunicationVolume, GroupShapes, PreparedModel
from ..pretrained import require_state_dict
from ..report import memory
from ..report.communication import dtype_name, flat_gradients, flat_volume
from . import fsdp1_state, fsdp1_traced
from . import state as fsdp_state
from .common import UnreducedGradients, added_parameter, fill_policy, keep_unpacked, refuse_unshardable
from .fsdp1_state import FlatGradients, PlainModel
from .fsdp1_unused import ParameterUsage, UsageAgreement, free_unsharded, keep_unused, refuse_flat_outside
from .fsdp2 import upcast
from .inference_mode import NormalForward
from .units import find_modules, flat_units, owning_units, select_units

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp._flat_param import FlatParamHandle


class Fsdp1Model(PreparedModel):
    """A model whose units' parameters FSDP1 has flattened.

    Fields:
        plain: what the model was before.
        usage: which parameters have received a gradient.
        device: that of the run.
        saves_shards: whether a checkpoint stores shards (`state_dict_type`).
    """

    is_partial = True

    def __init__(
        self,
        module: nn.Module,
        precision: Precision,
        device: torch.device,
        saves_shards: bool,
        plain: PlainModel | None,
    ) -> None:
        super().__init__(module, precision)
        self.device = device
        self.saves_shards = saves_shards
        self._plain = plain
        self.usage: ParameterUsage | None = None

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
        return self.uncompiled

    @property
    def template(self) -> nn.Module | None:
        """The user's names and shapes."""
        return None if self._plain is None else self._plain.skeleton

    def new_parameters(self) -> dict[str, nn.Parameter]:
        """Trainable parameters that the model did not have when it was flattened."""
        known = None if self._plain is None else self._plain.names
        return {
            name: parameter
            for name, parameter in materialize.named_parameters(self.inner)
            if known is not None and parameter.requires_grad and id(parameter) not in known
        }

    def added_parameter(self, name: str) -> PrepareError:
        """The error for a parameter of `new_parameters`."""
        return added_parameter(name, "the model", "FSDP1")

    # -- the step

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """The `no_sync` of torch; unsharded parameters and unused ones wait as well."""
        sharded = self.inner
        if not isinstance(sharded, FullyShardedDataParallel):
            yield
            return
        with sharded.no_sync(), gradients.deferred(self.reducers):
            yield

    # -- state

    def accumulated_gradients(self) -> FlatGradients:
        """The gradients of an unfinished window, of units and of other parameters."""
        return FlatGradients(self.inner, self.usage)

    def state_dict(self) -> dict[str, Any]:
        """The full state under the user's names: on the host of rank 0, empty on the other ranks."""
        return fsdp1_state.full_model_state(self.inner)

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Load a full state, which only rank 0 needs to have; every rank calls it."""
        fsdp1_state.load_full_model_state(self.inner, self.plain, state, self.device, strict)

    def optimizer_state_dict(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The full state as that of a single process: on rank 0, empty on the other ranks."""
        return fsdp_state.full_optimizer_state(self.inner, optimizer, self.plain.groups(optimizer))

    def load_optimizer_state_dict(self, optimizer: torch.optim.Optimizer, state: Mapping[str, object]) -> None:
        """Load the optimizer state of a single process, which only rank 0 needs to have; every rank calls it."""
        fsdp_state.load_full_optimizer_state(self.inner, optimizer, state, self.plain.groups(optimizer))

    def optimizer_group_shapes(self, optimizer: torch.optim.Optimizer) -> GroupShapes:
        """Names and shapes in each group, before flattening."""
        plain = self.plain
        return [{name: plain.shapes[name] for name in names} for names in plain.groups(optimizer)]

    # -- a traced step

    def kept_parameters(self) -> list[torch.Tensor]:
        """The flat parameters, and all that are in none."""
        flats = [handle.flat_param for _, handle, _ in flat_units(self.inner)]
        views = [
            view for flat in flats for view in (flat, *(flat._params or ()), *(getattr(flat, "_tensors", None) or ()))
        ]
        inside = {id(view) for view in views}
        return [*flats, *(parameter for parameter in self.module.parameters() if id(parameter) not in inside)]

    def _named_blocks(self) -> list[nn.Module]:
        """The modules of the units inside of the outermost one."""
        units = FullyShardedDataParallel.fsdp_modules(self.inner)
        return [unit.module for unit in units if unit is not self.inner] or super()._named_blocks()

    def traceable_changes(self) -> dict[Change, str]:
        """Also those of the units."""
        return {**super().traceable_changes(), **fsdp1_traced.changes(self.inner, self.device.type == "cpu")}

    def traced_copy(self, change: Change) -> nn.Module:
        """A copy whose units FSDP1 shards over the same ranks."""
        return fsdp1_traced.fake_sharded_copy(self.inner, change)

    def switch_reduction(self, copied: nn.Module, on: bool) -> None:
        """Of all units."""
        for unit in FullyShardedDataParallel.fsdp_modules(copied):
            unit._sync_gradients = on  # type: ignore[assignment]

    def tracing(self) -> contextlib.AbstractContextManager[None]:
        """Addresses for storages without memory."""
        return fsdp1_traced.storage_addresses()

    def offloads(self) -> bool:
        """By the option of the units."""
        return fsdp1_traced.offloads(self.inner)

    # -- the report

    def communication_volume(self, backwards: int) -> list[CommunicationVolume]:
        """All-gathers and reduce-scatters of the units, and what this library adds."""
        rest = [volume for reducer in self.reducers for volume in reducer.communication_volume()]
        return [*flat_volume(self.inner, backwards), *rest]

    def window_gradients(self) -> int:
        """Those of flat parameters, unsharded, and of all others."""
        shards = memory.local_bytes(p for p in self.kept_parameters() if p.requires_grad)
        return shards + flat_gradients(self.inner)

    def dtypes(self) -> tuple[str, str]:
        """The dtypes of the flat parameters."""
        handle = next((handle for _, handle, _ in flat_units(self.inner)), None)
        if handle is None:
            return super().dtypes()
        return dtype_name(handle._fwd_bwd_param_dtype), dtype_name(handle._reduce_dtype)


class FullyShardedDataParallel1(Strategy):
    """Each rank keeps a shard of each unit's flattened parameters; a unit is gathered to compute."""

    name = "FSDP1"
    data_shard = property(one_shard_each)

    def __init__(
        self,
        device: torch.device,
        precision: Precision,
        plugin: FullyShardedDataParallelPlugin,
        parallelism: ParallelismConfig | None = None,
    ) -> None:
        fill_policy(plugin, 1, precision)
        self.plugin = plugin
        if plugin.cpu_offload.offload_params and device.type == "cpu":  # type: ignore[union-attr]
            raise ConfigurationError(
                "cpu_offload: the shards are in host memory on the CPU anyway, and torch's FSDP1 fails when it copies "
                "them there. Leave it out, or set fsdp_version=2."
            )
        if not dist.is_initialized():
            group.start_alone(kind_of(device))
        super().__init__(device, precision)
        self.sharding: ShardingStrategy = ShardingStrategy.NO_SHARD
        if dist.get_world_size() > 1:
            self.sharding = plugin.sharding_strategy  # type: ignore[assignment]
        self.shards: DeviceMesh = _shard_mesh(self.sharding, parallelism, device)
        self._agreement = UsageAgreement(device)

    def as_prepared(self, module: nn.Module, plain: PlainModel | None = None) -> Fsdp1Model:
        """A prepared model with the plugin's kind of checkpoint."""
        # LOCAL_STATE_DICT's are stored as shards too, so that any layout can load them.
        saves_shards = self.plugin.state_dict_type.name != "FULL_STATE_DICT"  # type: ignore[union-attr]
        return Fsdp1Model(module, self.precision, self.device, saves_shards, plain)

    def prepare(self, bundle: Bundle) -> list[PreparedModel]:
        """Shard each model, and re-point optimizers that were made before."""
        if bundle.evaluation:
            return super().prepare(bundle)
        if self.sharding is not ShardingStrategy.NO_SHARD or not self.plugin.use_orig_params:
            for optimizer in bundle.optimizers:
                # Its parameters still have their shapes.
                refuse_flat_shards(optimizer, "FSDP1", "set fsdp_version=2 (FSDP_VERSION=2)")
        found: list[PreparedModel] = []
        for model in bundle.models:
            prepared = self.compose(model)
            if self.sharding is not ShardingStrategy.NO_SHARD:
                require_state_dict(prepared.module)
            found.append(prepared)
        self.prepared.add(found)
        for optimizer in bundle.optimizers:
            fsdp1_state.repoint(optimizer, self._plain_models())
            if not self.plugin.use_orig_params:
                keep_unused(optimizer, self._usages())
            if self.sharding.name in ("SHARD_GRAD_OP", "_HYBRID_SHARD_ZERO2"):
                optimizer.register_step_pre_hook(functools.partial(_free_before_step, self.prepared))
        return found

    def _plain_models(self) -> list[PlainModel]:
        return [p._plain for p in self.prepared if isinstance(p, Fsdp1Model) and p._plain is not None]

    def _usages(self) -> list[ParameterUsage]:
        return [p.usage for p in self.prepared if isinstance(p, Fsdp1Model) and p.usage is not None]

    def backward(self, loss: torch.Tensor, **kwargs: object) -> None:
        """The backward, and what FSDP1 does not reduce; gradients that no rank has used then become None."""
        usages = self._usages()
        for usage in usages:
            usage.begin_backward()
        try:
            super().backward(loss, **kwargs)
        except RuntimeError as error:
            refuse_flat_outside(error, usages)
            raise
        for usage in usages:
            usage.end_backward()
        for prepared in self.prepared:
            gradients.finish(prepared.reducers)
        self._agreement.drop_unused(usages)

    def lay_out(self, model: nn.Module) -> Fsdp1Model:
        """Shard one model, and record its names, shapes and usage."""
        if isinstance(model, FullyShardedDataParallel):
            plain = PlainModel(model)
            plain.attach(model)
            return self._with_reducers(self.as_prepared(model, plain), [])
        if self.transforms and not self.plugin.use_orig_params:
            raise ConfigurationError(
                "torch.compile works on FSDP1 with use_orig_params=True (FSDP_USE_ORIG_PARAMS=true)"
            )
        if is_compiled_module(model):
            raise PrepareError(
                "FSDP1 cannot shard a model that torch.compile has wrapped: its state dict would have flat shards. "
                "Give prepare the plain model and the Accelerator dynamo_plugin=TorchDynamoPlugin(...), or set "
                "fsdp_version=2"
            )
        refuse_unshardable(model, self.name, self.plugin.ignored_modules)
        keep_unpacked(model)
        refuse_gradient_hooks(model, self.name)
        if materialize.where_meta(model) is None and not moves_in_place(model, self.device):
            # torch would move each unit by an assignment to `data`.
            move_module(model, self.device)
        plain = PlainModel(model)
        upcast(model, self.plugin)
        ignored = find_modules(model, self.plugin.ignored_modules)
        sharded = _shard(model, self.plugin, self.sharding, self.shards, self.device, ignored)
        if self.plugin.activation_checkpointing:
            units = [unit.module for unit in FullyShardedDataParallel.fsdp_modules(sharded) if unit is not sharded]
            checkpoint_activations(sharded, units, self.device)
        plain.attach(sharded)
        if not self.transforms:
            NormalForward(sharded)
        return self._with_reducers(self.as_prepared(sharded, plain), ignored)

    def _with_reducers(self, prepared: Fsdp1Model, ignored: list[nn.Module]) -> Fsdp1Model:
        for module in FullyShardedDataParallel.fsdp_modules(prepared.inner):
            vars(module)["__deepcopy__"] = _refuse_copy
        units = list(flat_units(prepared.inner))
        for unit in () if self.plugin.use_orig_params else units:
            _refuse_freezing(unit.handle)
        # In an order that is the same on all ranks.
        unsharded = {id(parameter): parameter for module in ignored for parameter in module.parameters()}
        prepared.usage = ParameterUsage(prepared.module, compiled=bool(self.transforms))
        shown = (parameter for unit in prepared.usage.units for parameter in unit.originals)
        refuse_later_hooks(shown, accumulated=True)
        if not self.transforms:
            gathered = [unit.module for unit in units]
            prepared.module.register_forward_hook(functools.partial(_free_without_backward, gathered))
        prepared.reducers = [UnreducedGradients(self.gradient_group, unsharded.values()), prepared.usage]
        return prepared

    def clip_grad_norm(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0
    ) -> torch.Tensor:
        """Clip shards and replicated parameters together (torch clips one complete model, not in double precision)."""
        listed = list(parameters)
        group_ = self.shards.get_group(self.shards.ndim - 1)
        split = {id(parameter) for plain in self._plain_models() for parameter in plain.split}
        # The first rank counts what is replicated.
        elsewhere = {id(parameter) for parameter in listed} - split if dist.get_rank(group_) else set()
        return norms.clip_grad_norm(listed, max_norm, norm_type, (group_,), self.device, elsewhere)


def _refuse_copy(memo: object) -> NoReturn:
    """`copy.deepcopy` of an FSDP1 unit: the parameters of the copy would not be those with which it computes."""
    raise PrepareError(
        "copy.deepcopy of a model that FSDP1 shards, as for averaged weights (AveragedModel, EMA): torch cannot copy "
        "its flat parameters. Set fsdp_version=2 (FSDP_VERSION=2), whose models can be copied"
    )


def _refuse_freezing(handle: FlatParamHandle) -> None:
    """Make `requires_grad_` of modules inside of a flattened unit an error: they have no separate parameters."""
    flattened = {module for _, module, _ in handle.flat_param._param_infos}
    for name, module in handle._fully_sharded_module.named_modules():
        if name and not isinstance(module, FullyShardedDataParallel) and not flattened.isdisjoint(module.modules()):
            vars(module)["requires_grad_"] = functools.partial(_refuse_part, name)


def _refuse_part(name: str, requires_grad: bool = True) -> NoReturn:
    raise PrepareError(
        f"FSDP1 with use_orig_params=False: {name} is a part of a unit, whose parameters are one flattened parameter, "
        "and cannot be frozen or unfrozen alone. Set use_orig_params=True (FSDP_USE_ORIG_PARAMS=true) or "
        "fsdp_version=2, or call requires_grad_ of the unit"
    )


def _free_before_step(models: Iterable[PreparedModel], *_: object) -> None:
    """Free unsharded parameters, which a forward between the backward and the step leaves behind: they get stale."""
    for prepared in models:
        if isinstance(prepared, Fsdp1Model) and prepared.usage is not None:
            for unit in prepared.usage.units:
                free_unsharded(unit.wrapped)


def _free_without_backward(
    units: Sequence[FullyShardedDataParallel], module: nn.Module, args: object, output: object
) -> None:
    """Free what a forward has gathered that no backward follows: a change of parameters would make it stale.

    Torch keeps the parameters of the outermost unit for the backward. Those of a frozen model that averages another
    one (a teacher, EMA) change without a backward.
    """
    if any(leaf.requires_grad for leaf in trees.leaves(output)):
        return
    for unit in units:
        free_unsharded(unit)


def _shard_mesh(sharding: ShardingStrategy, layout: ParallelismConfig | None, device: torch.device) -> DeviceMesh:
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
        materialize.make_equal((tensor for _, tensor in materialize.named_tensors(module)), device, None)
    # `give_storage` only allocates: if rank 0 has no weights, the modules initialize themselves.
    filled = init if init is not give_storage else None
    empty = sync and materialize.gather_flags(materialize.where_meta(model) is not None, device, None)[0]
    if sync and (device.type == "cpu" or (empty and filled is None)):
        # torch does not synchronize parameters in host memory.
        materialize.allocate(model, device)
        if empty:
            materialize.initialise(model, device, None, filled)
        else:
            materialize.make_equal((tensor for _, tensor in materialize.named_tensors(model)), device, None)
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


def _policy(model: nn.Module, plugin: FullyShardedDataParallelPlugin, ignored: list[nn.Module]) -> CustomPolicy:
    """The plugin's policy, without the units that would flatten only one end of a tied parameter.

    Raises PrepareError for parameters that FSDP1 cannot flatten together.
    """
    options = copy.copy(plugin)
    options.set_auto_wrap_policy(model)
    skipped = {parameter for module in ignored for parameter in module.parameters()}
    # In evaluation this layer gives the weights of the modules inside to a kernel, without calling them.
    undivided = (nn.TransformerEncoderLayer,)
    units = select_units(model, options.auto_wrap_policy, skipped, undivided)  # type: ignore[arg-type]
    members: dict[int, list[tuple[str, nn.Parameter]]] = {}
    owners = owning_units(model, units)
    for name, parameter in model.named_parameters():
        if parameter not in skipped:
            members.setdefault(next(iter(owners[id(parameter)])), []).append((name, parameter))
    for listed in members.values():
        _check_flat(listed)
        if not plugin.use_orig_params:
            _check_frozen(listed)
    chosen = {id(unit) for unit in units}
    return CustomPolicy(lambda module: id(module) in chosen)


def _check_flat(members: list[tuple[str, nn.Parameter]]) -> None:
    """Raise PrepareError for parameters that have no place in one flat parameter."""
    first, usual = members[0][0], members[0][1].dtype
    for name, parameter in members:
        if parameter.ndim == 0:
            raise PrepareError(
                f"{name} is a scalar (a parameter without dimensions), which FSDP1 does not shard. Give it one "
                "dimension of one element (torch.tensor([value])), put its module into ignored_modules, or set "
                "fsdp_version=2"
            )
        if not parameter.is_floating_point():
            raise PrepareError(
                f"{name} has the dtype {parameter.dtype}, which FSDP1 does not flatten. Put its module into "
                "ignored_modules, or set fsdp_version=2"
            )
        if parameter.dtype != usual:
            raise PrepareError(
                f"{first} has the dtype {usual} and {name}, in the same unit, {parameter.dtype}: FSDP1 flattens them "
                "into one parameter. Give them one dtype, make their modules units by another auto_wrap_policy, or "
                "set fsdp_version=2"
            )


def _check_frozen(members: list[tuple[str, nn.Parameter]]) -> None:
    frozen = [name for name, parameter in members if not parameter.requires_grad]
    if frozen and len(frozen) < len(members):
        trained = next(name for name, parameter in members if parameter.requires_grad)
        raise PrepareError(
            f"frozen and trained parameters in the same unit ({', '.join(frozen[:5])}; {trained}): "
            "use_orig_params=False makes one parameter of a unit. Set use_orig_params=True "
            "(FSDP_USE_ORIG_PARAMS=true), or fsdp_version=2"
        )
