# SPDX-License-Identifier: Apache-2.0
"""The API's views of a DeepSpeed engine, and stand-ins for an optimizer and a schedule that its configuration defines.

The engine steps by itself: what the user's loop calls on these wrappers must not step again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..optimizer import AcceleratedOptimizer
from ..scheduler import AcceleratedScheduler


class DeepSpeedEngineWrapper:
    """The backward of a DeepSpeed engine, which also steps where the accumulation window ends."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def backward(self, loss: torch.Tensor, sync_gradients: bool = True, **kwargs: Any) -> None:
        """Backward through the engine; with `sync_gradients` also reduction, optimizer, schedule and zeroing."""
        # The engine counts micro-batches itself. The window is the accelerator's to decide, so it is told.
        self.engine.set_gradient_accumulation_boundary(is_boundary=sync_gradients)
        self.engine.backward(loss, **kwargs)
        if sync_gradients:
            self.engine.step()

    def get_global_grad_norm(self) -> float | None:
        """The total norm of the gradients of the last step, over all ranks and before clipping; None before one."""
        norm = self.engine.get_global_grad_norm()
        return norm.item() if isinstance(norm, torch.Tensor) else norm


class DeepSpeedOptimizerWrapper(AcceleratedOptimizer):
    """The optimizer inside an engine. `step` and `zero_grad` do nothing: the engine has done both in `backward`."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer, device_placement=False, scaler=None)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Nothing: the engine forgets the gradients after its step."""

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Nothing: the engine has stepped. Raises TypeError for a closure, which the engine cannot call."""
        if closure is not None:
            raise TypeError("a DeepSpeed engine takes no closure: it has stepped in accelerator.backward already")

    @property
    def step_was_skipped(self) -> bool:
        """Whether the engine left the last step out because gradients were not finite (fp16)."""
        return bool(getattr(self.optimizer, "overflow", False))


class DeepSpeedSchedulerWrapper(AcceleratedScheduler):
    """The schedule inside an engine. `step` does nothing: the engine moves it with its own step."""

    def __init__(self, scheduler: Any, optimizers: Any) -> None:
        super().__init__(scheduler, optimizers)

    def step(self) -> None:
        """Nothing: the engine moves the schedule."""


class DummyOptim:
    """Stands for the optimizer that the `optimizer` section of a DeepSpeed configuration defines.

    `lr`, `weight_decay` and the further arguments fill the section's "auto" values.
    """

    def __init__(self, params: Any, lr: float = 0.001, weight_decay: float = 0, **kwargs: Any) -> None:
        self.params = params
        self.lr = lr
        self.weight_decay = weight_decay
        self.kwargs = kwargs


class DummyScheduler:
    """Stands for the schedule that the `scheduler` section of a DeepSpeed configuration defines.

    `total_num_steps` and `warmup_num_steps` fill its "auto" values; `lr_scheduler_callable(optimizer)` makes a
    schedule of torch's instead.
    """

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int | None = None,
        warmup_num_steps: int = 0,
        lr_scheduler_callable: Callable[[Any], Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.optimizer = optimizer
        self.total_num_steps = total_num_steps
        self.warmup_num_steps = warmup_num_steps
        self.lr_scheduler_callable = lr_scheduler_callable
        self.kwargs = kwargs
