# SPDX-License-Identifier: Apache-2.0
"""Pipeline parallelism as a strategy: alone, or with replicas, FSDP2 or tensor parallelism of each stage."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint
from torch.utils.weak import WeakTensorKeyDictionary

from ...config.fsdp import FullyShardedDataParallelPlugin
from ...config.parallel import PipelineParallelConfig
from ...core import devices
from ...core.errors import PrepareError
from ...parallelism_config import ParallelismConfig
from ...precision.base import Precision
from ...runtime import mesh
from .. import materialize, norms
from ..accumulated import AccumulatedGradients
from ..base import Bundle
from ..compile import Compile, compile_regions_fsdp2
from ..fsdp.fsdp2 import shard_model
from ..fsdp.units import find_modules, reshard, shards_of
from ..gradients import finish
from ..optimizer_scope import refuse_model_scope
from ..prepared import PreparedModel
from ..pretrained import require_state_dict
from ..remap import ParameterPlaces, trains_nothing
from ..sharded import ShardedModel, ShardedStrategy, lay_out_step
from ..tensor import strategy as tensor
from . import state
from .microbatch import Batch, BatchSplitter, Stage, restrict_outputs
from .model import PipelinedModel, StageRandom, Stages, TiedParameters, defer_reduction
from .p2p import P2PChannel
from .remote_tensor import Origin, StageContext
from .runner import Runner
from .schedules import ScheduleRunner
from .split import computing_units, is_inside
from .stage import Args, Forward, Kwargs, StagedModel
from .stage_plan import StagePlan, call_remedy, plan_stages


class PipelineParallel(ShardedStrategy):
    """Each rank has some blocks of the model; micro-batches pass through the ranks."""

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
        self.options: PipelineParallelConfig = parallelism.pp_handler or PipelineParallelConfig()
        self.plugin = plugin
        if plugin is not None and precision.native_amp:
            plugin.set_mixed_precision(precision.name)
        self.channel: P2PChannel = P2PChannel(self.mesh["pp"].get_group(), device)
        self.gradient_group: dist.ProcessGroup | None = (
            mesh.group_of(self.mesh, "dp") if parallelism.data_parallel_size > 1 else None
        )
        self._same_stages: dist.ProcessGroup | None = None
        # The rank of the pipeline that has each stage.
        ranks = range(self.channel.size)
        self.ranks: list[int] = list(ranks) * (self.options.stages_per_rank or 1)
        if self.options.schedule_row.v_shaped:
            self.ranks = [*ranks, *reversed(ranks)]
        self._model_numbers = itertools.count()
        # Parameters, as the user had them, that other ranks have now.
        self._foreign = WeakTensorKeyDictionary()

    # -- prepare

    @property
    def saves_shards(self) -> bool:
        """Whether a checkpoint stores shards; without an fsdp_plugin, too, no process has the entire state."""
        plugin = self.plugin
        return plugin is None or plugin.state_dict_type.name == "SHARDED_STATE_DICT"  # type: ignore[union-attr]

    def as_prepared(self, module: nn.Module) -> ShardedModel:
        """A prepared model of a module without stages, which does not train."""
        return ShardedModel(module, self.precision, self.device, self.sequence, self.saves_shards)

    def _prepare_training(self, bundle: Bundle) -> list[PreparedModel]:
        found: list[PreparedModel] = []
        for model in bundle.models:
            names = WeakTensorKeyDictionary({p: name for name, p in materialize.named_parameters(model)})
            places = ParameterPlaces(model)
            before = list(model.parameters())
            prepared = self.compose(model)
            assert isinstance(prepared, PipelinedModel)
            model = prepared.module
            for name, parameter in materialize.named_parameters(model):
                names[parameter] = name
            prepared.stages.names = names
            self.replacements.add((former, present) for former, present in places.replaced() if not present.is_meta)
            present = {id(parameter) for parameter in model.parameters()}
            for parameter in before:
                if parameter not in self.replacements and id(parameter) not in present:
                    self._foreign[parameter] = True
            require_state_dict(prepared.module)
            found.append(prepared)
        self.prepared.add(found)
        for optimizer in bundle.optimizers:
            refuse_model_scope(optimizer, "pp_size", "use fsdp_version=2 or tp_size without pp_size")
            self._repoint(optimizer)
            if self.plugin is not None or self.layout.tp_enabled:
                lay_out_step(optimizer)
        return found

    def _transform(self, model: nn.Module, before_layout: bool) -> nn.Module:
        for transform in self.transforms:
            if getattr(transform, "before_layout", False) is not before_layout:
                continue
            if isinstance(transform, Compile):
                # A forward that is left in its middle cannot be one graph: its blocks are compiled, one by one.
                compile_regions_fsdp2(model, **transform.options.to_kwargs())
            else:
                model = transform.apply(model)
        return model

    def _repoint(self, optimizer: torch.optim.Optimizer) -> None:
        """Have an optimizer step this rank's parameters; other ranks step the rest."""
        trained = [one.stages for one in self.prepared if isinstance(one, PipelinedModel)]
        everyone = materialize.from_all([one.names_in(optimizer) for one in trained], self.channel.group)
        named = [
            (one, one.merge_names(listed)) for one, listed in zip(trained, zip(*everyone, strict=True), strict=True)
        ]
        named = [(one, groups) for one, groups in named if any(groups)]
        if not named:
            if any(True for _ in self.prepared):
                raise trains_nothing(optimizer)
            return
        for stages, groups in named:
            stages.groups[optimizer] = groups
            if len(named) > 1:
                stages.shared.add(optimizer)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter in self._foreign:
                    optimizer.state.pop(parameter, None)
            group["params"] = [parameter for parameter in group["params"] if parameter not in self._foreign]
        self.replacements.repoint(optimizer)

    def lay_out(self, model: nn.Module) -> PipelinedModel:
        """Cut the model into stages, and keep the weights of this rank's stages."""
        options = self.options
        count = options.num_microbatches or self.channel.size
        _check_model(model, count)
        splitter = BatchSplitter(model.forward, options.whole_inputs, count, labels=options.loss_fn is not None)
        units = computing_units(model)
        plan = plan_stages(model, options, len(self.ranks), self.device)
        cut = plan.cut
        mine = [stage for stage, rank in enumerate(self.ranks) if rank == self.channel.rank]
        own = {unit for stage in mine for unit in range(cut.bounds[stage], cut.bounds[stage + 1])}
        shapes = {name: list(parameter.shape) for name, parameter in materialize.named_parameters(model)}
        state_shapes = materialize.without_storage(model.state_dict(keep_vars=True))
        template = materialize.skeleton(type(model).__name__, state_shapes)
        locations, context = plan.locations(model), StageContext()
        tied = self._tied_parameters(model, plan, locations, own)
        unsharded = self._unshardable(model, plan, locations)
        has_weights = self._keep_own(model, plan, locations, own, context)
        staged = StagedModel(model, cut.units, self.device, options.loss_fn, plan.carried, cut.bounds, context)
        staged.remedy = call_remedy(staged, options, len(self.ranks), units)
        if self.plugin is not None and self.plugin.activation_checkpointing:
            staged.recompute = _recompute(bool(self.plugin.activation_checkpointing_offload), self.device)
        stages = {
            stage: Stage(
                stage, [model.get_submodule(name) for name in cut.units[slice(*cut.bounds[stage : stage + 2])]]
            )
            for stage in mine
        }
        self._lay_out(model, stages, has_weights, unsharded)
        self.cast_parameters(model, stages.values())
        runner = Runner(staged, cut, stages, self.ranks, self.channel, splitter, options.gather_output)
        accumulated = AccumulatedGradients(model, [model, *stages.values()])
        sharded = {id(shard.sharded_param) for shard in shards_of(stages.values())}
        piped = Stages(
            ScheduleRunner(runner, options, self.precision, accumulated),
            tied,
            StageRandom(self.device, next(self._model_numbers), self.channel.rank, self.data_shard[0]),
            shapes,
            template,
            self.gradient_group,
            is_sharded=self.plugin is not None,
            unsharded=[p for p in model.parameters() if id(p) not in sharded and p.requires_grad],
        )
        staged.entry = self._entry(piped)
        vars(model)["__deepcopy__"] = _refuse_copy
        runner.before_backward += [tied.before_backward, functools.partial(defer_reduction, stages.values())]
        runner.after_backward.append(functools.partial(finish, [piped]))
        return PipelinedModel(model, self.precision, self.device, self.sequence, self.saves_shards, stages=piped)

    def _tied_parameters(
        self, model: nn.Module, plan: StagePlan, locations: dict[int, set[int]], own: set[int]
    ) -> TiedParameters:
        """Parameters of this rank that stages of other ranks have, too."""
        tied = TiedParameters(self.channel.group)
        inside = {id(p) for name in plan.cut.units for p in model.get_submodule(name).parameters()}
        seen: set[int] = set()
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is None or id(parameter) in seen:
                    continue
                seen.add(id(parameter))
                stages = plan.stages_of(locations[id(parameter)])
                ranks = {self.ranks[stage] for stage in stages}
                if len(ranks) > 1 and stages & plan.stages_of(own):
                    # Where the forward was not observed, perhaps no stage uses it.
                    tied.add(module, name, ranks, maybe_unused=plan.readers is None and id(parameter) not in inside)
        return tied

    def _unshardable(self, model: nn.Module, plan: StagePlan, locations: dict[int, set[int]]) -> set[str]:
        """Plain names of parameters that FSDP2 leaves unsharded.

        They are read on several ranks, or tied between two stages of one rank, which FSDP2 shards separately.
        """
        found = set()
        for name, value in materialize.named_tensors(model):
            ranks = [self.ranks[stage] for stage in plan.stages_of(locations.get(id(value), set()))]
            if len(set(ranks)) < len(ranks) or (name in (plan.readers or {}) and len(ranks) > 1):
                found.add(name)
        return found

    def _keep_own(
        self,
        model: nn.Module,
        plan: StagePlan,
        locations: dict[int, set[int]],
        own: set[int],
        context: StageContext,
    ) -> bool:
        """Drop the parameters of other ranks, and apply tensor parallelism to those of this one.

        Returns:
            Whether rank 0 had weights; otherwise they are yet to be initialised.
        """
        cut, device = plan.cut, self.device
        former = list(materialize.named_parameters(model, remove_duplicate=False))
        homes = {name: sorted(plan.stages_of(locations[id(parameter)])) for name, parameter in former}
        own_stages = plan.stages_of(own)
        mine = {unit for units in locations.values() for unit in units if cut.stage_of(unit) in own_stages}
        names = state.own_names(model, locations, mine)
        foreign = [model.get_submodule(name) for number, name in enumerate(cut.units) if number not in own]
        has_weights = state.distribute(model, names, foreign, device)
        if self.layout.tp_enabled and self.mesh is not None:
            # The plan is that of the complete model: modules of other stages are split too, without memory.
            tensor.split_model(model, self.mesh["tp"], self.layout.tp_handler)
        tensors = materialize.named_tensors(model, remove_duplicate=False)
        kept = {id(value) for name, value in tensors if name in names}

        def origin(name: str) -> Origin:
            plain = materialize.canonical_name(name)
            owner = next((number for number, unit in enumerate(cut.units) if is_inside(plain, unit)), 0)
            stages = homes.get(plain, [cut.stage_of(owner)])
            return Origin(plain, f"stage{'s' if len(stages) > 1 else ''} {', '.join(map(str, stages))}", context)

        state.drop_foreign(model, kept, foreign, device, origin)
        present = {id(parameter) for parameter in model.parameters()}
        gone = {id(parameter): name for name, parameter in former if name not in names}
        state.drop_aliases(model, {key: name for key, name in gone.items() if key not in present}, origin, device)
        return has_weights

    def _same_stages_group(self) -> dist.ProcessGroup:
        """The ranks that have the same stages. All ranks make the groups, once, where they are needed."""
        if self._same_stages is None:
            count = dist.get_world_size() // self.channel.size
            groups = [dist.new_group(list(range(at * count, (at + 1) * count))) for at in range(self.channel.size)]
            self._same_stages = groups[self.channel.rank]
        return self._same_stages

    def _lay_out(self, model: nn.Module, stages: dict[int, Stage], has_weights: bool, unsharded: set[str]) -> None:
        """Shard the stages, or initialise those without weights."""
        places = ParameterPlaces(model).shared()
        for stage in stages.values():
            # The complete model's function initialises modules.
            stage.__dict__["_init_weights"] = getattr(model, "_init_weights", None)
        if self.plugin is not None:
            ranks = self.gradient_group if has_weights else self._same_stages_group()
            self._shard(model, stages, self.plugin, ranks, unsharded)
        elif not has_weights:
            # Identically on all ranks with the same stages.
            ranks = self._same_stages_group()
            for stage in stages.values():
                if materialize.where_meta(stage) is not None:
                    materialize.allocate(stage, self.device)
                    materialize.initialise(stage, self.device, ranks)
        for owners in places:
            # A tied parameter was replaced where a stage uses it: its other places follow.
            present = {id(module._parameters[name]): module._parameters[name] for module, name in owners}
            inside = {id(module) for stage in stages.values() for module in stage.modules()}
            chosen = next((m._parameters[n] for m, n in owners if id(m) in inside), None)
            for module, name in owners if len(present) > 1 else ():
                module._parameters[name] = chosen
        if left := materialize.where_meta(model):
            raise PrepareError(
                f"{left} is outside of the units that stages consist of and has no weights: build the model with "
                "weights on rank 0"
            )

    def _shard(
        self,
        model: nn.Module,
        stages: dict[int, Stage],
        plugin: FullyShardedDataParallelPlugin,
        ranks: dist.ProcessGroup | None,
        unsharded: set[str],
    ) -> None:
        plugin = copy.copy(plugin)
        plugin.set_auto_wrap_policy(model)
        # Parameters stay gathered from one micro-batch to the next. `StagedModel.recompute` checkpoints the units.
        plugin.reshard_after_forward = False
        plugin.activation_checkpointing = False
        shards = mesh.fsdp_mesh(self.layout, self.mesh, self.device)
        ignored = find_modules(model, plugin.ignored_modules)
        read = {parameter for name, parameter in materialize.named_parameters(model) if name in unsharded}
        for number, stage in stages.items():
            inside = {id(module) for module in stage.modules()}
            plugin.ignored_modules = [module for module in ignored if id(module) in inside] or None
            # What the model returns is fp32, as under any layout; what stages send is not.
            full = self.precision.native_amp and number == len(self.ranks) - 1
            shard_model(stage, plugin, shards, self.device, ranks=ranks, full_outputs=full, unsharded=read)

    # -- the step

    @staticmethod
    def _entry(piped: Stages) -> Callable[[Args, Kwargs], object]:
        schedules, random = piped.schedules, piped.random
        runner = schedules.runner

        def run(batch: Batch) -> object:
            with random.seeded() if runner.staged.model.training else contextlib.nullcontext():
                return schedules.forward(batch) if schedules.takes(batch) else runner.forward(batch)

        def call(args: Args, kwargs: Kwargs) -> object:
            batch = runner.new_batch(args, kwargs)
            output = run(batch)
            if batch.is_new and batch.grad:
                schedules.learn(batch)
                again = runner.new_batch(args, kwargs)
                if batch.tail_matches or schedules.takes(again):
                    # Run it as every later batch of its kind: so a resumed run computes the same numbers.
                    batch, output = again, None
                    output = run(batch)
            if runner.staged.model.training:
                random.calls += 1
            if not batch.grad:
                reshard(runner.stages.values())
            return output

        return call

    def clip_grad_norm(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0
    ) -> torch.Tensor:
        """Clip the gradients by their norm over all stages. Tied parameters are counted once."""
        trained = [one.stages for one in self.prepared if isinstance(one, PipelinedModel)]
        elsewhere = {key for stages in trained for key in stages.tied.counted_elsewhere()}
        return norms.clip_grad_norm(parameters, max_norm, norm_type, (self.channel.group,), self.device, elsewhere)


def _refuse_copy(memo: object) -> NoReturn:
    """`copy.deepcopy` of a pipelined model: the forward of the copy would run the stages of the original."""
    raise PrepareError(
        "copy.deepcopy of a pipelined model, as for averaged weights (AveragedModel, EMA): the copy would compute "
        "with the parameters of the original. Average copies of the parameters of each rank "
        "({name: parameter.clone()}), or use FSDP2 or DDP, whose models can be copied"
    )


def _check_model(model: nn.Module, num_microbatches: int) -> None:
    """Refuse what would compute something else on micro-batches, and turn off what a pipeline cannot do."""
    if num_microbatches > 1:
        for name, module in model.named_modules():
            if isinstance(module, _BatchNorm) and module.track_running_stats:
                raise PrepareError(
                    f"{name} ({type(module).__name__}) takes statistics of a batch, which a pipeline divides: freeze "
                    "it, use a norm of single samples, or set num_microbatches=1"
                )
    restrict_outputs(model)


def _recompute(offload: bool, device: torch.device) -> Callable[[Forward, Args, Kwargs], object]:
    """Calls a unit with activation checkpointing, its inputs on the host with `offload`."""

    def run(inner: Forward, args: Args, kwargs: dict[str, Any]) -> object:
        with (
            torch.autograd.graph.save_on_cpu(pin_memory=devices.kind_of(device).pin_memory)
            if offload and device.type != "cpu"
            else contextlib.nullcontext()
        ):
            return checkpoint(inner, *args, use_reentrant=False, **kwargs)

    return run
