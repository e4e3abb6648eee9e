# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's ZeRO: an engine owns the model, its optimizer and the accumulation window."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys
from torch.utils.hooks import RemovableHandle

from ...config.deepspeed import DeepSpeedPlugin, get_active_deepspeed_plugin
from ...core import env
from ...core.devices import kind_of
from ...core.errors import ConfigurationError, PrepareError
from ...core.imports import is_available
from ...core.modules import move_module
from ...precision.base import Precision
from ...runtime import deepspeed_comm, group
from ...state import AcceleratorState, GradientState, PartialState
from ..base import Bundle, Strategy, one_shard_each
from ..compile import Compile, compile_regions_deepspeed
from ..optimizer_scope import refuse_flat_shards
from ..placeholders import DummyOptim, DummyScheduler
from ..prepared import CommunicationVolume, GroupShapes, PreparedModel
from ..report.communication import dtype_name
from .engine import (
    DeepSpeedEngineWrapper,
    DeepSpeedOptimizerWrapper,
    DeepSpeedSchedulerWrapper,
    engine_bytes,
    engine_master_weights,
    engine_volume,
    start_engine,
)
from .state import EngineState, ParameterChanges, computing_weights

if TYPE_CHECKING:
    from .engine import Engine


class EngineModel(PreparedModel):
    """A DeepSpeed engine. `state` takes and loads its full state."""

    is_partial = True

    module: Engine

    def __init__(self, engine: Engine, precision: Precision, state: EngineState) -> None:
        super().__init__(engine, precision)
        self.state = state
        self.changes: ParameterChanges = ParameterChanges(state)
        # `load_state_dict` of a module would leave out ZeRO's fp32 weights, and its next step undo the load.
        engine.load_state_dict = self._load  # type: ignore[method-assign]

    def _load(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> _IncompatibleKeys:
        if assign:
            raise ConfigurationError("load_state_dict(assign=True): a DeepSpeed engine steps the parameters it has")
        state = {name.removeprefix("module."): value for name, value in state_dict.items()}
        known = set(self.state.light)
        self.load_state_dict(state, strict)
        return _IncompatibleKeys(sorted(known - set(state)), sorted(set(state) - known))

    @property
    def inner(self) -> nn.Module:
        """The module inside of the engine."""
        return self.module.module

    @property
    def template(self) -> nn.Module:
        """The user's names and shapes, which ZeRO's parameters do not have."""
        return self.state.skeleton

    def state_dict(self) -> dict[str, Any]:
        """The weights that the engine computes with. Raises ValueError if stage 3 is not configured to gather them."""
        self.changes.take_over()
        return computing_weights(self.module)

    def checkpoint_state_dict(self) -> dict[str, Any]:
        """The full state with the optimizer's fp32 weights: on the host of rank 0, empty on the other ranks."""
        self.changes.take_over()
        return self.state.model_state()

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Load a full state, which every rank has."""
        self.state.load_model_state(state, strict)
        self.changes.record()

    def trains_with(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the engine made this optimizer."""
        return getattr(self.module, "optimizer", None) is optimizer

    def optimizer_state_dict(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The full state as that of a single process: on rank 0, empty on the other ranks."""
        return self.state.optimizer_state()

    def load_optimizer_state_dict(self, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
        """Load the optimizer state of a single process, which every rank has."""
        self.state.load_optimizer_state(state)

    def optimizer_group_shapes(self, optimizer: torch.optim.Optimizer) -> GroupShapes:
        """Names and shapes in each group, as the optimizer had them before ZeRO."""
        return self.state.groups()

    def communication_volume(self, backwards: int) -> list[CommunicationVolume] | None:
        """The bytes that the engine sends."""
        return engine_volume(self.module, backwards)

    def memory_usage(self, windows: bool, seen: set[int] | None = None) -> dict[str, int]:
        """The engine's partitions, gradients, fp32 weights and buckets."""
        return dict(engine_bytes(self.module))

    def master_weights(self) -> Iterable[torch.Tensor]:
        """The fp32 weights in the engine's optimizer."""
        return engine_master_weights(self.module)

    def dtypes(self) -> tuple[str, str]:
        """The parameters' dtype and the engine's communication dtype."""
        computes = next((parameter.dtype for parameter in self.module.parameters()), torch.float32)
        return dtype_name(computes), dtype_name(self.module.communication_data_type)

    def release(self) -> None:
        """Free the engine's memory and hooks."""
        self.module.destroy()


class UntrainedModel(PreparedModel):
    """A model that does not train, next to an engine: each process has all of it, and sends nothing for it."""

    def communication_volume(self, backwards: int) -> list[CommunicationVolume]:
        """Nothing."""
        return []


class DeepSpeedZero(Strategy):
    """One engine for one model: it reduces, clips, steps and moves its scheduler in the last backward of a window.

    The selected plugin (`AcceleratorState().select_deepspeed_plugin`) is that of the model prepared next; each model
    that trains needs its own Accelerator.
    """

    name = "DeepSpeed"
    divides_loss = False
    data_shard = property(one_shard_each)

    def __init__(self, device: torch.device, precision: Precision) -> None:
        super().__init__(device, precision)
        if not is_available("deepspeed"):
            raise ConfigurationError(
                "deepspeed_plugin is given and DeepSpeed is not installed: pip install deepspeed (or "
                "accelerate[deepspeed]); on a machine without a GPU with DS_BUILD_OPS=0 and --no-build-isolation"
            )
        if not dist.is_initialized():
            group.start_alone(kind_of(device))
        if env.get("LOCAL_RANK") is None:
            # An engine reads its device index from there.
            env.publish({"LOCAL_RANK": PartialState().local_process_index})
        deepspeed_comm.start(device)
        self.engine: DeepSpeedEngineWrapper | None = None
        # Of that engine.
        self._trained: EngineModel | None = None
        self._optimizer: DeepSpeedOptimizerWrapper | None = None
        self._trains = False
        # `steps_made` of the optimizer when the engine stepped last.
        self._known_steps = -1
        self._warned_steps = False
        # Of the engines that `prepare_together` has started and `prepare` has not seen yet.
        self._started: list[EngineModel] = []
        self._warned = False
        # Parameters that no backward of the first window has reached yet, and what watches them.
        self._unreached: dict[int, str] = {}
        self._watches: list[RemovableHandle] = []

    @property
    def plugin(self) -> DeepSpeedPlugin:
        """The selected plugin."""
        return get_active_deepspeed_plugin(AcceleratorState())

    def prepare_together(self, objects: list[Any], split_batches: bool = False) -> list[Any]:
        """The objects of one `prepare`: the engine in the model's place, its optimizer and scheduler in theirs.

        Raises PrepareError where they cannot make one engine, ConfigurationError where they contradict the config.
        """
        from deepspeed.runtime.lr_schedules import VALID_LR_SCHEDULES

        models = [i for i, obj in enumerate(objects) if isinstance(obj, nn.Module) and not _is_engine(obj)]
        optimizers = [
            i
            for i, obj in enumerate(objects)
            if isinstance(obj, torch.optim.Optimizer | DummyOptim) and not isinstance(obj, DeepSpeedOptimizerWrapper)
        ]
        schedulers = [
            i
            for i, obj in enumerate(objects)
            if isinstance(obj, torch.optim.lr_scheduler.LRScheduler | DummyScheduler)
            or type(obj).__name__ in VALID_LR_SCHEDULES
        ]
        if not models:
            if optimizers:
                raise PrepareError(
                    "DeepSpeed makes one engine of a model and its optimizer: give both to one call of prepare()"
                )
            return objects
        for kind, found in (("models", models), ("optimizers", optimizers), ("schedulers", schedulers)):
            if len(found) > 1:
                raise PrepareError(
                    f"prepare() got {len(found)} {kind}: a DeepSpeed engine has one. Make an Accelerator for each "
                    "model that trains, with deepspeed_plugins={name: plugin, ...}"
                )
        plugin = self.plugin
        stage = _stage(plugin)
        micro = _micro_batch_size(plugin, objects, split_batches)
        steps = _accumulation_steps(plugin)
        model = objects[models[0]]
        optimizer = objects[optimizers[0]] if optimizers else None
        scheduler = objects[schedulers[0]] if schedulers else None
        if optimizer is None and plugin.get_value("optimizer") is None and stage in (1, 2):
            raise PrepareError(
                f"ZeRO stage {stage} needs an optimizer: give it to the same call of prepare(), or use stage 3 (or 0) "
                "for a model that does not train"
            )
        flattens = stage > 0 or plugin.get_value("bf16.enabled", False)
        if flattens and isinstance(optimizer, torch.optim.Optimizer):
            refuse_flat_shards(
                optimizer,
                f"DeepSpeed (ZeRO stage {stage})",
                "give an fsdp_plugin with fsdp_version=2 instead of the deepspeed_plugin",
            )
        engine, wrapped, moved = self._start(plugin, model, optimizer, scheduler, micro, steps)
        result = list(objects)
        result[models[0]] = engine
        if optimizers:
            result[optimizers[0]] = wrapped
        if schedulers and moved is not None:
            result[schedulers[0]] = moved
        return result

    def _start(
        self, plugin: DeepSpeedPlugin, model: nn.Module, optimizer: Any, scheduler: Any, micro: int, steps: int
    ) -> tuple[Engine, DeepSpeedOptimizerWrapper | None, DeepSpeedSchedulerWrapper | None]:
        plugin.set_moe_leaf_modules(model)
        for transform in self.transforms:
            if not isinstance(transform, Compile):
                model = transform.apply(model)
        groups = _parameter_groups(model, optimizer)
        engine, wrapped, moved = start_engine(
            plugin, model, optimizer, scheduler, micro_batch_size=micro, gradient_accumulation_steps=steps,
            world_size=dist.get_world_size(),
        )  # fmt: skip
        prepared = EngineModel(engine, self.precision, EngineState(engine, groups))
        self._started.append(prepared)
        if wrapped is not None and _stage(plugin):
            self._watch(engine.module)
        for transform in self.transforms:
            if isinstance(transform, Compile):
                arguments = transform.options.to_kwargs()
                if transform.options.use_regional_compilation:
                    compile_regions_deepspeed(engine.module, **arguments)
                else:
                    engine.compile(backend=arguments.pop("backend", "inductor"), compile_kwargs=arguments)
        if self.engine is None or not self._trains:
            # One without an optimizer, such as a teacher, gives way to one with an optimizer.
            self.engine = DeepSpeedEngineWrapper(engine)
            self._trained, self._optimizer = prepared, wrapped
            self._trains = wrapped is not None or plugin.get_value("optimizer") is not None
        elif wrapped is not None:
            warnings.warn(
                "this Accelerator has a DeepSpeed engine already; accelerator.backward uses the first "
                "one. Make an Accelerator for each model that trains."
            )
        return engine, wrapped, moved

    def prepare(self, bundle: Bundle) -> list[PreparedModel]:
        """Return the engines that are started; a model without one (`prepare_model`) is placed, and does not train."""
        found: list[PreparedModel] = []
        for model, place in zip(bundle.models, bundle.place, strict=True):
            started = next((one for one in self._started if one.module is model), None)
            if started is not None:
                self._started.remove(started)
                found.append(started)
            else:
                found.append(
                    self.as_prepared(move_module(model, self.device) if place and not _is_engine(model) else model)
                )
        self.prepared.add(found)
        return found

    def as_prepared(self, module: nn.Module) -> PreparedModel:
        """A prepared model of an engine, or of a model that does not train."""
        if not _is_engine(module):
            return UntrainedModel(module, self.precision)
        return EngineModel(module, self.precision, EngineState(module, _parameter_groups(module.module, None)))

    def backward(self, loss: torch.Tensor, **kwargs: object) -> None:
        """The engine's backward, and its step where the window ends."""
        steps = GradientState().sync_gradients
        self._before(steps).backward(loss, sync_gradients=steps, **kwargs)
        if steps:
            self._after_step()

    def backward_items(
        self,
        loss: torch.Tensor,
        factor: Callable[[], torch.Tensor] | None = None,
        models: Iterable[nn.Module] = (),
        **kwargs: object,
    ) -> None:
        """The engine's backward; its step multiplies the gradients."""
        self._before(factor is not None).backward_items(loss, factor, **kwargs)
        if factor is not None:
            self._after_step()

    def _before(self, steps: bool) -> DeepSpeedEngineWrapper:
        """The engine, of which a backward begins; `steps`: it will step, too."""
        if self.engine is None or self._trained is None:
            raise PrepareError("backward() before prepare(): DeepSpeed has no engine yet")
        if not steps:
            return self.engine
        self._trained.changes.take_over()
        optimizer = self._optimizer
        if optimizer is None or self._warned_steps:
            return self.engine
        if optimizer.steps_made == self._known_steps:
            self._warned_steps = True
            warnings.warn(
                "accelerator.backward steps the DeepSpeed engine again, without an optimizer.step() since its last "
                "step: with DeepSpeed each backward that completes an accumulation window is a step of the optimizer. "
                "Add the losses of a step and call backward once, or use `with accelerator.accumulate(model):`"
            )
        self._known_steps = optimizer.steps_made
        return self.engine

    def _after_step(self) -> None:
        assert self._trained is not None
        self._trained.changes.record()
        if self._watches:
            self._warn_unreached()

    def _watch(self, model: nn.Module) -> None:
        """Record which parameters get gradients in the first window: ZeRO gives the others zero gradients."""
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                self._unreached[id(parameter)] = name
                self._watches.append(parameter.register_hook(functools.partial(self._reach, id(parameter))))

    def _reach(self, key: int, gradient: torch.Tensor) -> None:
        self._unreached.pop(key, None)

    def _warn_unreached(self) -> None:
        for watch in self._watches:
            watch.remove()
        if self._unreached:
            names = list(self._unreached.values())
            warnings.warn(
                f"{', '.join(names[:5])}{', ...' if len(names) > 5 else ''} received no gradient on rank "
                f"{dist.get_rank()}. DeepSpeed gives such parameters a gradient of zero: the optimizer decays them "
                "and counts the step, unlike a single process. Freeze parameters that are never used "
                "(requires_grad_(False)), or shard with an fsdp_plugin of version 2"
            )
        self._watches, self._unreached = [], {}

    def clip_grad_norm(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0
    ) -> torch.Tensor:
        """The norm of the gradients that the engine has clipped, in its step, by its own `gradient_clipping`."""
        if self.engine is None:
            raise PrepareError("clip_grad_norm_() before prepare(): DeepSpeed has no engine yet")
        limit = self.plugin.get_value("gradient_clipping", 0.0)
        if limit != max_norm and not self._warned:
            self._warned = True
            warnings.warn(
                f"clip_grad_norm_(max_norm={max_norm}): the engine clips by gradient_clipping={limit} of its "
                "configuration, before this call. Change that value instead."
            )
        return self.engine.get_global_grad_norm()  # type: ignore[return-value]

    def clip_grad_value(self, parameters: Iterable[torch.Tensor], clip_value: float) -> None:
        """Raise ConfigurationError: the engine has stepped already."""
        raise ConfigurationError(
            "DeepSpeed does not support `clip_grad_value_`: its engine has stepped by now. Use gradient_clipping."
        )

    def release(self) -> None:
        """Destroy the engines."""
        super().release()
        self.engine = self._trained = self._optimizer = None
        self._trains = False
        self._started.clear()


def _is_engine(model: object) -> TypeGuard[Engine]:
    import deepspeed

    return isinstance(model, deepspeed.DeepSpeedEngine)


def _parameter_groups(
    model: nn.Module, optimizer: torch.optim.Optimizer | DummyOptim | None
) -> list[list[nn.Parameter]]:
    """The parameters of each group; ZeRO keeps the objects, but replaces them in the optimizer's groups."""
    if optimizer is None:
        return [[parameter for parameter in model.parameters() if parameter.requires_grad]]
    if isinstance(optimizer, DummyOptim):
        # Often a generator, which can be read only once.
        listed: list[Any] = list(optimizer.params)
        optimizer.params = listed
        return [list(group["params"]) for group in listed] if listed and isinstance(listed[0], dict) else [listed]
    return [list(group["params"]) for group in optimizer.param_groups]


def _stage(plugin: DeepSpeedPlugin) -> int:
    return int(plugin.get_value("zero_optimization.stage", 0))


def _micro_batch_size(plugin: DeepSpeedPlugin, objects: Sequence[object], split_batches: bool) -> int:
    """Samples of one process and backward, from the config or else the loaders, which must not contradict it."""
    key = "train_micro_batch_size_per_gpu"
    configured = plugin.get_value(key, "auto")
    sizes = []
    for obj in objects:
        if isinstance(obj, torch.utils.data.DataLoader):
            size = getattr(obj, "batch_size", None)
            size = getattr(obj.batch_sampler, "batch_size", None) if size is None else size
            if isinstance(size, int):
                sizes.append(max(1, size // dist.get_world_size()) if split_batches else size)
    if configured != "auto":
        if sizes and configured not in sizes:
            raise ConfigurationError(
                f"the DeepSpeed config has {key}={configured}, the loaders have batches of "
                f"{', '.join(map(str, sizes))} a process: make them equal, or set it to auto"
            )
        return int(configured)
    if not sizes:
        raise PrepareError(
            "When using DeepSpeed, `accelerate.prepare()` requires you to pass at least one of training or evaluation "
            f"dataloaders with `batch_size` attribute returning an integer value, or set an integer value for `{key}` "
            "in the DeepSpeed config file, or assign one to "
            f"`AcceleratorState().deepspeed_plugin.deepspeed_config['{key}']`."
        )
    return min(sizes) if plugin.is_train_batch_min else max(sizes)


def _accumulation_steps(plugin: DeepSpeedPlugin) -> int:
    """Backwards of a window, from the config or the Accelerator."""
    state, configured = GradientState(), plugin.get_value("gradient_accumulation_steps", "auto")
    if configured == "auto" or (plugin.accumulation_by_default and state.num_steps != 1):
        plugin.deepspeed_config["gradient_accumulation_steps"] = state.num_steps
        return state.num_steps
    if state.num_steps not in (1, configured):
        raise ConfigurationError(
            f"the DeepSpeed config has gradient_accumulation_steps={configured}, the Accelerator {state.num_steps}: "
            "make them equal, or set it to auto"
        )
    state.plugin_kwargs["num_steps"] = int(configured)
    return int(configured)
