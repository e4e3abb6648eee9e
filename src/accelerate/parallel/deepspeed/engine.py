# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed engines behind the API's names: wrappers, how one is started, its host optimizers, what it sends."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import nn

from ...config.deepspeed import DeepSpeedPlugin, get_active_deepspeed_plugin
from ...core.availability import deepspeed_required
from ...core.errors import ConfigurationError, PrepareError
from ...optimizer import AcceleratedOptimizer
from ...scheduler import AcceleratedScheduler
from ..gradients import gradients_of, multiply
from ..placeholders import DummyOptim, DummyScheduler
from ..report import figures

__all__ = [
    "DeepSpeedEngineWrapper",
    "DeepSpeedOptimizerWrapper",
    "DeepSpeedSchedulerWrapper",
    "get_active_deepspeed_plugin",
    "map_pytorch_optim_to_deepspeed",
    "start_engine",
]


if TYPE_CHECKING:

    class Engine(nn.Module):
        """What is used of `deepspeed.DeepSpeedEngine`, which has no types; its optimizers have many classes."""

        module: nn.Module
        optimizer: Any
        device: torch.device
        communication_data_type: torch.dtype
        backward: Callable[..., object]
        step: Callable[[], object]
        destroy: Callable[[], None]
        zero_optimization: Callable[[], bool]
        zero_optimization_stage: Callable[[], int]
        gradient_accumulation_steps: Callable[[], int]
        set_gradient_accumulation_boundary: Callable[[bool], None]
        get_global_grad_norm: Callable[[], float | torch.Tensor | None]


class DeepSpeedEngineWrapper:
    """Calls an engine's backward pass, and its step at the end of an accumulation window."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def backward(self, loss: torch.Tensor, sync_gradients: bool = True, **kwargs: object) -> None:
        """One backward; with `sync_gradients` the engine reduces, clips, steps, moves its scheduler, clears."""
        # The window is the user's: it may end early, with the loader.
        self.engine.set_gradient_accumulation_boundary(sync_gradients)
        self.engine.backward(loss, **kwargs)
        if sync_gradients:
            self.engine.step()

    def backward_items(
        self, loss: torch.Tensor, factor: Callable[[], torch.Tensor] | None, **kwargs: object
    ) -> None:
        """One backward of a loss that is not divided by the steps of its window.

        At the end of a window (`factor` is given) the engine steps with its gradients times `factor()`.
        Raises ConfigurationError for an engine whose gradients cannot be multiplied.
        """
        check_multiplies(self.engine)
        self.engine.set_gradient_accumulation_boundary(factor is not None)
        self.engine.backward(loss, scale_wrt_gas=False, **kwargs)
        if factor is not None:
            with multiplied(self.engine, factor()):
                self.engine.step()

    def get_global_grad_norm(self) -> float | None:
        """The norm of the last step's gradients before clipping; None before the first step, and without ZeRO."""
        norm = self.engine.get_global_grad_norm()
        if isinstance(norm, torch.Tensor):
            return norm.item()
        return norm


def check_multiplies(engine: Engine) -> None:
    """Raise ConfigurationError for an engine that uses gradients before its step."""
    super_offload = getattr(engine, "super_offload", None)
    offloads = callable(super_offload) and bool(super_offload())
    for option, is_on in (
        ("zenflow", getattr(engine, "zenflow", False)),
        ("super_offload", offloads),
    ):
        if is_on:
            raise ConfigurationError(
                f"backward(loss, num_items=...): DeepSpeed's {option} updates parameters before "
                "all gradients of a window and the number of its items are known. Divide the "
                f"loss by that number, omit num_items, or turn off {option} in the configuration"
            )


@contextlib.contextmanager
def multiplied(engine: Engine, factor: torch.Tensor) -> Iterator[None]:
    """A block around `engine.step()` which uses the gradients times `factor`, for their norm and its limit too."""
    optimizer = engine.optimizer
    if hasattr(optimizer, "fp32_groups_gradients_flat"):
        # bf16 weights whose gradients are summed in fp32.
        multiply(optimizer.fp32_groups_gradients_flat, factor)
        yield
    elif engine.zero_optimization():
        # The step divides by the loss scale wherever gradients lie, on the host too.
        former = optimizer.custom_loss_scaler, optimizer.external_loss_scale
        scale, number = float(optimizer.loss_scale), float(factor)
        if number:
            optimizer.external_loss_scale = scale / number
        else:
            optimizer.external_loss_scale = scale
        optimizer.custom_loss_scaler = True
        try:
            yield
        finally:
            optimizer.custom_loss_scaler, optimizer.external_loss_scale = former
    else:
        multiply(gradients_of(engine.module.parameters()), factor)
        yield


class DeepSpeedOptimizerWrapper(AcceleratedOptimizer):
    """The engine's optimizer as the training loop sees it: the engine has already stepped in its backward pass."""

    steps_made: int

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer, device_placement=False, scaler=None)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Nothing: the engine clears the gradients after its step."""

    def step(self, closure: Callable[[], object] | None = None) -> None:  # type: ignore[override]
        """Nothing: the engine has stepped in the backward that completed the window. It takes no closure."""
        if closure is not None:
            raise TypeError(
                "a DeepSpeed engine does not take a closure: it has already stepped in "
                "accelerator.backward"
            )
        if self.gradient_state.sync_gradients:
            self.steps_made += 1
            self.loop.after_step(self)

    @property
    def step_was_skipped(self) -> bool:
        """Whether the engine left the last step out because gradients were not finite."""
        return bool(getattr(self.optimizer, "overflow", False))


class DeepSpeedSchedulerWrapper(AcceleratedScheduler):
    """The engine's scheduler as the training loop sees it: the engine advances it in its step."""

    def __init__(self, scheduler: Any, optimizers: Any) -> None:
        super().__init__(scheduler, optimizers)

    def step(self, *args: object, **kwargs: object) -> None:
        """Nothing: the engine has moved it."""


def is_engine(model: object) -> TypeGuard[Engine]:
    """Whether a model is DeepSpeed's engine."""
    import deepspeed

    return isinstance(model, deepspeed.DeepSpeedEngine)


def parameter_groups(
    model: nn.Module, optimizer: torch.optim.Optimizer | DummyOptim | None
) -> list[list[nn.Parameter]]:
    """The parameters of each group; ZeRO keeps the objects, but replaces them in the optimizer's groups."""
    if optimizer is None:
        return [[parameter for parameter in model.parameters() if parameter.requires_grad]]
    if isinstance(optimizer, DummyOptim):
        # Often a generator, which can be read only once.
        listed: list[Any] = list(optimizer.params)
        optimizer.params = listed
        if listed and isinstance(listed[0], dict):
            return [list(group["params"]) for group in listed]
        return [listed]
    return [list(group["params"]) for group in optimizer.param_groups]


@deepspeed_required
def start_engine(
    plugin: DeepSpeedPlugin,
    model: nn.Module,
    optimizer: Any = None,
    scheduler: Any = None,
    *,
    micro_batch_size: int,
    gradient_accumulation_steps: int,
    world_size: int,
) -> tuple[Engine, DeepSpeedOptimizerWrapper | None, DeepSpeedSchedulerWrapper | None]:
    """(engine, optimizer, scheduler) of a model under a plugin's configuration, its "auto" values filled.

    The scheduler is None where the engine does not move it (one of torch's own). `micro_batch_size` is the samples of
    one process and backward. Raises ConfigurationError for values that contradict each other.
    """
    import deepspeed
    from deepspeed.runtime.lr_schedules import VALID_LR_SCHEDULES

    callable_ = getattr(scheduler, "lr_scheduler_callable", None)
    # A set value may differ from a default of ours, never from what the program does.
    facts: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": micro_batch_size,
        "gradient_accumulation_steps": gradient_accumulation_steps,
        "train_batch_size": micro_batch_size * gradient_accumulation_steps * world_size,
    }
    mismatches: list[str] = []
    for key in facts:
        plugin.fill_match(key, mismatches, **facts)
    if mismatches:
        raise ConfigurationError(
            "the DeepSpeed config and the program differ:\n" + "\n".join(mismatches)
        )
    plugin.deepspeed_config_process(
        must_match=False, **facts, **_defaults(model, optimizer, scheduler)
    )
    arguments: dict[str, Any] = {"model": model, "config": plugin.deepspeed_config}
    # If they are not configured, DeepSpeed from 0.19.3 on clips at 1.0, and skips steps whose bf16 gradients overflow.
    arguments["config"].setdefault("gradient_clipping", 0.0)
    if plugin.get_value("bf16.enabled"):
        arguments["config"]["bf16"].setdefault("check_grad_overflow", False)
    if isinstance(optimizer, DummyOptim):
        arguments["model_parameters"] = optimizer.params
    elif optimizer is not None:
        offloads = plugin.get_value("zero_optimization.offload_optimizer.device") not in (
            None,
            "none",
        )
        if offloads and plugin.get_value("zero_force_ds_cpu_optimizer") is not False:
            former, optimizer = optimizer, map_pytorch_optim_to_deepspeed(optimizer)
            if optimizer is not former:
                # DeepSpeed's check refuses its own Adagrad. Not in the plugin: the next `prepare` reads it there.
                arguments["config"] = {
                    **plugin.deepspeed_config,
                    "zero_force_ds_cpu_optimizer": False,
                }
        arguments["optimizer"] = optimizer
        arguments["config"].setdefault("zero_allow_untested_optimizer", True)
    if callable_ is not None:
        arguments["lr_scheduler"] = callable_
    elif type(scheduler).__name__ in VALID_LR_SCHEDULES:
        arguments["lr_scheduler"] = scheduler
    engine, own_optimizer, _, own_scheduler = deepspeed.initialize(**arguments)
    if optimizer is None:
        wrapped = None
    else:
        wrapped = DeepSpeedOptimizerWrapper(own_optimizer)
    if scheduler is None or own_scheduler is None:
        moved = None
    else:
        moved = DeepSpeedSchedulerWrapper(own_scheduler, wrapped)
    return engine, wrapped, moved


_KEEP = 'Set "zero_force_ds_cpu_optimizer": false in the DeepSpeed config to keep your optimizer.'
# Options of a parameter group that DeepSpeed's optimizers do not have, with the values that change nothing.
_WITHOUT = {"amsgrad": False, "maximize": False, "lr_decay": 0, "initial_accumulator_value": 0}


def map_pytorch_optim_to_deepspeed(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """DeepSpeed's implementation of an optimizer whose states are in host memory.

    Adam, AdamW and Adagrad of torch and of bitsandbytes, and Lion of any package, have one. It has the optimizer's own
    parameter groups, so that schedulers of the optimizer set its learning rates.

    Args:
        optimizer: one that has not stepped yet.

    Returns:
        The optimizer that replaces it. Other optimizers are returned unchanged, and DeepSpeed refuses to offload
        them unless its configuration sets `zero_force_ds_cpu_optimizer` to false.

    Raises:
        PrepareError: an option of the optimizer has no counterpart (`amsgrad`, `maximize`, `lr_decay`).
    """
    kind, package = type(optimizer).__name__, type(optimizer).__module__.partition(".")[0]
    if kind != "Lion" and (
        kind not in ("Adam", "AdamW", "Adagrad") or package not in ("torch", "bitsandbytes")
    ):
        return optimizer
    for group in optimizer.param_groups:
        for name, neutral in _WITHOUT.items():
            if group.get(name, neutral) != neutral:
                raise PrepareError(
                    f"DeepSpeed's {kind} for the CPU does not support {name} (here "
                    f"{group[name]!r}). {_KEEP}"
                )
        # It takes numbers only.
        group["lr"] = float(group["lr"])
    groups: Any = optimizer.param_groups
    replacement: torch.optim.Optimizer
    if kind == "Lion":
        from deepspeed.ops.lion import DeepSpeedCPULion

        replacement = DeepSpeedCPULion(groups)
    elif kind == "Adagrad":
        from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad

        replacement = DeepSpeedCPUAdagrad(groups)
    else:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        decoupled = kind == "AdamW" or bool(optimizer.defaults.get("decoupled_weight_decay"))
        replacement = DeepSpeedCPUAdam(groups, adamw_mode=decoupled)
    parameters = itertools.chain.from_iterable(group["params"] for group in groups)
    if not gradients_of(parameters):
        # Without gradients it does nothing. A scheduler of the optimizer would warn that it never steps.
        optimizer.step()
    return replacement


def _defaults(model: nn.Module, optimizer: object, scheduler: object) -> dict[str, Any]:
    """Values for what a configuration leaves "auto" and the batches do not decide."""
    values: dict[str, Any] = {
        "gradient_clipping": 1.0,
        "zero_optimization.stage3_gather_16bit_weights_on_model_save": False,
    }
    config = getattr(model, "config", None)
    hidden = getattr(config, "hidden_size", None)
    if not hidden:
        hidden = max(getattr(config, "hidden_sizes", None) or [0])
    if hidden:
        values["zero_optimization.reduce_bucket_size"] = hidden * hidden
        values["zero_optimization.stage3_prefetch_bucket_size"] = int(0.9 * hidden * hidden)
        values["zero_optimization.stage3_param_persistence_threshold"] = 10 * hidden
    if isinstance(optimizer, DummyOptim):
        values["optimizer.params.lr"] = optimizer.lr
        values["optimizer.params.weight_decay"] = optimizer.weight_decay
    if isinstance(scheduler, DummyScheduler):
        values["scheduler.params.warmup_min_lr"] = 0
        defaults = getattr(scheduler.optimizer, "defaults", {})
        lr = getattr(scheduler.optimizer, "lr", None) or defaults.get("lr")
        if lr is not None:
            values["scheduler.params.warmup_max_lr"] = lr
        # DeepSpeed from 0.19.6 on refuses a warm-up of 0 steps; one of 1 step starts at the full rate as well.
        values["scheduler.params.warmup_num_steps"] = max(1, scheduler.warmup_num_steps)
        if scheduler.total_num_steps is not None:
            values["scheduler.params.total_num_steps"] = scheduler.total_num_steps
    return values


# Where ZeRO's optimizers keep the fp32 weights that they step: this rank's partition, or all without ZeRO.
_MASTER_WEIGHTS = (
    "fp32_partitioned_groups_flat",
    "single_partition_of_fp32_groups",
    "fp32_groups_flat_partition",
    "fp32_groups_flat",
    "fp32_groups",
)


def engine_bytes(engine: Engine) -> dict[str, int]:
    """Bytes by kind, without the optimizer's state."""
    parameters = list(engine.module.parameters())
    shards = [parameter.ds_tensor for parameter in parameters if hasattr(parameter, "ds_tensor")]
    master_weights = engine_master_weights(engine)
    return {
        figures.PARAMETERS: figures.allocated_bytes([*parameters, *shards]),
        figures.GRADIENTS: _gradients(
            engine, [p for p in parameters if p.requires_grad], master_weights
        ),
        figures.MASTER_WEIGHTS: figures.allocated_bytes(master_weights),
    }


def engine_master_weights(engine: Engine) -> list[torch.Tensor]:
    """The fp32 weights that this rank steps; none where the model's own are stepped."""
    for name in _MASTER_WEIGHTS:
        tensors = figures.tensors_in(getattr(engine.optimizer, name, None))
        if tensors:
            return tensors
    return []


def _gradients(
    engine: Engine, trained: Sequence[torch.Tensor], master_weights: Sequence[torch.Tensor]
) -> int:
    zero, stage = engine.optimizer, int(engine.zero_optimization_stage())
    if stage == 3:
        size = 0
        flat = getattr(zero, "grad_partitions_flat_buffer", None)
        if flat is not None:
            size = int(flat.untyped_storage().nbytes())
        if getattr(zero, "offload_optimizer", False):
            # Offloaded, the host steps on an fp32 copy.
            size += figures.allocated_bytes(master_weights)
        return size
    unsharded = figures.local_bytes(trained)
    if hasattr(zero, "fp32_groups_gradients_flat"):
        # Summed in fp32, and each backward's in the weights' dtype.
        return unsharded + figures.allocated_bytes(zero.fp32_groups_gradients_flat)
    if stage == 0 or not hasattr(zero, "params_in_partition"):
        return unsharded
    width: int = zero.gradient_accumulation_dtype.itemsize
    # Of the parameters that overlap this rank's partition: each of their gradients is kept entirely.
    in_partition = itertools.chain(*zero.params_in_partition)
    partition: int = sum(parameter.numel() for parameter in in_partition) * width
    if getattr(zero, "cpu_offload", False):
        size = figures.allocated_bytes(master_weights)
        if engine.gradient_accumulation_steps() > 1:
            size += partition
        return size
    # Stage 1 keeps what each backward gives until the window ends, stage 2 what this rank will step.
    if stage == 2:
        return partition
    if zero.use_grad_accum_attribute:
        unsharded += sum(p.numel() for p in trained) * width
    return unsharded
