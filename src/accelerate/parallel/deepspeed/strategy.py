# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's ZeRO: an engine owns the model, its optimizer and the accumulation window."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from ...config.deepspeed import DeepSpeedPlugin, get_active_deepspeed_plugin
from ...core import env
from ...core.devices import kind_of
from ...core.errors import ConfigurationError, PrepareError
from ...core.imports import is_available
from ...core.messages import warn
from ...core.modules import move_module
from ...precision.base import Precision
from ...runtime import backends, group
from ...state import AcceleratorState, GradientState, PartialState
from ..base import Bundle, Strategy, one_shard_each
from ..compile import Compile, compile_regions_deepspeed
from ..prepared import PreparedModel
from . import requirements
from .engine import (
    DeepSpeedEngineWrapper,
    DeepSpeedOptimizerWrapper,
    DeepSpeedSchedulerWrapper,
    is_engine,
    parameter_groups,
    start_engine,
)
from .requirements import EngineRequest
from .state import EngineModel, EngineState, UntrainedModel

if TYPE_CHECKING:
    from .engine import Engine


class DeepSpeedZero(Strategy):
    """One engine for one model: it reduces, clips, steps and moves its scheduler in the last backward of a window.

    The selected plugin (`AcceleratorState().select_deepspeed_plugin`) is that of the model prepared next; each model
    that trains needs its own Accelerator.
    """

    name = "DeepSpeed"
    views_matrices = False
    api_method = "_prepare_deepspeed"
    divides_loss = False
    data_shard = property(one_shard_each)

    def __init__(self, device: torch.device, precision: Precision) -> None:
        super().__init__(device, precision)
        if not is_available("deepspeed"):
            raise ConfigurationError(
                "deepspeed_plugin was passed, but DeepSpeed is not installed: pip install "
                "deepspeed (or accelerate[deepspeed]); on a machine without a GPU with "
                "DS_BUILD_OPS=0 and --no-build-isolation"
            )
        if not dist.is_initialized():
            group.start_alone(kind_of(device))
        if env.get("LOCAL_RANK") is None:
            # An engine reads its device index from there.
            env.publish({"LOCAL_RANK": PartialState().local_process_index})
        backends.start_deepspeed(device)
        self.engine: DeepSpeedEngineWrapper | None = None
        self._trains = False
        # Of the engines that `prepare_together` has started and `prepare` has not seen yet.
        self._started: list[EngineModel] = []
        self._warned = False

    @property
    def plugin(self) -> DeepSpeedPlugin:
        """The selected plugin."""
        return get_active_deepspeed_plugin(AcceleratorState())

    def prepare_together(self, objects: list[Any], split_batches: bool = False) -> list[Any]:
        """The objects of one `prepare`: the engine in the model's place, its optimizer and scheduler in theirs.

        Raises PrepareError where they cannot make one engine, ConfigurationError where they contradict the config.
        """
        request = EngineRequest.of(self.plugin, objects, split_batches)
        if not request.models:
            if request.optimizers:
                raise PrepareError(
                    "DeepSpeed makes one engine of a model and its optimizer: pass both to one "
                    "call of prepare()"
                )
            return objects
        requirements.check(request)
        engine, optimizer, scheduler = self._start(request)
        replaced: dict[int, Any] = {id(request.models[0]): engine, id(request.optimizer): optimizer}
        if scheduler is not None:
            replaced[id(request.scheduler)] = scheduler
        return [replaced.get(id(obj), obj) for obj in objects]

    def _start(
        self, request: EngineRequest
    ) -> tuple[Engine, DeepSpeedOptimizerWrapper | None, DeepSpeedSchedulerWrapper | None]:
        plugin, model = request.plugin, request.models[0]
        plugin.set_moe_leaf_modules(model)
        compiling = [transform for transform in self.transforms if isinstance(transform, Compile)]
        for transform in self.transforms:
            if transform not in compiling:
                model = transform.apply(model)
        groups = parameter_groups(model, request.optimizer)
        engine, optimizer, scheduler = start_engine(
            plugin,
            model,
            request.optimizer,
            request.scheduler,
            micro_batch_size=request.micro_batch_size,
            gradient_accumulation_steps=_share_accumulation(request),
            world_size=dist.get_world_size(),
        )
        self._started.append(EngineModel(engine, self.precision, EngineState(engine, groups)))
        for transform in compiling:
            arguments = transform.options.to_kwargs()
            if transform.options.use_regional_compilation:
                compile_regions_deepspeed(engine.module, **arguments)
            else:
                engine.compile(
                    backend=arguments.pop("backend", "inductor"), compile_kwargs=arguments
                )
        if self.engine is None or not self._trains:
            # One without an optimizer, such as a teacher, gives way to one with an optimizer.
            self.engine = DeepSpeedEngineWrapper(engine)
            self._trains = optimizer is not None or plugin.get_value("optimizer") is not None
        elif optimizer is not None:
            warn(
                "this Accelerator already has a DeepSpeed engine, and accelerator.backward uses "
                "the first one. Create an Accelerator for each model that trains."
            )
        return engine, optimizer, scheduler

    def prepare(self, bundle: Bundle) -> list[PreparedModel]:
        """Return the engines that are started; a model without one (`prepare_model`) is placed, and does not train."""
        models: list[PreparedModel] = []
        for model, moves in zip(bundle.models, bundle.place, strict=True):
            prepared = next((started for started in self._started if started.module is model), None)
            if prepared is None:
                if moves and not is_engine(model):
                    module = move_module(model, self.device)
                else:
                    module = model
                models.append(self.as_prepared(module))
            else:
                self._started.remove(prepared)
                models.append(prepared)
        self.prepared.add(models)
        return models

    def as_prepared(self, module: nn.Module) -> PreparedModel:
        """A prepared model of an engine, or of a model that does not train."""
        if not is_engine(module):
            return UntrainedModel(module, self.precision)
        return EngineModel(
            module, self.precision, EngineState(module, parameter_groups(module.module, None))
        )

    def backward(self, loss: torch.Tensor, **kwargs: object) -> None:
        """The engine's backward, and its step where the window ends."""
        steps = GradientState().sync_gradients
        with self.recomputing():
            self._started_engine().backward(loss, sync_gradients=steps, **kwargs)

    def backward_items(
        self,
        loss: torch.Tensor,
        factor: Callable[[], torch.Tensor] | None = None,
        models: Iterable[nn.Module] = (),
        **kwargs: object,
    ) -> None:
        """The engine's backward; its step multiplies the gradients."""
        with self.recomputing():
            self._started_engine().backward_items(loss, factor, **kwargs)

    def _started_engine(self) -> DeepSpeedEngineWrapper:
        if self.engine is None:
            raise PrepareError(
                "backward() was called before prepare(): DeepSpeed does not have an engine yet"
            )
        return self.engine

    def clip_grad_norm(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0
    ) -> torch.Tensor:
        """The norm of the gradients that the engine has clipped, in its step, by its own `gradient_clipping`."""
        if self.engine is None:
            raise PrepareError(
                "clip_grad_norm_() was called before prepare(): DeepSpeed does "
                "not have an engine yet"
            )
        limit = self.plugin.get_value("gradient_clipping", 0.0)
        if limit != max_norm and not self._warned:
            self._warned = True
            warn(
                f"clip_grad_norm_(max_norm={max_norm}): the engine clips by the "
                f"gradient_clipping={limit} of its configuration, before this call. Change that "
                "value instead."
            )
        return self.engine.get_global_grad_norm()  # type: ignore[return-value]

    def accumulated_norm(
        self, parameters: torch.Tensor | Iterable[torch.Tensor], norm_type: float = 2.0
    ) -> torch.Tensor | None:
        """The norm of the last step, as `clip_grad_norm` returns it."""
        return self._started_engine().get_global_grad_norm()  # type: ignore[return-value]

    def clip_grad_value(self, parameters: Iterable[torch.Tensor], clip_value: float) -> None:
        """Raise ConfigurationError: the engine has stepped already."""
        raise ConfigurationError(
            "DeepSpeed does not support `clip_grad_value_`: its engine has already stepped. Use "
            "gradient_clipping."
        )

    def release(self) -> None:
        """Destroy the engines."""
        super().release()
        self.engine = None
        self._trains = False
        self._started.clear()


def _share_accumulation(request: EngineRequest) -> int:
    """Backwards of a window, which the Accelerator and the config have both from now on."""
    state = GradientState()
    if request.accumulation_by_accelerator:
        request.plugin.deepspeed_config["gradient_accumulation_steps"] = state.num_steps
    else:
        state.plugin_kwargs["num_steps"] = int(
            request.plugin.get_value("gradient_accumulation_steps")
        )
    return state.num_steps
