# SPDX-License-Identifier: Apache-2.0
"""The scheduler that follows the optimizer: it moves when the step was really taken, once per process."""

from __future__ import annotations

from typing import Any

from .runtime.mesh import count_data_shards
from .state import AcceleratorState, GradientState


class AcceleratedScheduler:
    """A prepared learning-rate scheduler.

    A schedule is written for the steps of one process. With N processes each of which reads a whole batch a step
    covers N times the samples, so the schedule moves N times; with `split_batches` it moves once. Processes that read
    the same samples (tensor, context and pipeline parallelism) count as one.

    Args:
        scheduler: the user's own. optimizers: the prepared optimizer or optimizers that it belongs to.
        step_with_optimizer: move only when they step. split_batches: see above.
    """

    def __init__(
        self,
        scheduler: Any,
        optimizers: Any,
        step_with_optimizer: bool = True,
        split_batches: bool = False,
    ) -> None:
        self.scheduler = scheduler
        self.optimizers = optimizers if isinstance(optimizers, (list, tuple)) else [optimizers]
        self.step_with_optimizer = step_with_optimizer
        self.split_batches = split_batches
        self.gradient_state = GradientState()
        # Decided here: a step asks nothing that cannot change.
        state = AcceleratorState()
        self._moves = 1 if split_batches else count_data_shards(state.parallelism_config, state.num_processes)
        # A schedule with an end (OneCycleLR) raises beyond it, and the last global step may reach past it.
        self._ends = hasattr(scheduler, "total_steps")

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Move the schedule, if this batch ends a window and no optimizer left its step out."""
        if not self.step_with_optimizer:
            self.scheduler.step(*args, **kwargs)
            return
        if not self.gradient_state.sync_gradients:
            if self.gradient_state.adjust_scheduler:
                self.scheduler._step_count += 1
            return
        for optimizer in self.optimizers:
            if optimizer.step_was_skipped:
                return
        for _ in range(self._moves):
            if not self._ends or self.scheduler._step_count <= self.scheduler.total_steps:
                self.scheduler.step(*args, **kwargs)

    def get_last_lr(self) -> list[float]:
        return self.scheduler.get_last_lr()

    def state_dict(self) -> dict[str, Any]:
        return self.scheduler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.scheduler.load_state_dict(state_dict)

    def get_lr(self) -> Any:
        return self.scheduler.get_lr()

    def print_lr(self, *args: Any, **kwargs: Any) -> Any:
        return self.scheduler.print_lr(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":
            raise AttributeError(name)
        return getattr(self.scheduler, name)
