# SPDX-License-Identifier: Apache-2.0
"""Pipeline parallelism as a strategy: alone, or with copies, shards and tensor-parallel parts of each stage."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint
from torch.utils.weak import WeakTensorKeyDictionary

from ...config.fsdp import FullyShardedDataParallelPlugin
from ...config.parallel import PipelineParallelConfig
from ...core.errors import PrepareError
from ...parallelism_config import ParallelismConfig
from ...precision.base import Precision
from ...runtime import mesh
from .. import materialize, memory, norms, tensor
from ..base import Bundle, Traffic
from ..compile import Compile, compile_regions_fsdp2
from ..fsdp2 import shard_model
from ..held import HeldGradients
from ..local_step import step_locally
from ..pretrained import ask_for_state
from ..remap import ParameterPlaces
from ..sharded import ShardedStrategy, reshard
from ..skeleton import skeleton, without_storage
from ..traffic import shard_gradients, shard_traffic, split_traffic
from ..units import find_modules
from . import state, weights
from .absent import Guard, Origin
from .batch import Batch, Stage
from .gradients import Ties, average, hold_shards, local, reduce_shards
from .inputs import Divider, keep_to_tensors
from .order import StagePlan
from .plan import plan, remedy_of
from .random import StageRandom
from .run import Runner
from .schedules import Scheduled
from .split import computing_units, is_inside
from .stage import StagedModel, drop_foreign, forget_aliases
from .traffic import gradient_traffic, stage_traffic
from .wire import Wire

logger = logging.getLogger(__name__)


class Pipelined:
    """What belongs to one pipelined model on this rank."""

    def __init__(
        self,
        scheduled: Scheduled,
        ties: Ties,
        random: StageRandom,
        shapes: dict[str, list[int]],
        skeleton: nn.Module,
    ) -> None:
        self.scheduled, self.ties = scheduled, ties
        self.runner, self.held = scheduled.runner, scheduled.held
        self.random = random
        # The whole model's parameters in its order, name -> shape; and a module with the names of its state.
        self.shapes, self.skeleton = shapes, skeleton
        self.deferred = False
        # Trainable parameters that are not sharded: nobody but us averages their gradients.
        self.whole: list[nn.Parameter] = []


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
        self.wire = Wire(self.mesh["pp"].get_group(), device)
        self.copies = mesh.group_of(self.mesh, "dp") if parallelism.data_parallel_size > 1 else None
        self._stage_mates: Any = None
        self.ranks = _ranks_of_stages(self.options, self.wire.size)
        # Held by the models, so that both go together.
        self._models: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._numbers = itertools.count()
        # By parameter as the user had it: its plain name, and whether another rank holds it now.
        self._name_of: Any = WeakTensorKeyDictionary()
        self._foreign: Any = WeakTensorKeyDictionary()
        # By optimizer: the plain names in each of its groups, as it was made.
        self._groups: weakref.WeakKeyDictionary[Any, list[list[str]]] = weakref.WeakKeyDictionary()

    @property
    def is_sharded(self) -> bool:  # type: ignore[override]
        """Whether state is saved in parts, each rank its own (`state_dict_type` of an fsdp_plugin; else yes)."""
        return self.plugin is None or self.plugin.state_dict_type.name == "SHARDED_STATE_DICT"  # type: ignore[union-attr]

    # -- prepare

    def prepare(self, bundle: Bundle) -> Bundle:
        if bundle.evaluation:
            return super().prepare(bundle)
        for position, model in enumerate(bundle.models):
            if model in self._models:
                continue
            for name, parameter in model.named_parameters():
                self._name_of[parameter] = materialize.canonical_name(name)
            model = self.precision.wrap_forward(model)
            places = ParameterPlaces(model)
            before = list(model.parameters())
            model = self.wrap_model(self.transformed(model, before=True))
            self.replacements.add((former, present) for former, present in places.replaced() if not present.is_meta)
            held = {id(parameter) for parameter in model.parameters()}
            for parameter in before:
                if parameter not in self.replacements and id(parameter) not in held:
                    self._foreign[parameter] = True
            bundle.models[position] = self.transformed(model)
            ask_for_state(bundle.models[position])
        for optimizer in bundle.optimizers:
            self._repoint(optimizer)
            if self.plugin is not None or self.layout.tp_enabled:
                step_locally(optimizer)
        return bundle

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
        known = [parameter for parameter in parameters if parameter in self._name_of]
        if not known:
            if self._models and parameters:
                raise PrepareError(
                    f"none of the {len(parameters)} parameters of {type(optimizer).__name__} belongs to a model of "
                    "this prepare call: it would train nothing. Make the optimizer from the model's parameters, and "
                    "prepare both together."
                )
            return
        self._groups[optimizer] = [
            [self._name_of[parameter] for parameter in group["params"] if parameter in self._name_of]
            for group in optimizer.param_groups
        ]
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter in self._foreign:
                    optimizer.state.pop(parameter, None)
            group["params"] = [parameter for parameter in group["params"] if parameter not in self._foreign]
        self.replacements.repoint(optimizer)

    def wrap_model(self, model: nn.Module) -> nn.Module:
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
        whole = skeleton(type(model).__name__, without_storage(model.state_dict(keep_vars=True)))
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
        self.lower(model, stages.values())
        runner = Runner(staged, cut, stages, self.ranks, self.wire, divider, options.gather_output)
        scheduled = Scheduled(runner, options, self.precision, HeldGradients(model, [model, *stages.values()]))
        random = StageRandom(self.device, next(self._numbers), self.wire.rank, self.data_shard[0])
        piped = Pipelined(scheduled, ties, random, shapes, whole)
        sharded = {id(p) for stage in stages.values() if isinstance(stage, FSDPModule) for p in stage.parameters()}
        sharded -= {id(p) for module in spread for p in module.parameters()}
        piped.whole = [p for p in model.parameters() if id(p) not in sharded and p.requires_grad]
        staged.entry = self._entry(piped)
        runner.before_backward += [ties.before, functools.partial(hold_shards, stages.values())]
        runner.after_backward.append(functools.partial(self._finish, piped))
        model.__dict__["_pipelined"] = piped
        self._models.add(model)
        return model

    def units(self, model: nn.Module) -> Iterable[nn.Module]:
        inner = self.unwrap(model)
        return self._pipelined(inner).runner.stages.values() if inner in self._models else [inner]

    def _pipelined(self, model: nn.Module) -> Pipelined:
        inner = self.unwrap(model)
        if inner not in self._models:
            raise PrepareError(f"{type(inner).__name__} was not prepared for training: it has no stages")
        return inner.__dict__["_pipelined"]

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
            self._shard(model, stages, self.copies if filled else self._mates(), spread)
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

    def _entry(self, piped: Pipelined) -> Callable[[tuple[Any, ...], dict[str, Any]], Any]:
        runner, scheduled, random = piped.runner, piped.scheduled, piped.random

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

    def _finish(self, piped: Pipelined) -> None:
        """At the end of a window's last backward: what the ranks owe each other of its gradients."""
        if piped.deferred:
            return
        reduce_shards(piped.runner.stages.values())
        piped.ties.sum()
        if self.copies is not None:
            average(piped.whole, self.copies)

    @contextlib.contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        if self.unwrap(model) not in self._models:
            yield
            return
        piped = self._pipelined(model)
        piped.deferred = True
        try:
            yield
        finally:
            piped.deferred = False

    def reduce_items(self, count: torch.Tensor) -> Any:
        return None if self.copies is None else dist.all_reduce(count, group=self.copies, async_op=True)

    def clip_grad_norm(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0
    ) -> torch.Tensor:
        twins = {twin for model in self._models for twin in self._pipelined(model).ties.twins()}
        return norms.clip_grad_norm(parameters, max_norm, norm_type, (self.wire.group,), self.device, twins)

    def held(self, models: Sequence[nn.Module], windows: bool) -> dict[str, int]:
        found = super().held(models, windows)
        if windows and self.plugin is not None:
            # Until the window's last backward every rank keeps whole gradients of its stages.
            found[memory.GRADIENTS] = sum(self._gradients(model) for model in models)
        return found

    def _gradients(self, model: nn.Module) -> int:
        stages = list(self.units(model))
        inside = {id(parameter) for stage in stages for parameter in stage.parameters()}
        rest = (p for p in self.unwrap(model).parameters() if p.requires_grad and id(p) not in inside)
        return sum(shard_gradients(stage) for stage in stages) + memory.local_bytes(rest)

    def traffic(self, model: nn.Module, backwards: int) -> list[Traffic]:
        piped = self._pipelined(model)
        # The parameters of a stage stay whole until its gradients are reduced: once a step.
        shards = [one for stage in piped.runner.stages.values() for one in shard_traffic(stage, 1)]
        split = split_traffic(self.unwrap(model), backwards)
        tied = [local(parameter) for parameter in piped.ties.parameters()]
        whole = [local(parameter) for parameter in piped.whole]
        rest = gradient_traffic(whole, tied, self.copies is not None)
        return [*stage_traffic(piped.runner, backwards), *shards, *split, *rest]

    # -- state

    def state_dict(self, model: nn.Module) -> dict[str, torch.Tensor]:
        return state.full_model_state(self.unwrap(model), self.wire)

    def load_state_dict(self, model: nn.Module, state_: dict[str, torch.Tensor], strict: bool = True) -> None:
        state.load_full_model_state(self.unwrap(model), state_, self.device, strict)

    def optimizer_state_dict(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return state.full_optimizer_state(self.unwrap(model), optimizer, self._names_of(model, optimizer), self.wire)

    def load_optimizer_state_dict(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, state_: dict[str, Any]
    ) -> None:
        state.load_full_optimizer_state(
            self.unwrap(model), optimizer, state_, self._names_of(model, optimizer), self.device
        )

    def open_gradients(self, model: nn.Module) -> HeldGradients:
        return self._pipelined(model).held if self.unwrap(model) in self._models else HeldGradients(self.unwrap(model))

    def rank_state(self, models: list[nn.Module]) -> dict[str, Any]:
        """How far each model's stream of random numbers is, and what is known of its loss."""
        return {"models": [{"calls": one.random.calls, "rules": one.scheduled.rules} for one in self._trained(models)]}

    def load_rank_state(self, models: list[nn.Module], state: dict[str, Any]) -> None:
        for piped, saved in zip(self._trained(models), state["models"], strict=True):
            piped.random.calls, piped.scheduled.rules = saved["calls"], tuple(saved["rules"])

    def _trained(self, models: list[nn.Module]) -> list[Pipelined]:
        return [self._pipelined(model) for model in models if self.unwrap(model) in self._models]

    def _names_of(self, model: nn.Module, optimizer: Any) -> list[list[str]]:
        """The plain names in each group of an optimizer, of all stages."""
        plain = getattr(optimizer, "optimizer", optimizer)
        if plain in self._groups:
            return self._groups[plain]
        return state.gathered_groups(self.unwrap(model), plain, list(self._pipelined(model).shapes), self.wire)

    def plain(self, model: nn.Module) -> nn.Module | None:
        return self._pipelined(model).skeleton if self.unwrap(model) in self._models else None

    def plain_groups(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[dict[str, list[int]]]:
        shapes = self._pipelined(model).shapes
        return [{name: shapes[name] for name in group} for group in self._names_of(model, optimizer)]

    def trained_by(self, optimizer: Any, models: list[nn.Module]) -> nn.Module | None:
        """The model of an optimizer; a stage may hold none of its parameters."""
        groups = self._groups.get(getattr(optimizer, "optimizer", optimizer))
        names = {name for group in groups or () for name in group}
        return next((model for model in models if names and names <= set(self._pipelined(model).shapes)), None)


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
