# SPDX-License-Identifier: Apache-2.0
"""Pipeline parallelism as a strategy: alone, or with copies, shards and tensor-parallel parts of each stage."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint
from torch.utils.weak import WeakTensorKeyDictionary

from ...config.fsdp import FullyShardedDataParallelPlugin
from ...config.parallel import PipelineParallelConfig
from ...core.errors import CheckpointError, PrepareError
from ...parallelism_config import ParallelismConfig
from ...precision.base import Precision
from ...runtime import mesh
from .. import materialize, norms
from ..accumulated import AccumulatedGradients
from ..base import Bundle
from ..compile import Compile, compile_regions_fsdp2
from ..fsdp.fsdp2 import shard_model
from ..fsdp.units import find_modules
from ..optimizer_scope import refuse_model_scope
from ..prepared import CommunicationVolume, GroupShapes, PreparedModel
from ..pretrained import ask_for_state
from ..remap import ParameterPlaces
from ..report import memory
from ..report.communication import shard_gradients, shard_groups, shard_volume, tensor_parallel_volume
from ..sharded import ShardedModel, ShardedStrategy, lay_out_step, reshard
from ..skeleton import skeleton, without_storage
from ..tensor import strategy as tensor
from . import state, weights
from .absent import Guard, Origin
from .batch import Batch, Stage
from .communication import gradient_volume, stage_volume
from .gradients import Ties, average, hold_shards, local, reduce_shards
from .inputs import Divider, keep_to_tensors
from .order import StagePlan
from .p2p import P2PChannel
from .plan import plan, remedy_of
from .random import StageRandom
from .run import Runner
from .schedules import Scheduled
from .split import computing_units, is_inside
from .stage import StagedModel, drop_foreign, forget_aliases

logger = logging.getLogger(__name__)


@dataclass
class Stages:
    """What one pipelined model consists of on this rank.

    Fields:
        scheduled: runs its stages. ties: parameters that stages of several ranks hold. random: its random streams.
        unsharded: trainable parameters whose gradients nobody but this strategy averages.
        shapes: the parameters of the entire model in its order, name -> shape; template: a module with its state's
            names and shapes.
        names: by parameter as the user had it, its name.
        groups: by optimizer of this model, the names in each of its groups as it was made, of all stages.
        shared: optimizers that step parameters of other models too.
        wire: the messages between stages. replica_group: the ranks that hold the same stages, None where this one does
            alone. is_sharded: whether FSDP2 shards the stages.
    """

    scheduled: Scheduled
    ties: Ties
    random: StageRandom
    shapes: dict[str, list[int]]
    template: nn.Module
    wire: P2PChannel
    replica_group: Any
    is_sharded: bool
    unsharded: list[nn.Parameter] = field(default_factory=list)
    is_deferred: bool = False
    names: Any = field(default_factory=WeakTensorKeyDictionary)
    groups: weakref.WeakKeyDictionary[Any, list[list[str]]] = field(default_factory=weakref.WeakKeyDictionary)
    shared: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)

    @property
    def modules(self) -> dict[int, Stage]:
        """The stages of this rank by their number."""
        return self.scheduled.runner.stages

    def finish(self) -> None:
        """At the end of a window's last backward: what the ranks owe each other of its gradients."""
        if self.is_deferred:
            return
        reduce_shards(self.modules.values())
        self.ties.sum()
        if self.replica_group is not None:
            average(self.unsharded, self.replica_group)


class PipelinedModel(ShardedModel):
    """A model of which this rank holds some blocks. `stages` is None where it was not prepared for training."""

    def __init__(self, *arguments: Any, stages: Stages | None, saves_shards: bool) -> None:
        super().__init__(*arguments)
        self._stages = stages
        self._saves_shards = saves_shards

    @property
    def stages(self) -> Stages:
        if self._stages is None:
            raise PrepareError(f"{type(self.inner).__name__} was not prepared for training: it has no stages")
        return self._stages

    @property
    def is_pipelined(self) -> bool:
        """Whether it was prepared for training."""
        return self._stages is not None

    @property
    def saves_shards(self) -> bool:
        return self._saves_shards

    @property
    def template(self) -> nn.Module | None:
        return None if self._stages is None else self._stages.template

    def units(self) -> Iterable[nn.Module]:
        return [self.inner] if self._stages is None else self._stages.modules.values()

    # -- the step

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        stages = self._stages
        if stages is None:
            yield
            return
        before, stages.is_deferred = stages.is_deferred, True
        try:
            yield
        finally:
            stages.is_deferred = before

    # -- state

    def state_dict(self) -> dict[str, Any]:
        return state.full_model_state(self.inner, self.stages.wire)

    def load_state_dict(self, state_: Mapping[str, Any], strict: bool = True) -> None:
        state.load_full_model_state(self.inner, dict(state_), self.device, strict)

    def trains_with(self, optimizer: torch.optim.Optimizer) -> bool:
        """Also where this rank's stages hold none of the optimizer's parameters."""
        return (self._stages is not None and optimizer in self._stages.groups) or super().trains_with(optimizer)

    def _names_of(self, optimizer: torch.optim.Optimizer) -> list[list[str]]:
        """The user's names in each group of an optimizer, of all stages."""
        stages = self.stages
        if optimizer in stages.shared:
            raise CheckpointError(
                f"{type(optimizer).__name__} steps parameters of {type(self.inner).__name__} and of another pipelined "
                "model: its state cannot be collected from their stages. Make an optimizer for each model"
            )
        if optimizer in stages.groups:
            return stages.groups[optimizer]
        return state.gathered_groups(self.inner, optimizer, list(stages.shapes), stages.wire)

    def optimizer_state_dict(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return state.full_optimizer_state(self.inner, optimizer, self._names_of(optimizer), self.stages.wire)

    def load_optimizer_state_dict(self, optimizer: torch.optim.Optimizer, state_: Mapping[str, Any]) -> None:
        state.load_full_optimizer_state(self.inner, optimizer, dict(state_), self._names_of(optimizer), self.device)

    def optimizer_group_shapes(self, optimizer: torch.optim.Optimizer) -> GroupShapes:
        shapes = self.stages.shapes
        return [{name: shapes[name] for name in group} for group in self._names_of(optimizer)]

    def accumulated_gradients(self) -> AccumulatedGradients | None:
        return AccumulatedGradients(self.inner) if self._stages is None else self._stages.scheduled.held

    def rank_state(self) -> dict[str, Any] | None:
        """How far the model's stream of random numbers is, and what is known of its loss."""
        if self._stages is None:
            return None
        return {"calls": self._stages.random.calls, "rules": self._stages.scheduled.rules}

    def load_rank_state(self, state: Mapping[str, Any]) -> None:
        self.stages.random.calls, self.stages.scheduled.rules = state["calls"], tuple(state["rules"])

    # -- the report

    def communication_volume(self, backwards: int) -> list[CommunicationVolume]:
        stages = self.stages
        # The parameters of a stage stay gathered until its gradients are reduced: once a step.
        shards = [one for stage in stages.modules.values() for one in shard_volume(stage, 1)]
        split = tensor_parallel_volume(self.inner, backwards)
        tied = [local(parameter) for parameter in stages.ties.parameters()]
        rest = [local(parameter) for parameter in stages.unsharded]
        gradients = gradient_volume(rest, tied, stages.replica_group is not None)
        return [*stage_volume(stages.scheduled.runner, backwards), *shards, *split, *gradients]

    def memory_usage(self, windows: bool, seen: set[int] | None = None) -> dict[str, int]:
        found = super().memory_usage(windows, seen)
        if windows and self._stages is not None and self._stages.is_sharded:
            # Until the window's last backward every rank keeps unsharded gradients of its stages.
            modules = list(self._stages.modules.values())
            inside = {id(parameter) for stage in modules for parameter in stage.parameters()}
            rest = (p for p in self.inner.parameters() if p.requires_grad and id(p) not in inside)
            found[memory.GRADIENTS] = sum(shard_gradients(stage) for stage in modules) + memory.local_bytes(rest)
        return found


class PipelineParallel(ShardedStrategy):
    """Each rank holds some blocks of the model; micro-batches pass through the ranks."""

    name = "pipeline parallel"

    def __init__(
        self,
        device: torch.device,
        precision: Precision,
        parallelism: ParallelismConfig,
        plugin: FullyShardedDataParallelPlugin | None = None,
    ) -> None:
        super().__init__(device, precision, parallelism)
        assert self.mesh is not None
        self.options = parallelism.pp_handler or PipelineParallelConfig()
        self.plugin = plugin
        if plugin is not None and precision.native_amp:
            plugin.set_mixed_precision(precision.name)
        self.wire = P2PChannel(self.mesh["pp"].get_group(), device)
        self.replica_group = mesh.group_of(self.mesh, "dp") if parallelism.data_parallel_size > 1 else None
        self._stage_mates: Any = None
        self.ranks = _ranks_of_stages(self.options, self.wire.size)
        self._numbers = itertools.count()
        # By parameter as the user had it: whether another rank holds it now.
        self._foreign: Any = WeakTensorKeyDictionary()

    # -- prepare

    def as_prepared(self, module: nn.Module, stages: Stages | None = None) -> PipelinedModel:
        # Without an fsdp_plugin no process has the entire state anyway.
        plugin = self.plugin
        saves_shards = plugin is None or plugin.state_dict_type.name == "SHARDED_STATE_DICT"  # type: ignore[union-attr]
        return PipelinedModel(
            module, self.precision, self.device, self.sequence, stages=stages, saves_shards=saves_shards
        )

    def _prepare_training(self, bundle: Bundle) -> list[PreparedModel]:
        found: list[PreparedModel] = []
        for model in bundle.models:
            names = WeakTensorKeyDictionary(
                {parameter: materialize.canonical_name(name) for name, parameter in model.named_parameters()}
            )
            model = self.precision.wrap_forward(model)
            places = ParameterPlaces(model)
            before = list(model.parameters())
            prepared = self.lay_out(self.transformed(model, before=True))
            prepared.stages.names = names
            model = prepared.module
            self.replacements.add((former, present) for former, present in places.replaced() if not present.is_meta)
            held = {id(parameter) for parameter in model.parameters()}
            for parameter in before:
                if parameter not in self.replacements and id(parameter) not in held:
                    self._foreign[parameter] = True
            prepared.module = self.transformed(model)
            ask_for_state(prepared.module)
            found.append(prepared)
        self.remember(found)
        for optimizer in bundle.optimizers:
            refuse_model_scope(optimizer, "pp_size", "use fsdp_version=2 or tp_size without pp_size")
            self._repoint(optimizer)
            if self.plugin is not None or self.layout.tp_enabled:
                lay_out_step(optimizer)
        return found

    def transformed(self, model: nn.Module, before: bool = False) -> nn.Module:
        for transform in self.transforms:
            if getattr(transform, "before_layout", False) is not before:
                continue
            if isinstance(transform, Compile):
                # A forward that is left in its middle is no graph: its blocks are compiled, one by one.
                compile_regions_fsdp2(model, **transform.options.to_kwargs())
            else:
                model = transform.apply(model)
        return model

    def _repoint(self, optimizer: torch.optim.Optimizer) -> None:
        """Have an optimizer train what this rank holds of its parameters; the others are other ranks' work."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        trained = [one.stages for one in self.prepared if isinstance(one, PipelinedModel) and one.is_pipelined]
        trained = [one for one in trained if any(parameter in one.names for parameter in parameters)]
        if not trained:
            if self.prepared and parameters:
                raise PrepareError(
                    f"none of the {len(parameters)} parameters of {type(optimizer).__name__} belongs to a model of "
                    "this prepare call: it would train nothing. Make the optimizer from the model's parameters, and "
                    "prepare both together."
                )
            return
        for stages in trained:
            stages.groups[optimizer] = [
                [stages.names[parameter] for parameter in group["params"] if parameter in stages.names]
                for group in optimizer.param_groups
            ]
            if len(trained) > 1:
                stages.shared.add(optimizer)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter in self._foreign:
                    optimizer.state.pop(parameter, None)
            group["params"] = [parameter for parameter in group["params"] if parameter not in self._foreign]
        self.replacements.repoint(optimizer)

    def lay_out(self, model: nn.Module) -> PipelinedModel:
        options = self.options
        parts = options.num_microbatches or self.wire.size
        _check_model(model, parts)
        divider = Divider(model.forward, options.whole_inputs, parts, labels=options.loss_fn is not None)
        units = computing_units(model)
        found = plan(model, options, len(self.ranks), self.device)
        cut = found.cut
        mine = [stage for stage, rank in enumerate(self.ranks) if rank == self.wire.rank]
        own = {unit for stage in mine for unit in range(cut.bounds[stage], cut.bounds[stage + 1])}
        shapes = {materialize.canonical_name(name): list(p.shape) for name, p in model.named_parameters()}
        template = skeleton(type(model).__name__, without_storage(model.state_dict(keep_vars=True)))
        holders, guard = found.holders(model), Guard()
        ties = self._ties(model, found, holders, own)
        spread = self._spread_by_reads(model, found, holders)
        filled = self._keep_own(model, found, holders, own, guard)
        staged = StagedModel(model, cut.units, self.device, options.loss_fn, found.carried, cut.bounds, guard)
        staged.remedy = remedy_of(staged, options, len(self.ranks), units)
        if self.plugin is not None and self.plugin.activation_checkpointing:
            staged.recompute = _recompute(bool(self.plugin.activation_checkpointing_offload), self.device)
        stages = {
            stage: Stage(
                stage, [model.get_submodule(name) for name in cut.units[slice(*cut.bounds[stage : stage + 2])]]
            )
            for stage in mine
        }
        self._lay_out(model, stages, filled, spread)
        self.cast_parameters(model, stages.values())
        runner = Runner(staged, cut, stages, self.ranks, self.wire, divider, options.gather_output)
        scheduled = Scheduled(runner, options, self.precision, AccumulatedGradients(model, [model, *stages.values()]))
        random = StageRandom(self.device, next(self._numbers), self.wire.rank, self.data_shard[0])
        # Of all others nobody else averages the gradients: also in stages, where modules are left whole.
        sharded = {
            id(shard.sharded_param)
            for stage in stages.values()
            for _, group, _ in shard_groups(stage)
            for shard in group.fsdp_params
        }
        piped = Stages(
            scheduled, ties, random, shapes, template, self.wire, self.replica_group,
            is_sharded=self.plugin is not None,
            unsharded=[p for p in model.parameters() if id(p) not in sharded and p.requires_grad],
        )  # fmt: skip
        staged.entry = self._entry(piped)
        runner.before_backward += [ties.before, functools.partial(hold_shards, stages.values())]
        runner.after_backward.append(piped.finish)
        return self.as_prepared(model, piped)

    def _ties(self, model: nn.Module, found: StagePlan, holders: dict[int, set[int]], own: set[int]) -> Ties:
        """Parameters of this rank that stages of other ranks hold too."""
        ties = Ties(self.wire.group)
        inside = {id(p) for name in found.cut.units for p in model.get_submodule(name).parameters()}
        seen: set[int] = set()
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is None or id(parameter) in seen or not self._is_own(holders[id(parameter)], found, own):
                    continue
                seen.add(id(parameter))
                ranks = {self.ranks[stage] for stage in found.stages_of(holders[id(parameter)])}
                if len(ranks) > 1:
                    # Where the forward was not seen it may be that no stage uses it.
                    ties.add(module, name, ranks, unsure=found.readers is None and id(parameter) not in inside)
        return ties

    def _is_own(self, numbers: set[int], found: StagePlan, own: set[int]) -> bool:
        """Whether this rank has the stage of one of these units."""
        return bool(found.stages_of(numbers) & found.stages_of(own))

    def _spread_by_reads(self, model: nn.Module, found: StagePlan, holders: dict[int, set[int]]) -> list[nn.Module]:
        """Modules with a parameter that units of other ranks use: it is whole on all of them, also under shards."""
        read = {
            id(tensor)
            for name, tensor in materialize.named_tensors(model)
            if name in (found.readers or {})
            and len({self.ranks[stage] for stage in found.stages_of(holders[id(tensor)])}) > 1
        }
        return [m for m in model.modules() if any(id(p) in read for p in m.parameters(recurse=False))]

    def _keep_own(
        self, model: nn.Module, found: StagePlan, holders: dict[int, set[int]], own: set[int], guard: Guard
    ) -> bool:
        """Drop what other ranks hold; split what this one does, where the layout splits it. False: without weights."""
        cut, device = found.cut, self.device
        former = list(model.named_parameters(remove_duplicate=False))
        homes = {
            materialize.canonical_name(name): sorted(found.stages_of(holders[id(parameter)]))
            for name, parameter in former
        }
        mine = {unit for numbers in holders.values() for unit in numbers if self._is_own({unit}, found, own)}
        names = weights.own_names(model, holders, mine)
        absent = weights.absent_modules(model, cut.units, own)
        filled = weights.deal(model, names, absent, device)
        if self.layout.tp_enabled and self.mesh is not None:
            # The plan is the whole model's: foreign parts are split too, without memory.
            tensor.split_model(model, self.mesh["tp"], self.layout.tp_handler)
        kept = {
            id(parameter)
            for name, parameter in model.named_parameters(remove_duplicate=False)
            if materialize.canonical_name(name) in names
        }
        buffers = {
            id(buffer)
            for name, buffer in model.named_buffers(remove_duplicate=False)
            if materialize.canonical_name(name) in names
        }

        def origin(name: str) -> Origin:
            plain = materialize.canonical_name(name)
            owner = next((number for number, unit in enumerate(cut.units) if is_inside(plain, unit)), 0)
            stages = homes.get(plain, [cut.stage_of(owner)])
            home = f"stage{'s' if len(stages) > 1 else ''} {', '.join(map(str, stages))}"
            return Origin(plain, home, guard)

        drop_foreign(model, lambda parameter: id(parameter) in kept, absent, buffers, device, origin)
        present = {id(parameter) for parameter in model.parameters()}
        gone = {id(p): name for name, p in former if materialize.canonical_name(name) not in names}
        forget_aliases(model, {key: name for key, name in gone.items() if key not in present}, origin, device)
        return filled

    def _mates(self) -> Any:
        """A group of the ranks that hold the same stages; made once, by all ranks, where it is needed."""
        if self._stage_mates is None:
            count = dist.get_world_size() // self.wire.size
            groups = [dist.new_group(list(range(at * count, (at + 1) * count))) for at in range(self.wire.size)]
            self._stage_mates = groups[self.wire.rank]
        return self._stage_mates

    def _lay_out(self, model: nn.Module, stages: dict[int, Stage], filled: bool, spread: list[nn.Module]) -> None:
        """Shard the stages, or give those without weights their first values."""
        places = ParameterPlaces(model).shared()
        for stage in stages.values():
            # What initialises modules is the whole model's.
            stage.__dict__["_init_weights"] = getattr(model, "_init_weights", None)
        if self.plugin is not None:
            self._shard(model, stages, self.replica_group if filled else self._mates(), spread)
        elif not filled:
            weights.initialise(stages.values(), self.device, self._mates())
        for owners in places:
            # A tied parameter was replaced where the stage uses it: it is one everywhere.
            present = {id(module._parameters[name]): module._parameters[name] for module, name in owners}
            inside = {id(module) for stage in stages.values() for module in stage.modules()}
            chosen = next((m._parameters[n] for m, n in owners if id(m) in inside), None)
            for module, name in owners if len(present) > 1 else ():
                module._parameters[name] = chosen
        if left := materialize.where_meta(model):
            raise PrepareError(
                f"{left} stands outside of the units that stages are made of and has no weights: build the model with "
                "weights on rank 0"
            )

    def _shard(self, model: nn.Module, stages: dict[int, Stage], ranks: Any, spread: list[nn.Module]) -> None:
        assert self.plugin is not None
        plugin = copy.copy(self.plugin)
        plugin.set_auto_wrap_policy(model)
        # The parameters of a stage stay whole from one micro-batch to the next; units compute again by our own hand.
        plugin.reshard_after_forward = False
        plugin.activation_checkpointing = False
        shards = mesh.fsdp_mesh(self.layout, self.mesh, self.device)
        ignored = [*find_modules(model, plugin.ignored_modules), *spread]
        for number, stage in stages.items():
            inside = {id(module) for module in stage.modules()}
            plugin.ignored_modules = [module for module in ignored if id(module) in inside] or None
            # What the model returns is fp32, as under any layout; what stages send is not.
            full = self.precision.native_amp and number == len(self.ranks) - 1
            shard_model(stage, plugin, shards, self.device, ranks=ranks, full_outputs=full)

    # -- the step

    @staticmethod
    def _entry(piped: Stages) -> Callable[[tuple[Any, ...], dict[str, Any]], Any]:
        runner, scheduled, random = piped.scheduled.runner, piped.scheduled, piped.random

        def run(batch: Batch) -> Any:
            with random.own() if runner.staged.model.training else contextlib.nullcontext():
                return scheduled.forward(batch) if scheduled.fits(batch) else runner.forward(batch)

        def call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            batch = runner.open(args, kwargs)
            output = run(batch)
            if batch.new and batch.grad:
                scheduled.learn(batch)
                again = runner.open(args, kwargs)
                if batch.parts_agreed or scheduled.fits(again):
                    # It goes as every later batch of its kind: the same numbers, wherever a run was resumed.
                    batch, output = again, None
                    output = run(batch)
            if runner.staged.model.training:
                random.calls += 1
            if not batch.grad:
                reshard(runner.stages.values())
            return output

        return call

    def reduce_items(self, count: torch.Tensor) -> Any:
        return None if self.replica_group is None else dist.all_reduce(count, group=self.replica_group, async_op=True)

    def clip_grad_norm(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0
    ) -> torch.Tensor:
        trained = [one.stages for one in self.prepared if isinstance(one, PipelinedModel) and one.is_pipelined]
        twins = {twin for stages in trained for twin in stages.ties.twins()}
        return norms.clip_grad_norm(parameters, max_norm, norm_type, (self.wire.group,), self.device, twins)


def _ranks_of_stages(options: PipelineParallelConfig, ranks: int) -> list[int]:
    """The rank of the pipeline that holds each stage: in turns, or there and back."""
    if options.schedule == "zbv":
        return [*range(ranks), *reversed(range(ranks))]
    return list(range(ranks)) * (options.stages_per_rank or 1)


def _check_model(model: nn.Module, parts: int) -> None:
    """Refuse what would not compute the same by micro-batches, and set what a pipeline has no use for."""
    if parts > 1:
        for name, module in model.named_modules():
            if isinstance(module, _BatchNorm) and module.track_running_stats:
                raise PrepareError(
                    f"{name} ({type(module).__name__}) takes statistics of a batch, which a pipeline divides: freeze "
                    "it, use a norm of single samples, or set num_microbatches=1"
                )
    keep_to_tensors(model)


def _recompute(offload: bool, device: torch.device) -> Callable[..., Any]:
    """How a unit computes that keeps its inputs alone."""

    def run(inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with (
            torch.autograd.graph.save_on_cpu(pin_memory=device.type == "cuda")
            if offload and device.type != "cpu"
            else contextlib.nullcontext()
        ):
            return checkpoint(inner, *args, use_reentrant=False, **kwargs)

    return run
