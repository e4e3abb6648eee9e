# SPDX-License-Identifier: Apache-2.0
"""The prepared learning-rate scheduler: it steps when the optimizer has really stepped, once for each process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .core.lazy import public_names
from .runtime.mesh import count_data_shards
from .state import AcceleratorState, GradientState


class AcceleratedScheduler:
    """A prepared learning-rate scheduler.

    A schedule is written for the steps of one process. With N processes that each read a batch, one step covers N
    times the samples, so the schedule steps N times. With `split_batches` it steps once. Processes that read the same
    samples (tensor, context and pipeline parallelism) count as one.

    `Accelerator.prepare` makes it. Every other attribute is that of the wrapped scheduler.

    Args:
        scheduler: the wrapped scheduler.
        optimizers: the prepared optimizer, or a list of them, that it belongs to.
        step_with_optimizer: step only when they do.
        split_batches: the processes share each batch, instead of reading one each.

    Example:
        optimizer, scheduler = accelerator.prepare(optimizer, scheduler)
        scheduler.step()
    """

    _is_accelerate_prepared = True

    def __init__(
        self,
        scheduler: Any,
        optimizers: Any,
        step_with_optimizer: bool = True,
        split_batches: bool = False,
    ) -> None:
        self.scheduler = scheduler
        self.optimizers: Sequence[Any] = optimizers if isinstance(optimizers, (list, tuple)) else [optimizers]
        self.step_with_optimizer = step_with_optimizer
        self.split_batches = split_batches
        self.gradient_state: GradientState = GradientState()
        state = AcceleratorState()
        self._steps_per_call = 1 if split_batches else count_data_shards(state.parallelism_config, state.num_processes)
        # A schedule with an end (OneCycleLR) raises beyond it, and the last global step may go past it.
        self._has_end = hasattr(scheduler, "total_steps")

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step the schedule if this batch ends an accumulation window and no optimizer skipped its step.

        Args:
            *args: passed to the wrapped scheduler's `step`.
            **kwargs: passed to the wrapped scheduler's `step`.
        """
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
        for _ in range(self._steps_per_call):
            if not self._has_end or self.scheduler._step_count <= self.scheduler.total_steps:
                self.scheduler.step(*args, **kwargs)

    def get_last_lr(self) -> list[float]:
        """The present learning rate of each parameter group."""
        rates: list[float] = self.scheduler.get_last_lr()
        return rates

    def state_dict(self) -> dict[str, Any]:
        """The state of the wrapped scheduler."""
        state: dict[str, Any] = self.scheduler.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of the wrapped scheduler."""
        self.scheduler.load_state_dict(state_dict)

    def get_lr(self) -> Any:
        """The learning rates that the wrapped scheduler computes for its step."""
        return self.scheduler.get_lr()

    def print_lr(self, *args: Any, **kwargs: Any) -> Any:
        """Call `print_lr` of the wrapped scheduler."""
        return self.scheduler.print_lr(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":
            raise AttributeError(name)
        return getattr(self.scheduler, name)


if not TYPE_CHECKING:
    __getattr__ = public_names(__name__)
