# SPDX-License-Identifier: Apache-2.0
"""`Accelerator`, the facade: short methods that delegate to the modules that do the work."""

from __future__ import annotations

import contextlib
import functools
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableSequence, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .certify.reference import Changes
from .certify.settings import read as read_settings
from .checkpointing.loading import LoadReport
from .checkpointing.preemption import DEFAULT_SIGNALS
from .checkpointing.run_state import check_custom
from .checkpointing.weights import save, save_model
from .collectives import gather_object
from .config import checks
from .config.precision import AutocastKwargs
from .config.training import (
    DataLoaderConfiguration,
    ProfileKwargs,
    ProjectConfiguration,
    TorchDynamoPlugin,
)
from .core import devices, env
from .core.enums import DistributedType, DynamoBackend, LoggerType, RNGType
from .core.errors import ConfigurationError, PrepareError, add_remedy, short_traceback
from .core.lazy import public_names
from .core.modules import class_name, model_has_dtensor
from .core.objects import NullContext, computed, forwarded
from .core.trees import send_to_device
from .data_loader import prepare_data_loader, skip_first_batches
from .ledger.recorder import LedgerRecorder
from .ledger.replayed import ReplayedCheckpoints, ReplayedRun
from .ledger.replayed import read as read_replay
from .logging import MultiProcessAdapter, get_logger, print_or_log
from .optimizer import AcceleratedOptimizer, is_optimizer, parameters_of, plain_optimizer
from .parallel.base import Bundle, Strategy
from .parallel.ddp.strategy import sync_in_backward
from .parallel.items import ItemWindow
from .parallel.matrices import check_matrices
from .parallel.optimizer_step import build_step
from .parallel.packed import PackedRows
from .parallel.placeholders import refuse_placeholder
from .parallel.prepared import PreparedModel, added_parameter
from .parallel.unwrap import add_forward_methods, check_names, extract_model_from_parallel
from .placement.align import get_state_dict_offloaded_model, is_offloaded
from .placement.subclasses import check_quantized, refuse_lost_gradients
from .precision.modules import check_matches
from .run.accumulation import AccumulatedBatch, Accumulation
from .run.averages import AveragedWeights
from .run.batch_weights import BatchWeights
from .run.checkpoints import RunCheckpoints, register_hook
from .run.first_step import FirstStepCheck
from .run.goodput import GoodputMessage
from .run.interface import RunInterface, replaceable, replaced
from .run.loop import MainLoop
from .run.non_finite import NonFiniteGuard, check_optimizer
from .run.objects import PreparedModules, RunObjects, check_preparable
from .run.out_of_memory import OutOfMemory
from .run.planned import PlannedRun
from .run.resolve import Plan, Request, Resolved, adopt, resolve
from .runtime.communication import raise_lost
from .runtime.step_exchange import StepExchange
from .scheduler import AcceleratedScheduler
from .state import AcceleratorState, GradientState, PartialState
from .telemetry.display import show_report
from .telemetry.profile import profile
from .telemetry.start import declared_work, start_profile, start_recorder
from .torch_internals.compiled import uncompiled
from .tracking.group import TrackerGroup

if TYPE_CHECKING:
    from torch.optim.lr_scheduler import LRScheduler
    from torch.utils.data import DataLoader
    from torch.utils.hooks import RemovableHandle

    from .config.deepspeed import DeepSpeedPlugin
    from .config.fsdp import FullyShardedDataParallelPlugin
    from .config.megatron import MegatronLMPlugin
    from .config.parallel import TorchTensorParallelPlugin
    from .config.training import GradientAccumulationPlugin
    from .parallel.report.explain import Report
    from .parallelism_config import ParallelismConfig
    from .precision.base import Precision
    from .tracking import GeneralTracker

logger: MultiProcessAdapter = get_logger(__name__)

# Distinguishes "not given" from each value, for arguments that a configuration object also has.
_NOT_GIVEN: Any = object()

# Where packages replace functions of the API, and functions that nothing here calls, by the module that defines them.
_EXPORTERS = ("accelerator", "utils.fsdp_utils", "utils")
_UNCALLED = (
    "parallel.fsdp.by_hand.fsdp2_load_full_state_dict",
    "parallel.fsdp.by_hand.fsdp2_prepare_auto_wrap_policy",
    "checkpointing.sharded_api._get_model_state_dict",
    "checkpointing.sharded_api._set_model_state_dict",
    "big_modeling._refuse_recurrent_layers_under_sequence_parallelism",
)


class _Preparing(NamedTuple):
    """What one call of `prepare` has beside a model."""

    optimizers: Sequence[torch.optim.Optimizer] = ()
    methods: Sequence[str] = ()


class Accelerator(RunInterface):
    """Runs a PyTorch training loop on any device and any number of processes.

    Args:
        device_placement: whether `prepare` moves models, and loaders move batches, to this process's device.
        split_batches: whether the loader's batch size is that of all processes together. Sets the field of
            `dataloader_config`.
        mixed_precision: "no", "fp16", "bf16" or "fp8". Defaults to the launcher's setting, otherwise "no".
        gradient_accumulation_steps: the number of batches for each optimizer step.
        cpu: use the CPU even if an accelerator is available.
        dataloader_config: how batches are distributed over the processes.
        deepspeed_plugin: train with DeepSpeed. A dict of plugins by name allows several; the first one is selected.
        fsdp_plugin: shard models with FSDP.
        torch_tp_plugin: train with tensor parallelism, like `parallelism_config`.
        megatron_lm_plugin: options of Megatron-LM.
        rng_types: the random number generators to synchronize across processes at the start of each epoch.
        log_with: the trackers: names, `LoggerType` members, tracker objects, or "all".
        project_dir: the folder for logs and checkpoints. Checkpoints alone can be in a bucket: "s3://bucket/run".
        project_config: the folders of the project and the naming of checkpoints.
        gradient_accumulation_plugin: options of gradient accumulation, instead of `gradient_accumulation_steps`.
        step_scheduler_with_optimizer: whether a scheduler steps only when its optimizer does. If False, a scheduler
            steps at each call.
        kwargs_handlers: objects with further options, at most one of each class (`DistributedDataParallelKwargs`,
            `GradScalerKwargs`, `InitProcessGroupKwargs`, `ProfileKwargs`, ...).
        dynamo_backend: the backend of `torch.compile`; models are not compiled by default.
        dynamo_plugin: the options of `torch.compile`, instead of `dynamo_backend`.
        deepspeed_plugins: another name for `deepspeed_plugin`.
        parallelism_config: the sizes of the dimensions of the device mesh.
        exact: each sample counts once in every epoch, even if the dataset does not divide evenly, so that parameters
            follow the single-process loop with the same global batch. Defaults to ACCELERATE_EXACT, otherwise False.
        strategy: the name of a layout that another package registered, or a callable
            `(device, precision) -> Strategy`. Defaults to ACCELERATE_STRATEGY; otherwise the other arguments decide.
        transforms: objects with `apply(model)`, or names that packages registered. Each is applied to every model
            that is prepared for training, after the layout (before it, if the object has `before_layout = True`).
            By default ACCELERATE_TRANSFORMS, names separated by commas.
        resume: "auto" resumes from the project's newest checkpoint at the first pass over a loader; see `resume`.
            `accelerate launch --resume` sets it, and the project's folder.
        telemetry: record each step of each process: True, or the folder of the run. True takes the `logging_dir` or
            `project_dir` of the project, otherwise `runs/<script>-<time>`. Defaults to ACCELERATE_TELEMETRY,
            otherwise False.
        non_finite: what happens before an optimizer step whose loss or gradients are not finite on any process.
            "skip" skips the optimizer and scheduler step on all processes; "raise" raises NonFiniteError on all of
            them; "ignore" does not check. Defaults to ACCELERATE_NON_FINITE, otherwise "ignore".
        non_finite_limit: with "skip", this many skipped steps in a row raise NonFiniteError.
        precision_policy: {pattern of module names: dtype} of modules that do not compute in `mixed_precision`,
            such as {"*norm*": torch.float32}. The first pattern that matches a name applies.
        fp16: an older spelling of `mixed_precision="fp16"`.

    Raises:
        ConfigurationError: arguments contradict each other, or a value is not valid.

    Example:
        accelerator = Accelerator(gradient_accumulation_steps=4, mixed_precision="bf16")
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = loss_function(model(inputs), targets)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
    """

    def __init__(
        self,
        device_placement: bool = True,
        split_batches: bool = _NOT_GIVEN,
        mixed_precision: str | None = None,
        gradient_accumulation_steps: int = 1,
        cpu: bool = False,
        dataloader_config: DataLoaderConfiguration | None = None,
        deepspeed_plugin: DeepSpeedPlugin | dict[str, DeepSpeedPlugin] | None = None,
        fsdp_plugin: FullyShardedDataParallelPlugin | None = None,
        torch_tp_plugin: TorchTensorParallelPlugin | None = None,
        megatron_lm_plugin: MegatronLMPlugin | None = None,
        rng_types: list[str | RNGType] | None = None,
        log_with: str | LoggerType | GeneralTracker | list[Any] | None = None,
        project_dir: str | None = None,
        project_config: ProjectConfiguration | None = None,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        step_scheduler_with_optimizer: bool = True,
        kwargs_handlers: list[Any] | None = None,
        dynamo_backend: DynamoBackend | str | None = None,
        dynamo_plugin: TorchDynamoPlugin | None = None,
        deepspeed_plugins: DeepSpeedPlugin | dict[str, DeepSpeedPlugin] | None = None,
        parallelism_config: ParallelismConfig | None = None,
        *,
        exact: bool | None = None,
        strategy: str | Callable[[torch.device, Precision], Strategy] | None = None,
        transforms: Sequence[str | Any] | None = None,
        resume: str | None = None,
        telemetry: bool | str | os.PathLike[str] | None = None,
        non_finite: str | None = None,
        non_finite_limit: int = 10,
        precision_policy: Mapping[str, torch.dtype] | None = None,
        fp16: bool = False,
    ) -> None:
        with short_traceback:
            if checks.truth("fp16", fp16):
                if mixed_precision not in (None, "fp16"):
                    raise ConfigurationError(
                        "fp16=True means mixed_precision='fp16', and "
                        f"mixed_precision={mixed_precision!r} is passed as well"
                    )
                mixed_precision = "fp16"
            if non_finite is None:
                non_finite = env.get("ACCELERATE_NON_FINITE", "ignore")
            non_finite = checks.word("non_finite", non_finite, ("skip", "raise", "ignore"))
            non_finite_limit = checks.integer("non_finite_limit", non_finite_limit)
            self.rng_types: list[str] = ["generator"]
            if rng_types is not None:
                kinds = checks.texts("rng_types", rng_types)
                self.rng_types = [str(checks.member("rng_types", kind, RNGType)) for kind in kinds]
            if deepspeed_plugin is None:
                deepspeed_plugin = deepspeed_plugins
            elif deepspeed_plugins is not None:
                raise ConfigurationError(
                    "deepspeed_plugin and deepspeed_plugins are the same argument: pass only one "
                    "of them"
                )
            if dynamo_backend is not None:
                if dynamo_plugin is not None:
                    raise ConfigurationError(
                        "dynamo_backend and dynamo_plugin were both passed: set backend in the "
                        "plugin"
                    )
                dynamo_plugin = TorchDynamoPlugin(backend=dynamo_backend)  # type: ignore[arg-type]
            request = Request(
                mixed_precision=mixed_precision,
                cpu=cpu,
                gradient_accumulation_steps=gradient_accumulation_steps,
                gradient_accumulation_plugin=gradient_accumulation_plugin,
                dynamo_plugin=dynamo_plugin,
                deepspeed_plugin=deepspeed_plugin,
                fsdp_plugin=fsdp_plugin,
                megatron_lm_plugin=megatron_lm_plugin,
                torch_tp_plugin=torch_tp_plugin,
                parallelism_config=parallelism_config,
                exact=exact,
                strategy=strategy,
                transforms=transforms,
                non_finite=non_finite,
                precision_policy=precision_policy,
                kwargs_handlers=kwargs_handlers or [],
            )
            self._changes: Changes | None = None
            recorded = read_settings()
            if recorded is None:
                resolved = resolve(request)
            else:
                self._changes = Changes(recorded)
                request = self._changes.begin(request)
                resolved = resolve(request)
                self._changes.check(request, resolved.state)
        self.plan: Plan = resolved.plan
        self.state: AcceleratorState = resolved.state
        self.precision: Precision = resolved.precision
        self.strategy: Strategy = resolved.strategy
        self.gradient_state: GradientState = GradientState(resolved.plan.accumulation)
        self.device_placement: bool = checks.truth("device_placement", device_placement)
        self.dataloader_config: DataLoaderConfiguration = (
            dataloader_config or DataLoaderConfiguration()
        )
        if split_batches is not _NOT_GIVEN:
            self.dataloader_config.split_batches = checks.truth("split_batches", split_batches)
        self.step_scheduler_with_optimizer: bool = checks.truth(
            "step_scheduler_with_optimizer", step_scheduler_with_optimizer
        )
        self.flag_tensor: torch.Tensor | None = None

        self._exact = resolved.plan.exact
        self._non_finite_limit = {"ignore": None, "raise": 1, "skip": non_finite_limit}[non_finite]
        project = project_config or ProjectConfiguration(project_dir=project_dir)
        if project_dir is not None and project.project_dir is None:
            project.set_directories(project_dir)
        launched_project = env.get("ACCELERATE_RESUME")
        if launched_project is not None:
            project.set_directories(launched_project)
            resume = "auto"
        self._replay = read_replay()
        log_folder = project.logging_dir
        if self._replay is not None:
            telemetry = self._replay.folder
            log_with = log_folder = None
        with short_traceback:
            trackers = TrackerGroup(log_with, log_folder)
        self._compose(project, trackers)
        self._loop.add(FirstStepCheck(self._checkpoints))
        plan_file = env.get("ACCELERATE_PLAN_FILE")
        if plan_file:
            self._loop.add(PlannedRun(plan_file, self.state.device))
        if recorded is not None:
            # It imports torch's tensors of several devices, which are slow to import.
            from .certify.recording import RecordedRun

            self._loop.add(RecordedRun(recorded, self._checkpoints))
        self._recorder = start_recorder(telemetry, project, self.strategy.data_shard[1])
        if self._recorder is not None:
            self._loop.add(GoodputMessage(self._recorder.folder))
            self._loop.add(self._recorder)
            if self._recorder.writer is not None:
                self._loop.add(LedgerRecorder(self._recorder, self._checkpoints))
        if self._replay is not None:
            self._loop.add(ReplayedRun(self._replay, self._checkpoints))
        profile = start_profile(project, self._recorder)
        if profile is not None:
            self._loop.add(profile)
        self._out_of_memory = OutOfMemory(self._objects, self._recorder)
        if project.automatic_checkpoint_naming or resume is not None:
            self._checkpoints.saves_in_project = True
        if resume is not None:
            if resume != "auto":
                raise ConfigurationError(
                    f"resume={resume!r}: use 'auto', or None to start from scratch"
                )
            self._checkpoints.resume_at_first_use()

        if self.parallelism_config is not None:
            self.parallelism_config._validate_accelerator(self)

    def _compose(self, project: ProjectConfiguration, trackers: TrackerGroup) -> None:
        """Make the parts of this run, without any prepared object."""
        self._accumulation = Accumulation(self.gradient_state, self._exact)
        # What a replaced `prepare_model` does not pass on.
        self._preparing = _Preparing()
        self._weights: BatchWeights | None = None
        if self._exact:
            self._weights = BatchWeights()
        self._objects = RunObjects()
        self._exchange = StepExchange(self.state)
        self._items = ItemWindow(self.strategy, self._exchange)
        guard = None
        if self._non_finite_limit is not None:
            guard = NonFiniteGuard(
                self._objects, self.state.device, self._non_finite_limit, self._exchange
            )
        self._has_guard = guard is not None
        self._trackers = trackers
        checkpoints = RunCheckpoints
        if self._replay is not None:
            checkpoints = ReplayedCheckpoints
        self._checkpoints = checkpoints(
            self._objects,
            self.strategy,
            self.precision,
            self.state,
            self._accumulation,
            self._items,
            project,
            self._trackers,
            self._exchange,
        )
        self._loop: MainLoop = MainLoop(
            self._objects,
            self._accumulation,
            self._weights,
            self.strategy,
            self._items,
            guard,
            self._checkpoints.controller,
            self._checkpoints.stopper,
            self._exchange,
        )
        self._checkpoints.loop = self._loop
        self._checkpoints.replaced_state_dict = functools.partial(
            _replaced_state_dict, weakref.ref(self)
        )

    # -- prepare

    def prepare(
        self,
        *args: Any,
        device_placement: list[bool] | None = None,
        forward_methods: Sequence[str] = (),
    ) -> Any:
        """Prepare objects for this run.

        Args:
            args: models, optimizers, schedulers and data loaders, in any order. Objects of other types are returned
                unchanged.
            device_placement: for each object, whether it is moved to this process's device; None takes the
                accelerator's `device_placement`.
            forward_methods: names of methods other than `forward` that compute with parameters, such as "encode",
                for each model that has them. `generate` of sharded transformers models needs no entry.

        Returns:
            The prepared objects in the same order: a tuple, or the object itself if there is only one.

        Raises:
            PrepareError: no object is passed, names or a container are passed instead of objects, `device_placement`
                has the wrong length, a model lacks a method of `forward_methods`, a model is already wrapped in
                DistributedDataParallel, a model with a device map is prepared on several processes, or an object
                stands for what another engine makes (`DummyOptim`).

        Example:
            model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
        """
        if not args:
            raise PrepareError("prepare() was called without arguments")
        if device_placement is None:
            device_placement = [None] * len(args)  # type: ignore[list-item]
        elif len(device_placement) != len(args):
            raise PrepareError(
                f"`device_placement` should be a list with {len(args)} elements (the number of objects passed), "
                f"it has {len(device_placement)}"
            )
        replaced_names = []
        for path in _UNCALLED:
            if replaced(path, _EXPORTERS) is not None:
                replaced_names.append(path.rpartition(".")[2])
        if type(self).distributed_type is not RunInterface.distributed_type:
            replaced_names.append("Accelerator.distributed_type")
        if replaced_names:
            _warn_of_replaced(tuple(replaced_names))
        layout = None
        if self.strategy.api_method is not None:
            layout = self.replacement(self.strategy.api_method)
        if layout is None:
            with short_traceback:
                return self._prepare_together(args, device_placement, forward_methods)
        prepared = tuple(layout(*args))
        for obj in prepared:
            if isinstance(obj, torch.nn.Module):
                add_forward_methods(self.prepared_model(obj), forward_methods)
        if len(prepared) == 1:
            return prepared[0]
        return prepared

    def _prepare_together(
        self,
        args: tuple[Any, ...],
        device_placement: Sequence[bool | None],
        forward_methods: Sequence[str] = (),
    ) -> Any:
        if self.parallelism_config is not None and self.parallelism_config.cp_enabled:
            if self.replacement("_prepare_cp") is not None:
                # The package that has replaced it splits the sequences itself.
                self.strategy.sequence = None
            args = tuple(self._prepare_cp(*args))
        args = tuple(self.strategy.prepare_together(list(args), self.split_batches))
        check_preparable(args)
        result = list(args)
        models = [i for i, obj in enumerate(args) if isinstance(obj, torch.nn.Module)]
        methods: list[str] = []
        if forward_methods:
            methods = checks.texts("forward_methods", forward_methods)
            methods = [name for name in methods if name != "forward"]
            check_names([args[i] for i in models], methods)
        raw = [obj for obj in args if is_optimizer(obj)]
        prepare_model = self.replacement("prepare_model")
        if prepare_model is None:
            prepared = self._prepare_models(
                [args[i] for i in models],
                raw,
                [self._is_placed(device_placement[i]) for i in models],
                methods=methods,
            )
        else:
            self._preparing = _Preparing(raw, methods)
            try:
                prepared = [
                    prepare_model(args[i], device_placement=device_placement[i]) for i in models
                ]
            finally:
                self._preparing = _Preparing()
        for i, model in zip(models, prepared, strict=True):
            result[i] = model
        # Schedulers come last: each looks up its optimizer among the prepared ones.
        for i, obj in enumerate(args):
            if isinstance(obj, torch.utils.data.DataLoader):
                result[i] = self.prepare_data_loader(obj, device_placement=device_placement[i])
            elif is_optimizer(obj):
                result[i] = self.prepare_optimizer(obj, device_placement=device_placement[i])
        for i, obj in enumerate(args):
            if isinstance(obj, torch.optim.lr_scheduler.LRScheduler | AcceleratedScheduler):
                result[i] = self.prepare_scheduler(obj)
        if len(result) == 1:
            return result[0]
        return tuple(result)

    def _is_placed(self, requested: bool | None) -> bool:
        if requested is None:
            return self.device_placement
        return requested

    @replaceable
    def prepare_model(
        self,
        model: torch.nn.Module,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
    ) -> torch.nn.Module:
        """Prepare one model.

        Args:
            model: the model.
            device_placement: whether it is moved to this process's device; None takes the accelerator's setting.
            evaluation_mode: move and cast the model, but do not wrap it for training.

        Returns:
            The prepared model.

        Raises:
            PrepareError: `model` cannot be prepared; see `prepare`.

        Example:
            model = accelerator.prepare_model(model)
        """
        optimizers, methods = self._preparing
        (prepared,) = self._prepare_models(
            [model],
            [optimizer for optimizer in optimizers if _trains(optimizer, model)],
            [self._is_placed(device_placement)],
            evaluation_mode,
            methods,
        )
        return prepared

    def _prepare_models(
        self,
        models: list[torch.nn.Module],
        optimizers: list[torch.optim.Optimizer],
        place: list[bool],
        evaluation: bool = False,
        methods: Sequence[str] = (),
    ) -> list[torch.nn.Module]:
        twins = [self._prepared_twin(model, evaluation) for model in models]
        bundle = Bundle(
            models=[],
            optimizers=[plain_optimizer(optimizer) for optimizer in optimizers],
            earlier=[optimizer.optimizer for optimizer in self._objects.optimizers],
            place=[],
            evaluation=evaluation,
        )
        for model, twin, is_placed in zip(models, twins, place, strict=True):
            if twin is None:
                bundle.models.append(_without_replica(model))
                bundle.place.append(is_placed)
        for i, model in enumerate(bundle.models):
            quantized = check_quantized(model, self.device, training=not evaluation)
            is_spread = self.verify_device_map(model)
            if bundle.place[i] and (is_spread or is_offloaded(model)):
                bundle.place[i] = False
                if self.use_distributed and not evaluation:
                    raise PrepareError(
                        f"{type(model).__name__} is offloaded, or distributed over several devices by its device_map, "
                        "and several processes cannot train such a model. Load it without device_map='auto', or start "
                        "one process."
                    )
            if quantized:
                bundle.place[i] = False
            if not evaluation:
                refuse_lost_gradients(model)
        if self.strategy.api_function is not None and not evaluation:
            shard = replaced(self.strategy.api_function, _EXPORTERS)
            if shard is not None:
                bundle.models = [
                    _shard_elsewhere(self.strategy, functools.partial(shard, self), model)
                    for model in bundle.models
                ]
        # transformers.Trainer prepares models that transformers has sharded for evaluation, and trains them itself.
        if not evaluation and any(model_has_dtensor(model) for model in bundle.models):
            self._adopt(bundle.models)
        if self.precision.modules and not evaluation:
            check_matches(self.precision.modules, bundle.models)
        for model in bundle.models:
            if self._changes is not None:
                self._changes.model(model)
            self.precision.convert(model, functools.partial(_repoint, bundle.optimizers))
        if not evaluation:
            prepared_before = [prepared.inner for prepared in self._objects.models]
            check_matrices(bundle.optimizers, [*prepared_before, *bundle.models])
        fresh = self.strategy.prepare(bundle)
        if bundle.models and not evaluation:
            self.strategy.sync_rng_state()
        for prepared in fresh:
            prepared.module._is_accelerate_prepared = True  # type: ignore[assignment]
            refused_by = "" if self.strategy.separates_documents else self.strategy.name
            packed = PackedRows(self.strategy.attention, self.strategy.sequence, refused_by)
            packed.watch(prepared.module)
            if self.device_placement and self.dataloader_config.device_placement == "lazy":
                move = functools.partial(
                    _move_inputs, self.device, self.dataloader_config.non_blocking
                )
                prepared.module.register_forward_pre_hook(move, prepend=True, with_kwargs=True)
            if not evaluation:
                add_forward_methods(prepared, methods)
                if self._weights is not None and uncompiled(prepared.module) is prepared.module:
                    self._weights.watch(prepared.module)
                for observer in self._loop.active:
                    observer.after_prepare(prepared)
        self._objects.models += fresh
        modules = iter(prepared.module for prepared in fresh)
        return [next(modules) if twin is None else twin for twin in twins]

    def _adopt(self, models: list[torch.nn.Module]) -> None:
        """Train in the layout of models that are sharded already."""
        former = self.strategy
        plain = [optimizer.optimizer for optimizer in self._objects.optimizers]
        resolved = adopt(Resolved(self.plan, self.state, self.precision, former), models, plain)
        strategy = resolved.strategy
        if strategy is former:
            return
        earlier = list(self._objects.dataloaders)
        earlier += [prepared.inner for prepared in self._objects.models]
        if earlier and strategy.data_shard != former.data_shard:
            raise PrepareError(
                f"a {type(earlier[0]).__name__} was prepared for {former.data_shard[1]} data "
                f"shards, but {type(models[0]).__name__}, which is already sharded, has "
                f"{strategy.data_shard[1]}: pass both to one call of prepare"
            )
        self.plan, self.strategy = resolved.plan, strategy
        self._items.strategy = self._checkpoints.strategy = self._loop.strategy = strategy
        for optimizer in self._objects.optimizers:
            optimizer.scaler = self.scaler

    def _prepared_twin(self, model: torch.nn.Module, evaluation: bool) -> torch.nn.Module | None:
        """The prepared form of a model that was prepared before; None for others, and where other parameters train."""
        modules = [prepared.module for prepared in self._objects.models]
        if isinstance(model, torch.nn.parallel.DistributedDataParallel) and model not in modules:
            raise PrepareError(
                f"the {type(model.module).__name__} passed to prepare is already wrapped in "
                "DistributedDataParallel: pass the plain model, and prepare wraps it"
            )
        plain = extract_model_from_parallel(model, keep_torch_compile=False)
        for prepared in self._objects.models:
            module = prepared.module
            inner = extract_model_from_parallel(module, keep_torch_compile=False)
            if module is not model and inner is not plain:
                continue
            if not evaluation and prepared.is_outgrown:
                self._objects.models.remove(prepared)
                return None
            for name in prepared.new_parameters():
                raise added_parameter(prepared, name)
            logger.warning(
                f"{type(plain).__name__} was passed to prepare twice: prepare returns the "
                "prepared model and does not wrap it again"
            )
            return module
        return None

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> AcceleratedOptimizer:
        """Prepare one optimizer, which then steps only at the end of an accumulation window.

        Args:
            optimizer: the optimizer.
            device_placement: accepted for compatibility; the state follows the parameters.

        Returns:
            The wrapped optimizer.

        Example:
            optimizer = accelerator.prepare_optimizer(optimizer)
        """
        if isinstance(optimizer, AcceleratedOptimizer):
            if optimizer not in self._objects.optimizers:
                self._observe(optimizer)
            return optimizer
        if self._has_guard:
            check_optimizer(optimizer)
        offload = self.plan.handlers.optimizer_offload
        offload_chunk = None
        if offload is not None and self.device.type != "cpu":
            offload_chunk = offload.chunk_size
        placement = self._is_placed(device_placement)
        prepared = build_step(optimizer, self.strategy, placement, offload_chunk)
        self._observe(prepared)
        return prepared

    def _observe(self, optimizer: AcceleratedOptimizer) -> None:
        self._objects.optimizers.append(optimizer)
        self._checkpoints.check_bucket()
        optimizer.loop = self._loop
        for observer in self._loop.active:
            observer.after_prepare(optimizer)

    def prepare_scheduler(
        self, scheduler: LRScheduler | AcceleratedScheduler
    ) -> AcceleratedScheduler:
        """Prepare one learning rate scheduler, which then steps with its prepared optimizer.

        Args:
            scheduler: the scheduler. Prepare its optimizer first.

        Returns:
            The wrapped scheduler.

        Raises:
            PrepareError: `scheduler` stands for one that an engine makes (`DummyScheduler`).

        Example:
            optimizer = accelerator.prepare_optimizer(optimizer)
            scheduler = accelerator.prepare_scheduler(scheduler)
        """
        if isinstance(scheduler, AcceleratedScheduler):
            if scheduler not in self._objects.schedulers:
                self._objects.schedulers.append(scheduler)
            return scheduler
        refuse_placeholder(scheduler)
        stepped = getattr(scheduler, "optimizer", None)
        optimizers = [
            optimizer
            for optimizer in self._objects.optimizers
            if stepped in (optimizer, optimizer.optimizer)
        ]
        prepared = AcceleratedScheduler(
            scheduler,
            optimizers or list(self._objects.optimizers),
            step_with_optimizer=self.step_scheduler_with_optimizer,
            split_batches=self.split_batches,
        )
        if not self.split_batches:
            prepared.steps_per_call = self._data_shards
        self._objects.schedulers.append(prepared)
        return prepared

    @property
    def _data_shards(self) -> int:
        """How many shards the data has: those of the layout, or those that this process reads as one."""
        shards = self.strategy.data_shard[1]
        if self._changes is not None:
            return self._changes.data_shards(shards)
        return shards

    def prepare_data_loader(
        self,
        data_loader: DataLoader[Any],
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Callable[..., Any] | None = None,
    ) -> DataLoader[Any]:
        """Prepare one data loader, from which each process gets its share of the batches on its device.

        Args:
            data_loader: the loader.
            device_placement: whether batches are moved to this process's device; None takes the accelerator's
                setting, and that of `dataloader_config`.
            slice_fn_for_dispatch: `f(batch, slice, process_index, num_processes)` cuts a batch that the main
                process distributes. By default tensors are sliced along dimension 0.

        Returns:
            The prepared loader.

        Example:
            loader = accelerator.prepare_data_loader(DataLoader(dataset, batch_size=8, shuffle=True))
            for inputs, targets in loader:  # on accelerator.device
                ...
        """
        if data_loader in self._objects.dataloaders:
            return data_loader
        config = self.dataloader_config
        if device_placement is None:
            device_placement = self.device_placement and config.device_placement is None
        replaceable: dict[str, Any] = {}
        if self._exact:
            # Some packages replace the function by one with the API's arguments.
            replaceable["exact"] = True

        first_shard, _ = self.strategy.data_shard
        if self._changes is not None:
            data_loader = self._changes.source(data_loader)
        prepared = prepare_data_loader(
            data_loader,
            self.device,
            num_processes=self._data_shards,
            process_index=first_shard,
            split_batches=config.split_batches,
            put_on_device=device_placement,
            rng_types=list(self.rng_types),
            dispatch_batches=config.dispatch_batches,
            even_batches=config.even_batches,
            slice_fn_for_dispatch=slice_fn_for_dispatch,
            use_seedable_sampler=config.use_seedable_sampler,
            data_seed=config.data_seed,
            non_blocking=config.non_blocking,
            use_stateful_dataloader=config.use_stateful_dataloader,
            torch_device_mesh=self.torch_device_mesh,
            **replaceable,
        )
        if self._changes is not None:
            prepared = self._changes.loader(prepared, self.strategy.data_shard[1])
        self._objects.dataloaders.append(prepared)
        self._checkpoints.controller.add_loader(prepared)
        prepared.loop = self._loop
        return prepared

    def skip_first_batches(
        self, dataloader: DataLoader[Any], num_batches: int = 0
    ) -> DataLoader[Any]:
        """Return a loader that starts after its first batches. A map-style dataset does not read the skipped samples.

        Args:
            dataloader: a loader, prepared or not.
            num_batches: the number of batches to skip.

        Returns:
            The loader for the remaining batches of one epoch.

        Example:
            for batch in accelerator.skip_first_batches(loader, 100):  # batches 100, 101, ...
                ...
        """
        return skip_first_batches(dataloader, num_batches=num_batches)

    def track_average(self, model: torch.nn.Module, decay: float | None = 0.999) -> AveragedWeights:
        """Keep an average of a model's weights (EMA, SWA) that each optimizer step updates.

        The average is sharded like the model and saved in checkpoints. Call this before `load_state` or the loop that
        resumes.

        Args:
            model: a prepared model.
            decay: the weight of the former average in an exponential average; None for the mean of all steps (SWA).

        Returns:
            The average. Inside `with average.applied()`, the model uses it instead of its weights.

        Raises:
            ConfigurationError: `decay` is not at least 0 and less than 1, or DeepSpeed trains the model.
            PrepareError: `model` was not prepared, has 16-bit weights to train, or none.

        Example:
            average = accelerator.track_average(model, decay=0.999)
            ...
            with average.applied():
                evaluate(model)
                accelerator.save_model(model, "ema")
        """
        prepared = self.prepared_model(model)
        if prepared not in self._objects.models:
            raise PrepareError(
                f"track_average: model ({class_name(model)}) was not prepared. Pass the model "
                "that prepare returned"
            )
        if self.distributed_type is DistributedType.DEEPSPEED:
            raise ConfigurationError(
                "track_average does not work with DeepSpeed, whose engine keeps the fp32 "
                "weights: shard with an fsdp_plugin of version 2"
            )
        average = AveragedWeights(prepared, self._objects, self.precision, decay)
        self._objects.averages.append(average)
        return average

    # -- the step

    def accumulate(self, *models: torch.nn.Module) -> contextlib.AbstractContextManager[None]:
        """Return the context of one batch: gradients synchronize only at the last batch of an accumulation window.

        Args:
            models: the prepared models trained in the block.

        Returns:
            A context manager, to be entered for each batch.

        Example:
            with accelerator.accumulate(model):
                accelerator.backward(model(inputs).loss)
        """
        prepared = tuple(map(self.prepared_model, models))
        return AccumulatedBatch(self._accumulation, prepared, self.no_sync)

    @replaceable
    def no_sync(self, model: torch.nn.Module) -> contextlib.AbstractContextManager[None]:
        """Return a context in which backward passes accumulate gradients without communication.

        `accumulate` does this for accumulation windows, and decides when the optimizer steps.

        Args:
            model: a prepared model.

        Returns:
            A context manager.

        Example:
            with accelerator.no_sync(model):
                accelerator.backward(criterion(model(first), targets))
            accelerator.backward(criterion(model(second), targets))  # reduces the gradients of both
        """
        return self.prepared_model(model).no_sync()

    @staticmethod
    def trigger_sync_in_backward(model: torch.nn.Module) -> contextlib.AbstractContextManager[None]:
        """Synchronize gradients in the next backward pass, even though the forward pass ran under `no_sync`.

        Args:
            model: a prepared model.

        Returns:
            A context manager for the backward pass.

        Example:
            with accelerator.no_sync(model):
                loss = model(inputs).loss
            with accelerator.trigger_sync_in_backward(model):
                accelerator.backward(loss)
        """
        return sync_in_backward(model)

    def backward(
        self, loss: torch.Tensor, num_items: int | float | torch.Tensor | None = None, **kwargs: Any
    ) -> None:
        """Compute gradients of a loss, divided by the accumulation steps and scaled as the precision requires.

        Args:
            loss: a tensor with one element.
            num_items: the number of items (tokens, for example) that the loss is a mean over. The loss is then not
                divided by the accumulation steps: when gradients synchronize, they are the mean over all items of
                the window on all processes.
            kwargs: passed to `loss.backward`.

        Raises:
            CommunicationError: another process ended, or made another call.

        Example:
            accelerator.backward(loss)
            optimizer.step()
        """
        for observer in self._loop.active:
            observer.before_backward(loss, num_items)
        self._loop.update_scale()
        window = self._accumulation
        window.weight = 1.0
        if self._weights is not None:
            self._weigh(self._weights, num_items is not None)
            if num_items is not None and window.weight == 0.0:
                num_items = 0  # those of a placeholder
        window.has_backward = True
        weight = window.weight
        factor = 1.0
        if window.is_open:
            steps = window.steps
            factor = window.factor
            weight *= window.scale
        else:
            steps = self.gradient_state.num_steps
            window.unreduced.clear()
        scaled = loss
        try:
            if num_items is not None:
                sync = self.gradient_state.sync_gradients
                self._items.backward(loss, num_items, sync, self._window_models(), **kwargs)
            else:
                if weight != 1.0:
                    scaled = scaled * weight
                if steps != 1 and (self.strategy.divides_loss or factor != 1.0):
                    scaled = scaled / steps
                if factor == 1.0:
                    self.strategy.backward(scaled, **kwargs)
                else:
                    factors = torch.tensor(window.take_factor(), dtype=torch.float64)
                    models = self._window_models()
                    self.strategy.backward_items(scaled, lambda: factors, models, **kwargs)
        except (RuntimeError, AttributeError) as error:
            devices.report_exhausted(error)
            raise_lost(error, "`accelerator.backward`")
            concerns_loss = add_remedy(error)
            # A backward of the user's own may raise the same error of another tensor.
            is_loss = getattr(loss, "requires_grad", False) and loss.numel() == 1
            if concerns_loss and not is_loss:
                # The frames of torch explain nothing: the loss is wrong.
                error.__traceback__ = None
            raise
        self._loop.after_backward(loss, num_items)

    def _weigh(self, weights: BatchWeights, has_items: bool) -> None:
        """Set the weight of the next loss: `exact` gives batches that are not full a smaller one."""
        window = self._accumulation
        in_window = window.is_open and window.steps > 1
        batch = weights.take(has_items, in_window)
        if batch is None:
            return
        window.weight = batch.weight
        if in_window:
            window.weigh(batch)

    def _window_models(self) -> list[torch.nn.Module]:
        return [prepared.module for prepared in self._accumulation.models or self._objects.models]

    def lomo_backward(self, loss: torch.Tensor, learning_rate: float) -> None:
        """Compute gradients and update parameters in one pass, for LOMO optimizers.

        Args:
            loss: a tensor with one element.
            learning_rate: the learning rate of the update.

        Raises:
            ValueError: no LOMO optimizer is prepared.

        Example:
            optimizer = accelerator.prepare(lomo_optim.Lomo(model, lr=1e-3))
            accelerator.lomo_backward(model(inputs).loss, learning_rate=1e-3)
        """
        fused = self._lomo_optimizers()
        if not fused:
            raise ValueError(
                "lomo_backward needs a prepared LOMO optimizer (from the lomo_optim package)"
            )
        for observer in self._loop.active:
            observer.before_backward(loss, None)
        for optimizer in fused:
            optimizer.optimizer.fused_backward(loss, learning_rate)
        self._loop.after_backward(loss, None)

    has_lomo_optimizer: bool = computed(
        lambda self: bool(self._lomo_optimizers()),
        "Whether a prepared optimizer steps in its backward, as LOMO's do.",
    )

    def _lomo_optimizers(self) -> list[Any]:
        optimizers = self._objects.optimizers
        return [each for each in optimizers if hasattr(each.optimizer, "fused_backward")]

    def autocast(
        self, autocast_handler: AutocastKwargs | None = None
    ) -> contextlib.AbstractContextManager[None]:
        """Return a context in which operations run in the run's mixed precision.

        Args:
            autocast_handler: options of autocast; by default those of `kwargs_handlers`.

        Returns:
            A context manager.

        Example:
            with accelerator.autocast():
                loss = loss_function(outputs, targets)
        """
        return self.precision.autocast(autocast_handler)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Divide gradients by the loss scale of fp16 training. Further calls before the next step have no effect.

        Args:
            optimizer: a prepared optimizer or a list of them; all prepared optimizers by default.

        Raises:
            PrepareError: an optimizer was not prepared.

        Example:
            accelerator.backward(loss)
            accelerator.unscale_gradients(optimizer)
            largest = max(p.grad.abs().max() for p in model.parameters())
            optimizer.step()
        """
        if self.precision.scaler is None:
            return
        if optimizer is None:
            optimizer = self._objects.optimizers
        elif not isinstance(optimizer, (list, tuple)):
            optimizer = [optimizer]
        wrappers = {id(wrapper.optimizer): wrapper for wrapper in self._objects.optimizers}
        for requested in optimizer:
            prepared = wrappers.get(id(requested), requested)
            if not isinstance(prepared, AcceleratedOptimizer):
                raise PrepareError("unscale_gradients takes an optimizer that prepare returned")
            prepared.unscale()

    def _unscaled(
        self, parameters: torch.Tensor | Iterable[torch.Tensor]
    ) -> Iterable[torch.Tensor]:
        """The parameters, after unscaling the gradients of the optimizers that contain some of them."""
        if isinstance(parameters, torch.Tensor):
            parameters = [parameters]
        else:
            parameters = list(parameters)
        optimizers = []
        if self.precision.scaler is not None:
            requested = set(map(id, parameters))
            for optimizer in self._objects.optimizers:
                if not requested.isdisjoint(map(id, parameters_of(optimizer))):
                    optimizers.append(optimizer)
        self.unscale_gradients(optimizers)
        return parameters

    def clip_grad_norm_(
        self,
        parameters: torch.Tensor | Iterable[torch.Tensor],
        max_norm: float,
        norm_type: int | float = 2,
    ) -> torch.Tensor | None:
        """Scale gradients so that their total norm over all shards is at most `max_norm`.

        Inside an accumulation window it does not scale anything.

        Args:
            parameters: the parameters whose gradients are scaled together.
            max_norm: the largest norm.
            norm_type: the order of the norm; `inf` for the largest absolute value.

        Returns:
            The total norm before clipping. Inside a window, the norm of what this process has accumulated so far.
            DeepSpeed clips in its own step, by its `gradient_clipping`, and returns
            the norm of the last step.

        Example:
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
        """
        if not self.gradient_state.sync_gradients:
            norm = self.strategy.accumulated_norm(parameters, norm_type)
            if self.scaler is not None and norm is not None:
                norm = norm / self.scaler.get_scale()
            return norm
        begin = perf_counter()
        max_norm = float(max_norm)
        parameters = self._unscaled(parameters)
        try:
            norm = self.strategy.clip_grad_norm(parameters, max_norm, norm_type=norm_type)
        except RuntimeError as error:
            raise_lost(error, "`accelerator.clip_grad_norm_`")
            raise
        for observer in self._loop.active:
            observer.after_clip(norm, perf_counter() - begin)
        return norm

    def clip_grad_value_(
        self, parameters: torch.Tensor | Iterable[torch.Tensor], clip_value: float
    ) -> None:
        """Clamp each element of the gradients to [-clip_value, clip_value].

        It has no effect inside an accumulation window.

        Args:
            parameters: the parameters whose gradients are clamped.
            clip_value: the largest absolute value.

        Example:
            if accelerator.sync_gradients:
                accelerator.clip_grad_value_(model.parameters(), 0.5)
        """
        if not self.gradient_state.sync_gradients:
            return
        parameters = self._unscaled(parameters)
        self.strategy.clip_grad_value(parameters, clip_value)

    def join_uneven_inputs(
        self, joinables: list[Any], even_batches: bool | None = None
    ) -> contextlib.AbstractContextManager[None]:
        """Return a context in which processes may have different numbers of batches (torch's `Join`).

        Args:
            joinables: the prepared models or optimizers trained in the block.
            even_batches: replaces `even_batches` of the prepared loaders in the block; for map-style datasets only.

        Returns:
            A context manager.

        Example:
            with accelerator.join_uneven_inputs([model], even_batches=False):
                for inputs, targets in loader:
                    accelerator.backward(loss_function(model(inputs), targets))
                    optimizer.step()
                    optimizer.zero_grad()
        """
        block = self.strategy.join(joinables, self._objects.dataloaders, even_batches)
        if not self.strategy.joins:
            return block
        return self._joined(block)

    @contextlib.contextmanager
    def _joined(self, block: contextlib.AbstractContextManager[None]) -> Iterator[None]:
        with self._exchange.uneven(block):
            yield
        self._items.share_reference()

    def maybe_context_parallel(
        self,
        buffers: list[torch.Tensor] | None = None,
        buffer_seq_dims: list[int] | None = None,
        no_restore_buffers: set[torch.Tensor] | None = None,
    ) -> contextlib.AbstractContextManager[None]:
        """Return a context in which buffers contain this rank's shard of the sequence, under context parallelism.

        Without context parallelism the block has no effect.

        Args:
            buffers: the tensors to shard in place (token ids, labels, position ids).
            buffer_seq_dims: for each buffer, the dimension of the sequence.
            no_restore_buffers: the buffers that need not be restored after the block.

        Returns:
            A context manager.

        Example:
            tensors = [batch["input_ids"], batch["shift_labels"]]
            with accelerator.maybe_context_parallel(buffers=tensors, buffer_seq_dims=[1, 1]):
                accelerator.backward(model(**batch).loss)
        """
        if self.strategy.sequence is None:
            return NullContext()
        return self.strategy.sequence.open(
            buffers or [], buffer_seq_dims or [], no_restore_buffers or set()
        )

    def deepspeed_ulysses_dl_adapter(self, dl: Any, model: Any) -> Any:
        """Return a loader whose batches are sharded along the sequence (`sp_size`); `dl` itself without that layout.

        `maybe_context_parallel` is then not needed.

        Args:
            dl: a prepared loader of mappings with `input_ids` of shape (batch, sequence).
            model: the prepared model; accepted for compatibility.

        Returns:
            A loader of this rank's shards, with `position_ids`, and with `shift_labels` instead of `labels`.

        Example:
            loader = accelerator.deepspeed_ulysses_dl_adapter(loader, model)
            for batch in loader:  # the rows of this rank
                ...
        """
        if self.strategy.sequence is None:
            return dl
        return self.strategy.sequence.split_loader(dl)

    def explain(self, all_ranks: bool = False) -> Report:
        """Print the requested options, the resulting layout, and the parameters, communication volume and memory.

        Call it after `prepare`; the memory of optimizer states is known after the first step.

        Args:
            all_ranks: show the memory of every rank. Every process must then call it. Otherwise it does not
                communicate, and one process may call it alone.

        Returns:
            The report, on each process that calls it. The main process prints it.

        Example:
            model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
            accelerator.explain()
        """
        from .parallel.report.explain import Row, explain
        from .parallel.report.models import memory_usage

        models = self._objects.models
        optimizers = [optimizer.optimizer for optimizer in self._objects.optimizers]
        steps = self.gradient_accumulation_steps
        requested = []
        for name, (value, origin) in self.plan.values().items():
            if name == "gradient_accumulation_steps" and value != steps:
                # The attribute may be set, and a DeepSpeed configuration may decide.
                value, origin = steps, "set after the plan"
            requested.append(Row(name, str(value), "" if origin == "default" else origin))
        # An engine that manages accumulation windows itself decides when it reduces.
        each = self.gradient_state.sync_each_batch and self.strategy.divides_loss
        usage = None
        if all_ranks:
            usage = gather_object([memory_usage(models, optimizers, steps > 1 and not each)])
        has_stepped = any(optimizer.steps_made for optimizer in self._objects.optimizers)
        report = explain(
            requested, self.strategy, models, optimizers, steps, usage, each, has_stepped
        )
        if self.is_main_process:
            show_report(report)
        return report

    # -- models

    def prepared_model(self, model: torch.nn.Module) -> PreparedModel:
        """Return the object that describes how a model is laid out: its state, memory and communication.

        Args:
            model: a module, prepared or not.

        Returns:
            The `PreparedModel`.

        Example:
            prepared = accelerator.prepared_model(model)
            prepared.inner  # the model as the layout runs it
        """
        for prepared in self._objects.models:
            if model is prepared.module or model is prepared.inner:
                return prepared
        return self.strategy.as_prepared(model)

    @replaceable
    def unwrap_model(
        self,
        model: torch.nn.Module,
        keep_fp32_wrapper: bool = True,
        keep_torch_compile: bool = True,
    ) -> torch.nn.Module:
        """Return the user's model inside a prepared one.

        Args:
            model: a prepared model.
            keep_fp32_wrapper: keep the forward that casts outputs to fp32.
            keep_torch_compile: keep the `torch.compile` wrapper.

        Returns:
            The model.

        Example:
            accelerator.unwrap_model(model).config  # an attribute of the original model
        """
        return extract_model_from_parallel(model, keep_fp32_wrapper, keep_torch_compile)

    @replaceable
    def get_state_dict(self, model: torch.nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return the full state of a prepared model, under the names of the plain model.

        Every process must call it for sharded layouts.

        Args:
            model: a prepared model.
            unwrap: if False, return the state dict of the wrapper.

        Returns:
            The state dict with unsharded tensors; layouts that gather to one process return an empty one on the
            others.

        Example:
            state = accelerator.get_state_dict(model)  # on every process
            accelerator.save(state, "model.bin")
        """
        prepared = self.prepared_model(model)
        if is_offloaded(model):
            return get_state_dict_offloaded_model(model)
        unwrap_model = self.replacement("unwrap_model")
        with self.precision.swap_in_master_weights([model], [], [prepared.swappable()]):
            if not unwrap:
                return model.state_dict()
            if unwrap_model is not None and not prepared.is_partial:
                state: dict[str, Any] = unwrap_model(model).state_dict()
                return state
            return prepared.state_dict()

    def verify_device_map(self, model: torch.nn.Module) -> bool:
        """Return whether a module of the model is distributed over several devices by a device map.

        Args:
            model: the model.

        Raises:
            TypeError: `model` is not a module.

        Example:
            if accelerator.verify_device_map(model):
                print("the model is spread over several devices")
        """
        return any(
            len(getattr(module, "hf_device_map", None) or ()) > 1 for module in model.modules()
        )

    def free_memory(self, *objects: Any) -> list[Any]:
        """Release all prepared objects and the device's cached memory.

        Args:
            objects: variables to overwrite with the result.

        Returns:
            None for each object.

        Example:
            model, optimizer = accelerator.free_memory(model, optimizer)
        """
        released = devices.release_memory(*objects)
        self.strategy.release()
        for average in self._objects.averages:
            average.release()
        self._objects.clear()
        self._accumulation.release()
        self._checkpoints.controller.clear()
        for observer in self._loop.active:
            observer.released()
        self.step = 0
        return released

    def clear(self, *objects: Any) -> list[Any]:
        """Alias of `free_memory`.

        Args:
            objects: variables to overwrite with the result.

        Returns:
            None for each object.

        Example:
            model, optimizer = accelerator.clear(model, optimizer)
        """
        return self.free_memory(*objects)

    # -- checkpoints

    project_configuration: ProjectConfiguration = forwarded(
        "_checkpoints.project",
        "The folders of the run and the naming of its checkpoints.",
        settable=True,
    )

    save_iteration: int = forwarded(
        "_checkpoints.project.iteration", "The number of the next automatic checkpoint."
    )

    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        blocking: bool = True,
        layout: str = "native",
        **save_model_func_kwargs: Any,
    ) -> str:
        """Save models, optimizers, schedulers, loaders, random states and registered objects.

        Every process must call it. In data parallelism, where all processes have the same models and optimizers, the
        main process may call it alone: the random states and unfinished gradients of the others are then not saved.
        The folder appears either complete or not at all.

        Args:
            output_dir: the folder. May be None with automatic naming, which uses
                `<project_dir>/checkpoints/checkpoint_<iteration>`.
            safe_serialization: save weights as safetensors; otherwise in torch's format.
            blocking: if False, return as soon as the state is copied, and write it in the background.
            layout: "native", or "compat" for the API's own file names and formats.
            save_model_func_kwargs: accepted for compatibility; must be empty.

        Returns:
            The folder.

        Raises:
            ConfigurationError: an argument is not valid or unknown.
            CheckpointError: a process did not take part, or the state could not be written.

        Example:
            if step % 1000 == 0:
                accelerator.save_state(f"checkpoints/step_{step}")
        """
        if save_model_func_kwargs:
            names = ", ".join(sorted(save_model_func_kwargs))
            raise ConfigurationError(f"save_state got unexpected arguments: {names}")
        wait = self.replacement("wait_for_everyone")
        if wait is not None and self.project_configuration.automatic_checkpoint_naming:
            wait()
        with short_traceback:
            return self._checkpoints.save(output_dir, safe_serialization, blocking, layout)

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: dict[str, Any] | None = None,
        **load_model_func_kwargs: Any,
    ) -> LoadReport:
        """Load what `save_state` saved, on any number of processes. Every process must call it.

        Args:
            input_dir: the folder; by default the newest valid checkpoint of the project.
            load_kwargs: arguments of `torch.load`. Only `weights_only=False` has an effect: it trusts pickled objects
                in a folder in the API's own format.
            load_model_func_kwargs: `strict`, `models_only` and `allow_pickle`, as for
                `accelerate.checkpointing.load_run`; and `map_location`, "cpu" or "on_device". States are read piece by
                piece in host memory and end on the devices of their objects with either.

        Returns:
            A report of what was loaded.

        Raises:
            CheckpointError: there is no checkpoint, or it is damaged or does not match the prepared objects.

        Example:
            accelerator.load_state("checkpoints/step_1000")
        """
        with short_traceback:
            return self._checkpoints.load(input_dir, load_kwargs, **load_model_func_kwargs)

    def resume(
        self, signals: Sequence[str] = DEFAULT_SIGNALS, exit_code: int | None = None
    ) -> LoadReport | None:
        """Load the project's newest valid checkpoint, if there is one, and save when the run is preempted.

        Loaders continue after the last trained batch. From then on, the run also saves when it is preempted:
        at the next batch after any process received one of `signals`, all processes save and exit with `exit_code`.
        Call this after all objects are prepared and registered. `Accelerator(resume="auto")` calls it at
        the first pass over a loader.

        Args:
            signals: the names of the signals; an empty list disables this.
            exit_code: the exit code of a run that a signal stopped. Default: 128 plus the signal's number (143 for
                SIGTERM), which tells a launcher or job scheduler that the run is not complete.

        Returns:
            A report of what was loaded, with the epoch to continue in `epoch`; None if the run starts from scratch.

        Example:
            start = accelerator.resume()
            for epoch in range(start.epoch if start else 0, epochs):
                ...
        """
        return self._checkpoints.resume(signals, exit_code)

    def request_stop(self) -> None:
        """Save and end the run at the next safe point, on all processes, with the exit code of a SIGTERM.

        Any process may call it, even in a signal handler. Before the first step it ends the process.

        Raises:
            ConfigurationError: `resume` was not called.

        Example:
            if time.time() > budget:
                accelerator.request_stop()
        """
        self._checkpoints.stopper.request_stop()

    @property
    def resumed(self) -> LoadReport | None:
        """What `resume` loaded; None if the run starts from scratch. With `resume="auto"`, reading it loads."""
        return self._checkpoints.controller.report

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Include objects in `save_state` and `load_state`.

        A `state_dict()` may contain numbers, strings, bytes, lists, tuples, namedtuples, dicts with any plain keys,
        sets, deques, counters, enums, dates and times (without a time zone, or with a fixed offset), paths, tensors,
        and NumPy arrays and scalars of numbers, times or text. Each value is restored with its type; namedtuples
        without a call of their constructor. Objects are loaded before load hooks run, and before models.

        Args:
            objects: objects with `state_dict` and `load_state_dict`.

        Raises:
            ValueError: an object lacks one of these methods.

        Example:
            accelerator.register_for_checkpointing(tokens_seen)
            accelerator.save_state("checkpoint")  # includes tokens_seen.state_dict()
        """
        check_custom(objects)
        self._objects.custom.extend(objects)

    def register_save_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Register a hook that is called before `save_state` writes.

        Args:
            hook: `hook(models, weights, output_dir)`. It may change the list `weights`. Under DDP and FSDP1, `models`
                are those given to `prepare`, and elsewhere those that it returned.

        Returns:
            A handle whose `remove()` removes the hook.

        Example:
            def save_tokenizer(models, weights, output_dir):
                if accelerator.is_main_process:
                    tokenizer.save_pretrained(output_dir)

            accelerator.register_save_state_pre_hook(save_tokenizer)
        """
        return register_hook(self._checkpoints.save_hooks, hook)

    def register_load_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Register a hook that is called before `load_state` loads.

        Args:
            hook: `hook(models, input_dir)`. Models that it removes from the list are not loaded, nor compared with
                the checkpoint. All else is compared before. The models are those of `register_save_state_pre_hook`.

        Returns:
            A handle whose `remove()` removes the hook.

        Example:
            def show(models, input_dir):
                accelerator.print("loading", input_dir)

            handle = accelerator.register_load_state_pre_hook(show)
            handle.remove()
        """
        return register_hook(self._checkpoints.load_hooks, hook)

    def save_model(
        self,
        model: torch.nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Save the weights of a prepared model, with an index if there are several files.

        For a peft model with a frozen base, it saves the adapters, in the files of `PeftModel.save_pretrained`.

        The main process writes. Every process must call this for sharded layouts; in data parallelism the main
        process may call it alone. Call `wait_for_everyone` before another process reads the files.

        Args:
            model: a prepared model.
            save_directory: the folder.
            max_shard_size: the largest size of a file, in bytes or as text such as "10GB".
            safe_serialization: save safetensors; otherwise torch's format.

        Example:
            accelerator.save_model(model, "model")
            accelerator.wait_for_everyone()
        """
        if self.replacement("get_state_dict") is None and self._checkpoints.save_adapters(
            self.prepared_model(model), save_directory, safe_serialization
        ):
            return
        save_model(
            self.get_state_dict(model),
            save_directory,
            max_shard_size,
            safe_serialization,
            process=PartialState(),
            save_on_each_node=self.project_configuration.save_on_each_node,
            write=self.replacement("save"),
        )
        print_or_log(
            logger,
            f"saved the weights of {class_name(self.unwrap_model(model))} in {save_directory}",
        )

    @replaceable
    def save(self, obj: Any, f: str | os.PathLike[str], safe_serialization: bool = False) -> None:
        """Save an object on one process of the run, or on one process of each machine (`save_on_each_node`).

        Args:
            obj: what `torch.save` accepts; a dict of tensors with `safe_serialization`.
            f: the path of the file.
            safe_serialization: save safetensors instead of calling `torch.save`.

        Example:
            accelerator.save({"step": step}, "progress.pt")
        """
        save(obj, f, self.project_configuration.save_on_each_node, safe_serialization)

    # -- trackers

    project_dir: str | None = forwarded(
        "_checkpoints.project.project_dir", "The folder for logs and checkpoints."
    )
    logging_dir: str | None = forwarded(
        "_checkpoints.project.logging_dir", "The folder of trackers that write files."
    )
    log_with: list[Any] = forwarded(
        "_trackers.log_with", "The trackers that `init_trackers` starts.", settable=True
    )

    @property
    def trackers(self) -> list[GeneralTracker]:
        """The trackers that `init_trackers` started; empty on processes that do not log."""
        self._trackers.drain()
        return self._trackers.trackers

    @trackers.setter
    def trackers(self, trackers: list[GeneralTracker]) -> None:
        self._trackers.trackers = trackers

    def init_trackers(self, *args: Any, **kwargs: Any) -> None:
        """Start the trackers of `log_with`. Call it on every process; the main process starts them.

        The arguments are `init_trackers(project_name, config=None, init_kwargs={}, *, background=False)`.

        Args:
            args: `project_name`: the name of the run. `config`: its hyperparameters, a dict. `init_kwargs`:
                {tracker name: further arguments of that tracker}.
            kwargs: the same by name. `background`: whether `log` only copies the values, and a thread calls the
                services.

        Example:
            accelerator = Accelerator(log_with="tensorboard", project_dir="runs")
            accelerator.init_trackers("demo", config={"learning_rate": 1e-3})
            accelerator.log({"loss": 0.5}, step=1)
            accelerator.end_training()
        """
        if self.is_main_process:
            with short_traceback:
                self._trackers.start(*args, **kwargs)

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Return a started tracker.

        Args:
            name: the name of the tracker.
            unwrap: return the run object of its client package instead.

        Returns:
            The tracker. On processes that do not log, its methods have no effect.

        Raises:
            ValueError: other trackers have started, but not this one.

        Example:
            run = accelerator.get_tracker("wandb", unwrap=True)  # the client's own object
        """
        return self._trackers.get(name, unwrap)

    def log(self, *args: Any, **kwargs: Any) -> None:
        """Log values to every tracker. It has no effect on processes that do not log.

        The arguments are `log(values, step=None, log_kwargs={})`.

        Args:
            args: `values`: a dict of names and values. `step`: the training step. `log_kwargs`:
                {tracker name: further arguments of that tracker's `log`}.
            kwargs: the same by name.

        Example:
            accelerator.log({"loss": loss}, step=step)
        """
        self._trackers.log(*args, **kwargs)

    def record_work(
        self,
        *,
        flops_per_token: float | None = None,
        flops_per_sample: float | None = None,
        peak: float | None = None,
    ) -> None:
        """Declare how much computation training needs, so that telemetry can show the devices' utilization (MFU).

        It does nothing without telemetry. `torch.utils.flop_counter.FlopCounterMode` counts the operations of a step;
        for a dense transformer, 6 operations per parameter and token is a common estimate.

        Args:
            flops_per_token: floating point operations of forward and backward for one token, on all devices
                together. Tokens are counted by `num_items` of `backward`.
            flops_per_sample: the same for one sample, if tokens are not counted.
            peak: FLOP/s of one device. By default the published speed of bf16 products of a known device; without
                any, the operations are shown and no utilization.

        Raises:
            ConfigurationError: not exactly one of the two counts is given, or a number is not positive.

        Example:
            parameters = sum(p.numel() for p in model.parameters())
            accelerator.record_work(flops_per_token=6 * parameters)
        """
        work = declared_work(flops_per_token, flops_per_sample, peak, self.device)
        if self._recorder is not None:
            self._recorder.event("work", **work)

    def end_training(self) -> None:
        """Finish background writes, close the trackers and leave the process group. Call it on every process.

        Example:
            accelerator.end_training()  # the last line of the script
        """
        self._checkpoints.end_training()

    # -- profile

    def profile(
        self, profile_handler: ProfileKwargs | None = None
    ) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which torch's profiler runs.

        Args:
            profile_handler: options of the profiler; by default those of `kwargs_handlers`. With
                `output_trace_dir`, each process writes its trace there.

        Returns:
            A context manager, which yields the profiler.

        Example:
            with accelerator.profile() as profiler:
                accelerator.backward(loss_function(model(inputs), targets))
            accelerator.print(profiler.key_averages().table(row_limit=10))
        """
        options = profile_handler or self.plan.handlers.profile
        return profile(options, self.state.process_index, self.state.wait_for_everyone)

    # -- the prepared objects, under the names that libraries read

    step: int = forwarded(
        "_accumulation.step", "The number of batches so far in this window.", settable=True
    )

    @property
    def _models(self) -> MutableSequence[torch.nn.Module]:
        return PreparedModules(self._objects.models)

    @_models.setter
    def _models(self, modules: Iterable[torch.nn.Module]) -> None:
        self._models[:] = modules

    _optimizers: list[AcceleratedOptimizer] = forwarded(
        "_objects.optimizers", "The prepared optimizers.", True
    )
    _schedulers: list[AcceleratedScheduler] = forwarded(
        "_objects.schedulers", "The prepared schedulers.", True
    )
    _dataloaders: list[Any] = forwarded("_objects.dataloaders", "The prepared loaders.", True)
    _custom_objects: list[Any] = forwarded(
        "_objects.custom", "The objects that were registered.", True
    )
    _save_model_state_pre_hook: Any = forwarded(
        "_checkpoints.save_hooks", "The hooks of `save_state`, by number.", settable=True
    )
    _load_model_state_pre_hook: Any = forwarded(
        "_checkpoints.load_hooks", "The hooks of `load_state`, by number.", settable=True
    )

    @replaceable
    def _prepare_deepspeed(self, *args: Any) -> tuple[Any, ...]:
        """What `prepare` returns under DeepSpeed, as a tuple. Some packages replace it."""
        prepared = self._prepare_together(args, [None] * len(args))
        return prepared if len(args) > 1 else (prepared,)

    @replaceable
    def _prepare_fsdp2(self, *args: Any) -> tuple[Any, ...]:
        """What `prepare` returns under FSDP2, as a tuple. Some packages replace it."""
        prepared = self._prepare_together(args, [None] * len(args))
        return prepared if len(args) > 1 else (prepared,)

    @replaceable
    def _prepare_cp(self, *args: Any) -> tuple[Any, ...]:
        """The objects to prepare under context parallelism. Some packages replace it."""
        return args

    def _get_named_parameters(self, *args: Any) -> dict[str, torch.nn.Parameter]:
        """The parameters of the models among `args`, by the names of the user's model."""
        parameters: dict[str, torch.nn.Parameter] = {}
        for model in args:
            if isinstance(model, torch.nn.Module):
                parameters.update(extract_model_from_parallel(model).named_parameters())
        return parameters

    def __repr__(self) -> str:
        count = self.num_processes
        words = []
        if count > 1:
            words.append(f"rank {self.process_index} of {count}")
        words += [self.strategy.name, str(self.device)]
        if self.mixed_precision != "no":
            words.append(self.mixed_precision)
        if self.gradient_accumulation_steps != 1:
            words.append(f"{self.gradient_accumulation_steps} accumulation steps")
        prepared = self._objects
        kinds: dict[str, list[Any]] = {
            "model": prepared.models,
            "optimizer": prepared.optimizers,
            "loader": prepared.dataloaders,
        }
        for kind, objects in kinds.items():
            if objects:
                words.append(f"{len(objects)} {kind}{'s' * (len(objects) > 1)}")
        return f"<Accelerator: {', '.join(words)}>"

    def __deepcopy__(self, memo: dict[int, Any]) -> Accelerator:
        # A copied model or trainer refers to the same run.
        return self

    def __getstate__(self) -> dict[str, Any]:
        # Another process is told which one this is, and its options. What was prepared, and the group, stay here.
        parts = (
            "strategy _accumulation _items _objects _exchange _loop _out_of_memory _trackers _recorder "
            "_checkpoints"
        )
        options = {
            name: value for name, value in self.__dict__.items() if name not in parts.split()
        }
        return options | {"project": self.project_configuration}

    def __setstate__(self, state: dict[str, Any]) -> None:
        project = state.pop("project")
        self.__dict__.update(
            state, strategy=Strategy(state["state"].device, state["precision"]), _recorder=None
        )
        self._compose(project, TrackerGroup(None, project.logging_dir))


def _move_inputs(
    device: torch.device, non_blocking: bool, _: torch.nn.Module, args: Any, kwargs: Any
) -> Any:
    """A forward pre-hook of models whose batches stay on the host until then."""
    return send_to_device((args, kwargs), device, non_blocking)


def _replaced_state_dict(
    reference: weakref.ref[Accelerator],
) -> Callable[[torch.nn.Module], dict[str, Any]] | None:
    """The `get_state_dict` that a subclass has, or a package has assigned. The checkpoints do not own the run."""
    accelerator = reference()
    if accelerator is None:
        return None
    return accelerator.replacement("get_state_dict")


def _shard_elsewhere(
    strategy: Any, shard: Callable[[torch.nn.Module], torch.nn.Module], model: torch.nn.Module
) -> torch.nn.Module:
    """A model that another package's function has sharded; optimizers are pointed to the parameters that it made."""
    from .parallel.sharded_optimizer import ParameterPlaces

    places = ParameterPlaces(model)
    model = shard(model)
    strategy.replacements.add(places.replaced())
    return model


@functools.cache
def _warn_of_replaced(names: tuple[str, ...]) -> None:
    logger.warning(
        f"{', '.join(names)} of accelerate was replaced, which has no effect: prepare and "
        "checkpoints do not call it"
    )


def _trains(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> bool:
    trained = set(map(id, parameters_of(optimizer)))
    return not trained.isdisjoint(map(id, model.parameters()))


def _without_replica(model: torch.nn.Module) -> torch.nn.Module:
    """The model inside a DDP wrapper, which is wrapped again; any other as it is."""
    if isinstance(uncompiled(model), torch.nn.parallel.DistributedDataParallel):
        return extract_model_from_parallel(model, keep_torch_compile=False)
    return model


def _repoint(optimizers: list[torch.optim.Optimizer], pairs: Any) -> None:
    # Only a conversion of layers needs it, and it imports all of torch's distributed tensors.
    from .parallel.sharded_optimizer import repoint_all

    repoint_all(optimizers, pairs)


if not TYPE_CHECKING:
    __getattr__ = public_names(__name__)
