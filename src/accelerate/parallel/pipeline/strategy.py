# SPDX-License-Identifier: Apache-2.0
"""Pipeline parallelism as a strategy: alone, or with replicas, FSDP2 or tensor parallelism of each stage."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from ...config.fsdp import FullyShardedDataParallelPlugin
from ...config.parallel import PipelineParallelConfig
from ...parallelism_config import ParallelismConfig
from ...precision.base import Precision
from ...runtime import mesh
from ...torch_internals.fsdp2 import sharded_parameter, shards_of
from .. import gradients, materialize
from ..accumulated import AccumulatedGradients
from ..base import Bundle
from ..compile import Compile
from ..optimizer_step import refuse_model_scope
from ..prepared import PreparedModel
from ..sharded import ShardedModel, ShardedStrategy, reshard
from ..sharded_optimizer import ParameterPlaces, trains_nothing
from ..tensor import strategy as tensor
from ..unwrap import require_state_dict
from . import requirements
from .layout import TiedParameters, distribute, fill_or_shard, parts_of_rank
from .microbatch import Args, BatchSplitter, Kwargs, disable_caches
from .model import PipelinedModel, StageRandom, Stages
from .observe import Observation
from .p2p import P2PChannel
from .schedules import ScheduledRunner, reduction_of
from .split import plan_stages
from .stage import Stage, StagedModel


class PipelineParallel(ShardedStrategy):
    """Each rank has some blocks of the model; micro-batches pass through the ranks."""

    name = "pipeline parallel"
    separates_documents = False

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
        self.shards_parameters: bool = plugin is not None or parallelism.tp_enabled
        if plugin is not None and precision.native_amp:
            plugin.set_mixed_precision(precision.name)
        self.channel: P2PChannel = P2PChannel(self.mesh["pp"].get_group(), device)
        self.gradient_group: dist.ProcessGroup | None = None
        if parallelism.data_parallel_size > 1:
            self.gradient_group = mesh.group_of(self.mesh, "dp")
            self.replicas: dist.ProcessGroup | None = self.gradient_group
        # The rank of the pipeline that has each stage.
        ranks = range(self.channel.size)
        self.ranks: list[int] = list(ranks) * (self.options.stages_per_rank or 1)
        if self.options.schedule_row.v_shaped:
            self.ranks = [*ranks, *reversed(ranks)]
        # The forward of the model that is prepared, where it was observed before.
        self.observed: Observation | None = None
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

    def prepare(self, bundle: Bundle) -> list[PreparedModel]:
        """Lay out each model and re-point the optimizers. Models for evaluation are only placed."""
        if bundle.evaluation:
            return super().prepare(bundle)
        prepared_models: list[PreparedModel] = []
        for model in bundle.models:
            before = {parameter: name for name, parameter in materialize.named_parameters(model)}
            places = ParameterPlaces(model)
            prepared = self.prepare_model(model)
            assert isinstance(prepared, PipelinedModel)
            present = {p: name for name, p in materialize.named_parameters(prepared.module)}
            prepared.stages.names.update({**before, **present})
            self.replacements.add(
                (former, now) for former, now in places.replaced() if not now.is_meta
            )
            for parameter in before:
                if parameter not in self.replacements and parameter not in present:
                    self._foreign[parameter] = True
            require_state_dict(prepared.module)
            prepared_models.append(prepared)
        self.prepared.add(prepared_models)
        for optimizer in bundle.optimizers:
            refuse_model_scope(
                optimizer, "pp_size", "use fsdp_version=2 or tp_size without pp_size"
            )
            self._repoint(optimizer)
        return prepared_models

    def prepare_model(self, model: nn.Module, evaluation: bool = False) -> ShardedModel:
        """Everything that is done to one model, in its order: it is cut into stages, each of which is laid out."""
        model = self.precision.wrap_forward(model)
        model = self.apply_transforms(model, before_layout=True)
        if evaluation:
            self.precision.after_layout(model)
            return self.as_prepared(self.apply_transforms(model, before_layout=False))
        options = self.options
        microbatches = options.num_microbatches or self.channel.size
        requirements.check(model, options)
        disable_caches(model)
        splitter = BatchSplitter(model.forward, options.whole_inputs, microbatches)
        plan = plan_stages(model, options, len(self.ranks), self.channel, self.observed)
        parts = parts_of_rank(model, plan, self.ranks, self.channel.rank)

        # Weights: those of rank 0 for this rank's stages; the rest loses its memory, and its place to stand-ins.
        has_weights = distribute(model, parts.tensors, self.channel)
        if self.layout.tp_enabled and self.mesh is not None:
            # The plan is that of the complete model: modules of other stages are split too, without memory.
            tensor.split_model(model, self.mesh["tp"], self.layout.tp_handler)
        listed = materialize.named_parameters(model, remove_duplicate=False)
        present = {id(parameter) for name, parameter in listed if name in parts.names}
        staged = StagedModel(
            model, plan.cut, parts.stages, self.device, plan.carried, present, options.loss_fn
        )
        stages = staged.stages
        fill_or_shard(self, model, stages, has_weights, parts.unsharded)
        staged.watch()
        self.cast_parameters(model, stages.values())
        self._compile(stages)

        # What runs them, and reduces their gradients.
        runner = ScheduledRunner(
            staged,
            self.ranks,
            self.channel,
            splitter,
            options.gather_output,
            options,
            self.precision,
            AccumulatedGradients(model, [model, *stages.values()]),
        )
        shards = {id(sharded_parameter(shard)) for shard in shards_of(stages.values())}
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        reductions = []
        if self.plugin is not None:
            reductions = [reduction_of(number, stages[number], runner) for number in stages]
        piped = Stages(
            runner,
            TiedParameters(model, parts.sharing, self.channel),
            StageRandom(self.channel, next(self._model_numbers), self.data_shard[0]),
            parts.shapes,
            parts.template,
            self.gradient_group,
            is_sharded=self.plugin is not None,
            unsharded=[parameter for parameter in trained if id(parameter) not in shards],
            reductions=reductions,
        )
        piped.defer_reduction()
        runner.before_backward = piped.tied.before_backward
        staged.replace_forward(lambda args, kwargs: call(piped, args, kwargs))
        prepared = PipelinedModel(
            model, self.precision, self.device, self.sequence, self.saves_shards, stages=piped
        )
        prepared.reducers.append(piped)
        self.precision.after_layout(model)
        prepared.module = self.apply_transforms(model, before_layout=False)
        return prepared

    def apply_transforms(self, model: nn.Module, before_layout: bool) -> nn.Module:
        """Apply the transforms that come before the layout, or after it. `_compile` compiles the stages."""
        for transform in self.transforms:
            comes_before = getattr(transform, "before_layout", False)
            if comes_before is before_layout and not isinstance(transform, Compile):
                model = transform.apply(model)
        return model

    def _compile(self, stages: dict[int, Stage]) -> None:
        """Compile this rank's units, without hooks: a forward that is left in its middle cannot be one graph."""
        for transform in self.transforms:
            if not isinstance(transform, Compile):
                continue
            for stage in stages.values():
                for unit in stage.units:
                    unit.forward = torch.compile(unit.forward, **transform.options.to_kwargs())

    def _repoint(self, optimizer: torch.optim.Optimizer) -> None:
        """Have an optimizer step this rank's parameters; other ranks step the rest."""
        trained = self._trained()
        of_ranks = self.channel.from_all([stages.names_in(optimizer) for stages in trained])
        named = []
        for stages, names in zip(trained, zip(*of_ranks, strict=True), strict=True):
            groups = stages.merge_names(names)
            if any(groups):
                named.append((stages, groups))
        if not named:
            if list(self.prepared):
                raise trains_nothing(optimizer)
            return
        for stages, groups in named:
            stages.groups[optimizer] = groups
            if len(named) > 1:
                stages.shared.add(optimizer)
        for group in optimizer.param_groups:
            local_parameters = []
            for parameter in group["params"]:
                if parameter in self._foreign:
                    optimizer.state.pop(parameter, None)
                else:
                    local_parameters.append(parameter)
            group["params"] = local_parameters
        self.replacements.repoint(optimizer)

    def _trained(self) -> list[Stages]:
        """The stages of the models that train."""
        return [model.stages for model in self.prepared if isinstance(model, PipelinedModel)]

    # -- the step

    def clip_grad_norm(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0
    ) -> torch.Tensor:
        """Clip the gradients by their norm over all stages. Tied parameters are counted once."""
        elsewhere: set[int] = set()
        for stages in self._trained():
            elsewhere.update(stages.tied.counted_elsewhere())
        return gradients.clip_grad_norm(
            parameters, max_norm, norm_type, (self.channel.group,), self.device, elsewhere
        )


def call(piped: Stages, args: Args, kwargs: Kwargs) -> object:
    """A call of the prepared model."""
    random, runner = piped.random, piped.runner
    training = runner.staged.model.training
    batch = runner.new_batch(args, kwargs)
    with random.seeded():
        runner.find_shapes(batch)
    with random.seeded() if training else contextlib.nullcontext():
        output = runner.forward(batch)
    if training:
        random.calls += 1
    if not batch.key.grad:
        reshard(runner.stages.values())
    return output
