# SPDX-License-Identifier: Apache-2.0
"""What one call of `prepare` gives for a DeepSpeed engine, and what is refused of it: one table, run first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...config.deepspeed import DeepSpeedPlugin
from ...core.errors import ConfigurationError, PrepareError
from ...state import GradientState
from ..optimizer_step import check_flat_shards
from ..placeholders import DummyOptim, DummyScheduler
from .engine import DeepSpeedOptimizerWrapper, is_engine

_BATCH = "train_micro_batch_size_per_gpu"


@dataclass(frozen=True)
class EngineRequest:
    """The objects of one call of `prepare` that make an engine.

    Fields:
        plugin: the selected plugin.
        batch_sizes: those of the loaders, of one process.
    """

    plugin: DeepSpeedPlugin
    models: Sequence[nn.Module]
    optimizers: Sequence[Any]
    schedulers: Sequence[Any]
    batch_sizes: Sequence[int] = ()

    @classmethod
    def of(
        cls, plugin: DeepSpeedPlugin, objects: Sequence[object], split_batches: bool
    ) -> EngineRequest:
        """The request of a call; objects that are prepared already are left out."""
        from deepspeed.runtime.lr_schedules import VALID_LR_SCHEDULES

        models: list[nn.Module] = []
        optimizers: list[Any] = []
        schedulers: list[Any] = []
        batch_sizes: list[int] = []
        for obj in objects:
            if isinstance(obj, nn.Module) and not is_engine(obj):
                models.append(obj)
            elif isinstance(obj, torch.optim.Optimizer | DummyOptim):
                if not isinstance(obj, DeepSpeedOptimizerWrapper):
                    optimizers.append(obj)
            elif isinstance(obj, torch.optim.lr_scheduler.LRScheduler | DummyScheduler) or (
                type(obj).__name__ in VALID_LR_SCHEDULES
            ):
                schedulers.append(obj)
            elif isinstance(obj, torch.utils.data.DataLoader):
                size = obj.batch_size
                if size is None:
                    size = getattr(obj.batch_sampler, "batch_size", None)
                if not isinstance(size, int):
                    continue
                if split_batches:
                    size = max(1, size // dist.get_world_size())
                batch_sizes.append(size)
        return cls(plugin, models, optimizers, schedulers, batch_sizes)

    @property
    def optimizer(self) -> Any:
        """The optimizer or its placeholder; None without one."""
        if self.optimizers:
            return self.optimizers[0]
        return None

    @property
    def scheduler(self) -> Any:
        """The scheduler or its placeholder; None without one."""
        if self.schedulers:
            return self.schedulers[0]
        return None

    @property
    def stage(self) -> int:
        """The stage of ZeRO; 0 without."""
        return int(self.plugin.get_value("zero_optimization.stage", 0))

    @property
    def micro_batch_size(self) -> int:
        """Samples of one process and backward, from the config or else the loaders."""
        configured = self.plugin.get_value(_BATCH, "auto")
        if configured != "auto":
            return int(configured)
        return (min if self.plugin.is_train_batch_min else max)(self.batch_sizes)

    @property
    def accumulation_by_accelerator(self) -> bool:
        """Whether the Accelerator, and not the config, says how many backwards a window has."""
        configured = self.plugin.get_value("gradient_accumulation_steps", "auto")
        return configured == "auto" or (
            self.plugin.accumulation_by_default and GradientState().num_steps != 1
        )


def _several(request: EngineRequest) -> None:
    for kind in ("models", "optimizers", "schedulers"):
        count = len(getattr(request, kind))
        if count > 1:
            raise PrepareError(
                f"prepare() got {count} {kind}: a DeepSpeed engine has one. Create an Accelerator "
                "for each model that trains, with deepspeed_plugins={name: plugin, ...}"
            )


def _batch_size(request: EngineRequest) -> None:
    configured = request.plugin.get_value(_BATCH, "auto")
    sizes = request.batch_sizes
    if configured == "auto" and not sizes:
        raise PrepareError(
            "When using DeepSpeed, `accelerate.prepare()` requires you to pass at least one of training or evaluation "
            f"dataloaders with `batch_size` attribute returning an integer value, or set an integer value for "
            f"`{_BATCH}` in the DeepSpeed config file, or assign one to "
            f"`AcceleratorState().deepspeed_plugin.deepspeed_config['{_BATCH}']`."
        )
    elif sizes and configured not in ("auto", *sizes):
        raise ConfigurationError(
            f"the DeepSpeed config has {_BATCH}={configured}, but the loaders have batches of "
            f"{', '.join(map(str, sizes))} per process: make them equal, or set it to auto"
        )


def _accumulation(request: EngineRequest) -> None:
    configured = request.plugin.get_value("gradient_accumulation_steps", "auto")
    steps = GradientState().num_steps
    if not request.accumulation_by_accelerator and steps not in (1, configured):
        raise ConfigurationError(
            f"the DeepSpeed config has gradient_accumulation_steps={configured}, but Accelerator "
            f"has {steps}: make them equal, or set it to auto"
        )


def _no_optimizer(request: EngineRequest) -> None:
    has_optimizer = request.optimizer or request.plugin.get_value("optimizer")
    if not has_optimizer and request.stage in (1, 2):
        raise PrepareError(
            f"ZeRO stage {request.stage} needs an optimizer: pass it to the same call of "
            "prepare(), or use stage 3 (or 0) for a model that does not train"
        )


def _entire_tensors(request: EngineRequest) -> None:
    flattens = request.stage > 0 or request.plugin.get_value("bf16.enabled", False)
    if flattens and isinstance(request.optimizer, torch.optim.Optimizer):
        check_flat_shards(
            request.optimizer,
            f"DeepSpeed (ZeRO stage {request.stage})",
            "use an fsdp_plugin with fsdp_version=2 instead of the deepspeed_plugin",
        )


def _twice_or_nowhere(request: EngineRequest) -> None:
    entries: list[tuple[str, Any, type]] = [("optimizer", request.optimizer, DummyOptim)]
    if getattr(request.scheduler, "lr_scheduler_callable", None) is None:
        entries.append(("scheduler", request.scheduler, DummyScheduler))
    for name, value, placeholder in entries:
        is_configured = request.plugin.get_value(name) is not None
        if is_configured and value is not None and not isinstance(value, placeholder):
            raise PrepareError(
                f"the DeepSpeed config has a `{name}` and a {type(value).__name__} is passed as "
                f"well: remove it from the config, or pass accelerate.utils.{placeholder.__name__}"
            )
        if isinstance(value, placeholder) and not is_configured:
            raise PrepareError(
                f"{placeholder.__name__} stands for the `{name}` of a DeepSpeed config, which "
                f"does not have one: add it there, or pass a real {name}"
            )


REQUIREMENTS: tuple[Callable[[EngineRequest], None], ...] = (
    _several,
    _batch_size,
    _accumulation,
    _no_optimizer,
    _entire_tensors,
    _twice_or_nowhere,
)


def check(request: EngineRequest) -> None:
    """Raises PrepareError or ConfigurationError for objects that cannot make one engine."""
    for requirement in REQUIREMENTS:
        requirement(request)
