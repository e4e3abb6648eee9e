# SPDX-License-Identifier: Apache-2.0
"""The facade: `Accelerator`. Its methods are short; each hands on to the room that knows."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from .accumulation import AccumulatedBatch, Accumulation
from .checkpointing.loading import LoadReport
from .checkpointing.preemption import DEFAULT_SIGNALS
from .checkpointing.weights import save, save_model
from .collectives import gather_object
from .config.training import DataLoaderConfiguration, ProfileKwargs, ProjectConfiguration, TorchDynamoPlugin
from .core import memory
from .core.enums import DynamoBackend, LoggerType, RNGType
from .core.errors import ConfigurationError, PrepareError
from .data_loader import prepare_data_loader, skip_first_batches
from .first_step import FirstStepCheck
from .logging import get_logger
from .optimizer import AcceleratedOptimizer
from .parallel.base import Bundle
from .parallel.ddp.strategy import sync_in_backward
from .parallel.elementwise import is_elementwise
from .parallel.items import ItemWindow
from .parallel.unwrap import extract_model_from_parallel
from .placement.align import get_state_dict_offloaded_model, has_offloaded_params
from .process_control import ProcessControl
from .resolve import Request, resolve
from .run_checkpoints import HookHandle, RunCheckpoints
from .run_objects import RunObjects
from .run_options import RunOptions
from .runtime.communication import raise_lost
from .scheduler import AcceleratedScheduler
from .state import GradientState, PartialState
from .telemetry.profile import profile
from .tracking.group import TrackerGroup

if TYPE_CHECKING:
    from torch.optim.lr_scheduler import LRScheduler
    from torch.utils.data import DataLoader

    from .config.deepspeed import DeepSpeedPlugin
    from .config.fsdp import FullyShardedDataParallelPlugin
    from .config.megatron import MegatronLMPlugin
    from .config.parallel import TorchTensorParallelPlugin
    from .config.precision import AutocastKwargs
    from .config.training import GradientAccumulationPlugin
    from .parallel.base import Strategy
    from .parallel.prepared import PreparedModel
    from .parallel.report.explain import Report
    from .parallelism_config import ParallelismConfig
    from .precision.base import Precision
    from .tracking import GeneralTracker

logger = get_logger(__name__)

# Stands for "not given": these arguments have a home in a configuration object, and a default that is a value.
_NOT_GIVEN: Any = object()


class Accelerator(ProcessControl, RunOptions):
    """Makes a PyTorch training loop run on any device and any number of processes.

    Args:
        device_placement: move models and batches to this process's device.
        mixed_precision: `no`, `fp16` or `bf16`; None takes the launcher's.
        gradient_accumulation_steps: batches an optimizer step is made of.
        cpu: use the CPU also where an accelerator is present.
        dataloader_config: how loaders share their data. rng_types: generators that are synchronised at each epoch.
        log_with, project_dir, project_config: trackers and folders.
        step_scheduler_with_optimizer: the scheduler moves only when the optimizer does.
        kwargs_handlers: objects such as `DistributedDataParallelKwargs`, one of each kind.
        exact: each sample counts once in every epoch, also where nothing divides; parameters then follow the
            single-process loop of the same global batch. None takes ACCELERATE_EXACT.
        strategy: a layout of another package's, by the name it registered, or a class of your own that is made of
            (device, precision). None takes ACCELERATE_STRATEGY, else what the other arguments ask for.
        transforms: objects with `apply(model)`, or names that packages registered, applied to each model for training
            after it is laid out (before, where the object says `before_layout = True`). None takes
            ACCELERATE_TRANSFORMS, names parted by commas.
        resume: "auto" goes on from the project's newest checkpoint by itself; see `resumed`.

    Example:
        accelerator = Accelerator()
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
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
    ) -> None:
        resolved = resolve(
            Request(
                mixed_precision=mixed_precision,
                cpu=cpu,
                gradient_accumulation_steps=gradient_accumulation_steps,
                gradient_accumulation_plugin=gradient_accumulation_plugin,
                dynamo_plugin=_dynamo(dynamo_backend, dynamo_plugin),
                deepspeed_plugin=_one_of("deepspeed_plugin", deepspeed_plugin, "deepspeed_plugins", deepspeed_plugins),
                fsdp_plugin=fsdp_plugin,
                megatron_lm_plugin=megatron_lm_plugin,
                torch_tp_plugin=torch_tp_plugin,
                parallelism_config=parallelism_config,
                exact=exact,
                strategy=strategy,
                transforms=transforms,
                kwargs_handlers=kwargs_handlers or [],
            )
        )
        self.plan = resolved.plan
        self.state = resolved.state
        self.precision = resolved.precision
        self.strategy = resolved.strategy
        self.gradient_state = GradientState(resolved.plan.accumulation)
        self.device_placement = device_placement
        self.dataloader_config = _loader_config(dataloader_config, split_batches)
        self.step_scheduler_with_optimizer = step_scheduler_with_optimizer
        self.rng_types = [RNGType.GENERATOR.value] if rng_types is None else [str(kind) for kind in rng_types]
        self.flag_tensor = None

        self._exact = resolved.plan.exact
        self._accumulation = Accumulation(self.gradient_state)
        # The block of `accumulate()` without models, made once: it is entered for each batch.
        self._batch = AccumulatedBatch(self._accumulation, ())
        self._items = ItemWindow(self.strategy)
        self._divided = False
        self._objects = RunObjects()
        project = _project(project_config, project_dir)
        self._trackers = TrackerGroup(log_with, project.logging_dir)
        self._checkpoints = RunCheckpoints(
            self._objects,
            self.strategy,
            self.precision,
            self.state,
            self._accumulation,
            self._items,
            project,
            self._trackers,
        )
        self._first_step = FirstStepCheck(self._objects, self._checkpoints, self.gradient_state)
        if resume is not None:
            if resume != "auto":
                raise ConfigurationError(f"resume={resume!r}: it is 'auto', or None for a run that starts anew")
            self._checkpoints.resume_at_first_use()

    # -- prepare

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Models, optimizers, schedulers and loaders, made ready for this run, in the order given.

        Any other object comes back as it is. `device_placement` says for each object whether it is moved to the
        device; None takes the accelerator's setting. One object comes back by itself, several as a tuple.
        """
        if not args:
            raise PrepareError("prepare() was called without an object")
        if device_placement is None:
            device_placement = [None] * len(args)  # type: ignore[list-item]
        elif len(device_placement) != len(args):
            raise PrepareError(
                f"`device_placement` should be a list with {len(args)} elements (the number of objects passed), "
                f"it has {len(device_placement)}"
            )
        args = tuple(self.strategy.prepare_together(list(args), self.split_batches))
        result = list(args)
        models = [i for i, obj in enumerate(args) if isinstance(obj, torch.nn.Module)]
        raw = [obj for obj in args if isinstance(obj, torch.optim.Optimizer)]
        prepared = self._prepare_models(
            [args[i] for i in models], raw, [self._place(device_placement[i]) for i in models]
        )
        for i, model in zip(models, prepared, strict=True):
            result[i] = model
        # Schedulers come last: they look their optimizer up among the prepared ones.
        for i, obj in enumerate(args):
            if isinstance(obj, torch.utils.data.DataLoader):
                result[i] = self.prepare_data_loader(obj, device_placement=device_placement[i])
            elif isinstance(obj, torch.optim.Optimizer):
                result[i] = self.prepare_optimizer(obj, device_placement=device_placement[i])
        for i, obj in enumerate(args):
            if isinstance(obj, torch.optim.lr_scheduler.LRScheduler | AcceleratedScheduler):
                result[i] = self.prepare_scheduler(obj)
        return result[0] if len(result) == 1 else tuple(result)

    def _place(self, asked: bool | None) -> bool:
        return self.device_placement if asked is None else asked

    def prepare_model(
        self, model: torch.nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> torch.nn.Module:
        """One model, made ready. With `evaluation_mode` it is placed and lowered but not wrapped for training."""
        if not isinstance(model, torch.nn.Module):
            raise PrepareError(f"prepare_model takes a torch.nn.Module, not {type(model).__name__}")
        return self._prepare_models([model], [], [self._place(device_placement)], evaluation_mode)[0]

    def _prepare_models(
        self,
        models: list[torch.nn.Module],
        optimizers: list[torch.optim.Optimizer],
        place: list[bool],
        evaluation: bool = False,
    ) -> list[torch.nn.Module]:
        known = [self._prepared_twin(model) for model in models]
        bundle = Bundle(
            models=[model for model, twin in zip(models, known, strict=True) if twin is None],
            optimizers=[getattr(optimizer, "optimizer", optimizer) for optimizer in optimizers],
            place=[flag for flag, model, twin in zip(place, models, known, strict=True) if twin is None],
            evaluation=evaluation,
        )
        for i, model in enumerate(bundle.models):
            if bundle.place[i] and self.verify_device_map(model):
                bundle.place[i] = False
                if self.use_distributed and not evaluation:
                    raise PrepareError(
                        f"{type(model).__name__} is spread over several devices by its device_map: such a model cannot"
                        " be trained by several processes. Load it without device_map='auto', or start one process."
                    )
        for model in bundle.models:
            self.precision.convert(model, functools.partial(_repoint, bundle.optimizers))
        fresh = self.strategy.prepare(bundle)
        if bundle.models and not evaluation:
            self.strategy.sync_rng_state()
        for prepared in fresh:
            prepared.module._is_accelerate_prepared = True  # type: ignore[assignment]
        self._objects.models += fresh
        modules = iter(prepared.module for prepared in fresh)
        return [next(modules) if twin is None else twin for twin in known]

    def _prepared_twin(self, model: torch.nn.Module) -> torch.nn.Module | None:
        """The prepared form of a model that has been here before."""
        known = [prepared.module for prepared in self._objects.models]
        if isinstance(model, torch.nn.parallel.DistributedDataParallel) and model not in known:
            raise PrepareError(
                f"the {type(model.module).__name__} given to prepare is wrapped in DistributedDataParallel already: "
                "hand in the plain model, prepare wraps it"
            )
        plain = extract_model_from_parallel(model, keep_torch_compile=False)
        for prepared in known:
            if prepared is model or extract_model_from_parallel(prepared, keep_torch_compile=False) is plain:
                logger.warning(
                    f"{type(plain).__name__} was given to prepare twice: the prepared model is returned, nothing is "
                    "wrapped again"
                )
                return prepared
        return None

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> AcceleratedOptimizer:
        """One optimizer, wrapped: it steps when an accumulation window ends."""
        if isinstance(optimizer, AcceleratedOptimizer):
            if optimizer not in self._objects.optimizers:
                self._objects.optimizers.append(optimizer)
            return optimizer
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise PrepareError(f"prepare_optimizer takes a torch.optim.Optimizer, not {type(optimizer).__name__}")
        prepared = AcceleratedOptimizer(optimizer, device_placement=self._place(device_placement), scaler=self.scaler)
        self.precision.attach_master_weights(optimizer)
        prepared._before_first_step = self._first_step
        prepared._after_step.extend(self.strategy.after_step)
        if not is_elementwise(optimizer):
            # It may decide by the loss, as a line search does: all ranks have to decide alike.
            prepared._global_loss = self.strategy.global_loss
        self._objects.optimizers.append(prepared)
        self._checkpoints.watch_steps()
        return prepared

    def prepare_scheduler(self, scheduler: LRScheduler | AcceleratedScheduler) -> AcceleratedScheduler:
        """One learning-rate scheduler, wrapped: it moves with the prepared optimizer it belongs to."""
        if isinstance(scheduler, AcceleratedScheduler):
            if scheduler not in self._objects.schedulers:
                self._objects.schedulers.append(scheduler)
            return scheduler
        own = getattr(scheduler, "optimizer", None)
        known = self._objects.optimizers
        optimizers = [found for found in known if own in (found, found.optimizer)] or known
        prepared = AcceleratedScheduler(
            scheduler,
            list(optimizers),
            step_with_optimizer=self.step_scheduler_with_optimizer,
            split_batches=self.split_batches,
        )
        self._objects.schedulers.append(prepared)
        return prepared

    def prepare_data_loader(
        self,
        data_loader: DataLoader[Any],
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Callable[..., Any] | None = None,
    ) -> DataLoader[Any]:
        """One loader, sharded over the processes; its batches come on this process's device."""
        if data_loader in self._objects.dataloaders:
            return data_loader
        config = self.dataloader_config
        index, count = self.strategy.data_shard
        prepared = prepare_data_loader(
            data_loader,
            self.device,
            num_processes=count,
            process_index=index,
            split_batches=config.split_batches,
            put_on_device=self._place(device_placement),
            rng_types=list(self.rng_types),
            dispatch_batches=config.dispatch_batches,
            even_batches=config.even_batches,
            slice_fn_for_dispatch=slice_fn_for_dispatch,
            use_seedable_sampler=config.use_seedable_sampler,
            data_seed=config.data_seed,
            non_blocking=config.non_blocking,
            use_stateful_dataloader=config.use_stateful_dataloader,
            torch_device_mesh=self.torch_device_mesh,
            exact=self._exact,
        )
        self._objects.dataloaders.append(prepared)
        self._checkpoints.controller.add_loader(prepared)
        return prepared

    def skip_first_batches(self, dataloader: DataLoader[Any], num_batches: int = 0) -> DataLoader[Any]:
        """The loader without its first batches; for map-style data no sample of them is read."""
        return skip_first_batches(dataloader, num_batches=num_batches)

    # -- the step

    def accumulate(self, *models: torch.nn.Module) -> contextlib.AbstractContextManager[None]:
        """One batch of an accumulation window: gradients are synchronised at the window's last batch only."""
        if not models:
            return self._batch
        # The usual case, without a generator: this is called for each batch.
        prepared = (self.prepared_model(models[0]),) if len(models) == 1 else tuple(map(self.prepared_model, models))
        return AccumulatedBatch(self._accumulation, prepared)

    @contextlib.contextmanager
    def no_sync(self, model: torch.nn.Module) -> Iterator[None]:
        """Backwards in the block accumulate gradients without communicating."""
        with self.prepared_model(model).no_sync():
            yield

    @staticmethod
    def trigger_sync_in_backward(model: torch.nn.Module) -> contextlib.AbstractContextManager[None]:
        """A block whose backward synchronizes gradients although the forward ran under `no_sync`."""
        return sync_in_backward(model)

    def backward(self, loss: torch.Tensor, num_items: int | float | torch.Tensor | None = None, **kwargs: Any) -> None:
        """Backward of a loss, divided by the accumulation steps and scaled as the precision needs.

        Args:
            loss: a tensor of one element.
            num_items: the loss is a mean over so many items (tokens, say). Then nothing is divided by steps: when
                gradients synchronise they are the mean over all items of the window on all processes.
            kwargs: handed to `loss.backward`.
        """
        if num_items is not None:
            models = [prepared.module for prepared in self._accumulation.models or self._objects.models]
            try:
                self._items.backward(loss, num_items, self.gradient_state.sync_gradients, models, **kwargs)
            except RuntimeError as error:
                raise_lost(error, "`accelerator.backward`")
                raise
            for optimizer in self._objects.optimizers:
                if self._items.close not in optimizer._after_step:
                    optimizer._after_step.append(self._items.close)
            return
        steps = self.gradient_state.num_steps
        if self._exact:
            loader = self.gradient_state.active_dataloader
            weight = 1.0 if loader is None else loader.batch_weight
            if weight != 1.0:
                loss = loss * weight
        if steps != 1:
            if not self._divided:
                self._divided = True
                self._first_step.check_window()
            if self.strategy.divides_loss:
                loss = loss / steps
        try:
            self.strategy.backward(loss, **kwargs)
        except RuntimeError as error:
            raise_lost(error, "`accelerator.backward`")
            raise

    def lomo_backward(self, loss: torch.Tensor, learning_rate: float) -> None:
        """Backward of a LOMO optimizer, which updates the parameters during it."""
        fused = [found for found in self._objects.optimizers if hasattr(found.optimizer, "fused_backward")]
        if not fused:
            raise ValueError("lomo_backward needs a prepared LOMO optimizer (package lomo_optim)")
        for optimizer in fused:
            optimizer.optimizer.fused_backward(loss, learning_rate)

    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> contextlib.AbstractContextManager[None]:
        """A block that computes in the run's mixed precision."""
        return self.precision.autocast(autocast_handler)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Take the loss scale of fp16 training out of the gradients; once between two steps, however often called."""
        if self.scaler is None:
            return
        given = self._objects.optimizers if optimizer is None else optimizer
        for found in given if isinstance(given, (list, tuple)) else [given]:
            if not isinstance(found, AcceleratedOptimizer):
                found = next((one for one in self._objects.optimizers if one.optimizer is found), None)
                if found is None:
                    raise PrepareError("unscale_gradients takes an optimizer that prepare returned")
            found.unscale()

    def _unscaled(self, parameters: torch.Tensor | Iterable[torch.Tensor]) -> Iterable[torch.Tensor]:
        """The parameters, after unscaling the gradients of exactly those optimizers that hold some of them."""
        if isinstance(parameters, torch.Tensor):
            parameters = [parameters]
        if self.scaler is None:
            return parameters
        parameters = list(parameters)
        wanted = {id(parameter) for parameter in parameters}
        for optimizer in self._objects.optimizers:
            if any(id(parameter) in wanted for group in optimizer.param_groups for parameter in group["params"]):
                optimizer.unscale()
        return parameters

    def clip_grad_norm_(
        self, parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: int | float = 2
    ) -> torch.Tensor | None:
        """Scale gradients so that their total norm is at most `max_norm`. Returns the norm before."""
        parameters = self._unscaled(parameters)
        try:
            return self.strategy.clip_grad_norm(parameters, max_norm, norm_type=norm_type)
        except RuntimeError as error:
            raise_lost(error, "`accelerator.clip_grad_norm_`")
            raise

    def clip_grad_value_(self, parameters: torch.Tensor | Iterable[torch.Tensor], clip_value: float) -> None:
        """Cut each element of the gradients to [-clip_value, clip_value]."""
        parameters = self._unscaled(parameters)
        self.strategy.clip_grad_value(parameters, clip_value)

    def join_uneven_inputs(
        self, joinables: list[Any], even_batches: bool | None = None
    ) -> contextlib.AbstractContextManager[None]:
        """A block in which processes may have different numbers of batches (torch's Join).

        `even_batches` overrides the setting of the prepared map-style loaders inside the block.
        """
        return self.strategy.join(joinables, self._objects.dataloaders, even_batches)

    def maybe_context_parallel(
        self,
        buffers: list[torch.Tensor] | None = None,
        buffer_seq_dims: list[int] | None = None,
        no_restore_buffers: set[torch.Tensor] | None = None,
    ) -> contextlib.AbstractContextManager[None]:
        """A block whose buffers hold this rank's part of the sequence under context parallelism; else no effect.

        Args:
            buffers: tensors to split in place (token ids, labels, position ids). buffer_seq_dims: the sequence's
                dimension of each. no_restore_buffers: those that need not be whole again after the block.
        """
        return self.strategy.context_parallel(buffers or [], buffer_seq_dims or [], no_restore_buffers or set())

    def deepspeed_ulysses_dl_adapter(self, dl: Any, model: Any) -> Any:
        """A prepared loader whose batches come split along the sequence (sp_size); as it is without that.

        Batches are mappings with `input_ids` (batch, sequence). This rank's rows come back, with `position_ids`, and
        with `shift_labels` in the place of `labels`. Then `maybe_context_parallel` is not needed.
        """
        return self.strategy.split_loader(dl)

    def explain(self, all_ranks: bool = False) -> Report:
        """Print what was asked for and what became of it: the layout, parameters and modules, messages, memory.

        Call it after `prepare`; optimizer state is known after the first step. It sends nothing, so one process may
        call it alone; with `all_ranks` the memory of every rank is shown, and every process must call it. Returns
        the report on each process that calls it; the main process prints it.
        """
        from .parallel.report.explain import Row, explain, memory_usage

        models = self._objects.models
        optimizers = [optimizer.optimizer for optimizer in self._objects.optimizers]
        steps = self.gradient_accumulation_steps
        decided = self.plan.values()
        if steps != decided["gradient_accumulation_steps"][0]:
            # The attribute may be set, and a DeepSpeed configuration may decide.
            decided["gradient_accumulation_steps"] = (steps, "set after the plan")
        requested = [Row(name, str(got), origin) for name, (got, origin) in decided.items()]
        # An engine that keeps windows by itself reduces where it does.
        each = self.gradient_state.sync_each_batch and self.strategy.divides_loss
        usage = None
        if all_ranks:
            usage = gather_object([memory_usage(models, optimizers, steps > 1 and not each)])
        report = explain(requested, self.strategy, models, optimizers, steps, usage, each)
        self.print(report)
        return report

    # -- models

    def prepared_model(self, model: torch.nn.Module) -> PreparedModel:
        """How a model is laid out: its state, its memory and what it sends. Also of a module that was not prepared."""
        return self._objects.find_model(model) or self.strategy.as_prepared(model)

    def unwrap_model(
        self, model: torch.nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> torch.nn.Module:
        """The user's own model inside a prepared one."""
        return extract_model_from_parallel(model, keep_fp32_wrapper, keep_torch_compile)

    def get_state_dict(self, model: torch.nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """The full state of a prepared model, on every process that can hold it, under the plain model's names."""
        if any(has_offloaded_params(module) for module in model.modules()):
            return get_state_dict_offloaded_model(model)
        prepared = self.prepared_model(model)
        with self.precision.swap_in_master_weights([model], [], [prepared.swappable()]):
            return prepared.state_dict() if unwrap else model.state_dict()

    def verify_device_map(self, model: torch.nn.Module) -> bool:
        """Whether some part of the model is spread over several devices."""
        return any(len(getattr(module, "hf_device_map", None) or ()) > 1 for module in model.modules())

    def free_memory(self, *objects: Any) -> list[Any]:
        """Forget all prepared objects and return the device's cached memory; a None comes back for each object."""
        released = memory.release_memory(*objects)
        self.strategy.release()
        self._objects.clear()
        self._checkpoints.controller.clear()
        self.step = 0
        return released

    def clear(self, *objects: Any) -> list[Any]:
        """The same as `free_memory`."""
        return self.free_memory(*objects)

    # -- checkpoints

    @property
    def project_configuration(self) -> ProjectConfiguration:
        """The folders of the run and the naming of its checkpoints."""
        return self._checkpoints.project

    @project_configuration.setter
    def project_configuration(self, project: ProjectConfiguration) -> None:
        self._checkpoints.project = project

    @property
    def save_iteration(self) -> int:
        """The number of the next automatically named checkpoint."""
        return self.project_configuration.iteration

    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        blocking: bool = True,
        layout: str = "native",
        **save_model_func_kwargs: Any,
    ) -> str:
        """Save models, optimizers, schedulers, loaders, generators and registered objects; returns the folder.

        Every process calls it. The folder appears whole or not at all. With automatic naming the folder is
        `<project_dir>/checkpoints/checkpoint_<iteration>`.

        Args:
            output_dir: the folder; may be left out with automatic naming.
            safe_serialization: weights in safetensors, else in torch's own format.
            blocking: False returns when the state is copied; the disk is written meanwhile.
            layout: `native`, or `compat` for the API's own file names and formats.
        """
        if save_model_func_kwargs:
            names = ", ".join(sorted(save_model_func_kwargs))
            raise ConfigurationError(f"save_state got arguments that nothing here takes: {names}")
        return self._checkpoints.save(output_dir, safe_serialization, blocking, layout)

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: dict[str, Any] | None = None,
        **load_model_func_kwargs: Any,
    ) -> LoadReport:
        """Load what `save_state` saved, on any number of processes; every process calls it.

        Args:
            input_dir: the folder; left out, the newest valid checkpoint of the project.
            load_kwargs: as for `torch.load`. Of these, `weights_only=False` trusts a folder in the API's own format
                that holds pickled objects; tensors go to where the run has them, whatever `map_location` says.
            load_model_func_kwargs: `strict`, `models_only`, `allow_pickle` of `accelerate.checkpointing.load_run`.
        """
        return self._checkpoints.load(input_dir, load_kwargs, **load_model_func_kwargs)

    def resume(self, signals: Sequence[str] = DEFAULT_SIGNALS) -> LoadReport | None:
        """Go on from the project's newest valid checkpoint, if there is one; None where the run starts anew.

        Loaders then go on behind the last batch that was trained on; `report.epoch` is the epoch that they are in.
        From here on the run also saves when it is asked to stop: at the next batch after one of `signals` has
        reached any process, all of them save and exit with code 0. An empty list listens to none. Call it when all
        objects are prepared and registered; `Accelerator(resume="auto")` calls it at the first pass over a loader.

        Example:
            start = accelerator.resume()
            for epoch in range(start.epoch if start else 0, epochs):
                ...
        """
        return self._checkpoints.resume(signals)

    @property
    def resumed(self) -> LoadReport | None:
        """What `resume` has loaded; None where the run starts anew. With `resume="auto"` it is loaded by now."""
        return self._checkpoints.controller.report

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Objects with `state_dict` and `load_state_dict` that `save_state` and `load_state` shall include."""
        self._checkpoints.register(*objects)

    def register_save_state_pre_hook(self, hook: Callable[..., None]) -> HookHandle:
        """`hook(models, weights, output_dir)` is called before `save_state` writes; `weights` may be changed."""
        return self._checkpoints.register_save_hook(hook)

    def register_load_state_pre_hook(self, hook: Callable[..., None]) -> HookHandle:
        """`hook(models, input_dir)` is called before `load_state` loads; models it takes out are not loaded."""
        return self._checkpoints.register_load_hook(hook)

    def save_model(
        self,
        model: torch.nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """The weights of a prepared model in files of at most `max_shard_size` (bytes, or "10GB"), with an index."""
        state = self.get_state_dict(model)
        save_model(
            state,
            save_directory,
            max_shard_size,
            safe_serialization,
            process=PartialState(),
            save_on_each_node=self.project_configuration.save_on_each_node,
        )
        self.state.wait_for_everyone()

    def save(self, obj: Any, f: str | os.PathLike[str], safe_serialization: bool = False) -> None:
        """`torch.save` (or safetensors) on one process of the run, or of each machine with `save_on_each_node`."""
        save(obj, f, self.project_configuration.save_on_each_node, safe_serialization)

    # -- trackers

    @property
    def project_dir(self) -> str | None:
        return self.project_configuration.project_dir

    @property
    def logging_dir(self) -> str | None:
        return self.project_configuration.logging_dir

    @property
    def log_with(self) -> list[Any]:
        return self._trackers.log_with

    @log_with.setter
    def log_with(self, log_with: list[Any]) -> None:
        self._trackers.log_with = log_with

    @property
    def trackers(self) -> list[GeneralTracker]:
        """The trackers that `init_trackers` has started; empty on processes that do not log."""
        return self._trackers.trackers

    @trackers.setter
    def trackers(self, trackers: list[GeneralTracker]) -> None:
        self._trackers.trackers = trackers

    def init_trackers(self, *args: Any, **kwargs: Any) -> None:
        """`init_trackers(project_name, config=None, init_kwargs={})`: start the trackers of `log_with`.

        `config` are the run's hyperparameters; `init_kwargs` the arguments of each tracker under its name.
        """
        if self.is_main_process:
            self._trackers.start(*args, **kwargs)

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """The tracker of this name (its client object with `unwrap`); a blank one where this process does not log."""
        return self._trackers.get(name, unwrap)

    def log(self, *args: Any, **kwargs: Any) -> None:
        """`log(values, step=None, log_kwargs={})`: hand a dict of values to every tracker."""
        self._trackers.log(*args, **kwargs)

    def end_training(self) -> None:
        """Finish what runs in the background, close the trackers, leave the process group."""
        self._checkpoints.end_training()

    # -- profile

    def profile(self, profile_handler: ProfileKwargs | None = None) -> contextlib.AbstractContextManager[Any]:
        """A block under torch's profiler; with `output_trace_dir` each process writes its trace there."""
        options = profile_handler or self.plan.handlers.profile
        return profile(options, self.state.process_index, self.state.wait_for_everyone)

    # -- what was prepared, under the names that libraries read

    @property
    def step(self) -> int:
        """Batches of the present accumulation window so far."""
        return self._accumulation.step

    @step.setter
    def step(self, step: int) -> None:
        self._accumulation.step = step

    @property
    def _models(self) -> list[torch.nn.Module]:
        return [prepared.module for prepared in self._objects.models]

    @property
    def _optimizers(self) -> list[AcceleratedOptimizer]:
        return self._objects.optimizers

    @property
    def _schedulers(self) -> list[AcceleratedScheduler]:
        return self._objects.schedulers

    @property
    def _dataloaders(self) -> list[Any]:
        return self._objects.dataloaders

    @property
    def _custom_objects(self) -> list[Any]:
        return self._objects.custom

    def __deepcopy__(self, memo: dict[int, Any]) -> Accelerator:
        # Its state is shared by design: a copied model or trainer keeps this one.
        return self


def _repoint(optimizers: list[torch.optim.Optimizer], pairs: Any) -> None:
    # Only a conversion of layers needs it, and it brings all of torch's distributed tensors along.
    from .parallel.remap import repoint_all

    repoint_all(optimizers, pairs)


def _dynamo(backend: DynamoBackend | str | None, plugin: TorchDynamoPlugin | None) -> TorchDynamoPlugin | None:
    if backend is not None and plugin is not None:
        raise ConfigurationError("dynamo_backend and dynamo_plugin are given both: set backend in the plugin")
    return TorchDynamoPlugin(backend=backend) if backend is not None else plugin  # type: ignore[arg-type]


def _one_of(first: str, one: Any, second: str, other: Any) -> Any:
    if one is not None and other is not None:
        raise ConfigurationError(f"{first} and {second} are given both: they are the same argument")
    return other if one is None else one


def _loader_config(config: DataLoaderConfiguration | None, split_batches: Any) -> DataLoaderConfiguration:
    if config is None:
        config = DataLoaderConfiguration()
    elif not isinstance(config, DataLoaderConfiguration):
        raise ConfigurationError(f"dataloader_config takes a DataLoaderConfiguration, not {type(config).__name__}")
    if split_batches is not _NOT_GIVEN:
        config.split_batches = bool(split_batches)
    return config


def _project(project: ProjectConfiguration | None, project_dir: str | None) -> ProjectConfiguration:
    if project is not None and not isinstance(project, ProjectConfiguration):
        raise ConfigurationError(f"project_config takes a ProjectConfiguration, not {type(project).__name__}")
    project = project or ProjectConfiguration(project_dir=project_dir)
    if project_dir is not None and project.project_dir is None:
        project.set_directories(project_dir)
    return project
