# SPDX-License-Identifier: Apache-2.0
"""The prepared learning-rate scheduler: it steps when the optimizer has really stepped, once for each process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch.optim import lr_scheduler

from .core.lazy import public_names
from .logging import get_logger
from .runtime.mesh import count_data_shards
from .state import AcceleratorState, GradientState

_logger = get_logger(__name__)


# Schedules that stay as they are, or raise an error, after the steps that they were made for.
_WITH_END = (lr_scheduler.OneCycleLR, lr_scheduler.CosineAnnealingLR, lr_scheduler.LinearLR)


class AcceleratedScheduler:
    """A prepared learning rate scheduler.

    A schedule is written for the steps of one process. With N processes that each read a batch, one step covers N
    times the samples, so the schedule steps N times. With `split_batches` it steps once. Processes that read the same
    samples (tensor, context and pipeline parallelism) count as one. A call with a value (the metric of
    `ReduceLROnPlateau`, an epoch) is one step on any number of processes.

    `Accelerator.prepare` creates it. Every other attribute is that of the wrapped scheduler.

    Attributes:
        steps_per_call: steps of the schedule in a call without a value.

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
        if not isinstance(optimizers, (list, tuple)):
            optimizers = [optimizers]
        self.optimizers: Sequence[Any] = optimizers
        self.step_with_optimizer = step_with_optimizer
        self.split_batches = split_batches
        self.gradient_state: GradientState = GradientState()
        state = AcceleratorState()
        self.steps_per_call: int = 1
        if not split_batches:
            self.steps_per_call = count_data_shards(state.parallelism_config, state.num_processes)
        # that count towards the end of a schedule (`adjust_scheduler`)
        self._batches_without_step = 0
        self._calls = self._calls_past_end = 0
        self._has_end = isinstance(scheduler, _WITH_END)
        self._early_end_reported = False

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
                self._batches_without_step += 1
            return
        for optimizer in self.optimizers:
            if optimizer.step_was_skipped:
                return
        steps = self.steps_per_call
        if (args or kwargs) and any(value is not None for value in (*args, *kwargs.values())):
            steps = 1
        elif self._has_end:
            self._report_early_end()
        # A schedule with an end (OneCycleLR) raises beyond it, and the last global step may go past it.
        total = getattr(self.scheduler, "total_steps", None)
        for _ in range(steps):
            if total is None or self.scheduler.last_epoch + self._batches_without_step < total:
                self.scheduler.step(*args, **kwargs)

    def _report_early_end(self) -> None:
        """Warn once, before a step, where a schedule has ended and the loop goes on."""
        schedule, end = self.scheduler, None
        if isinstance(schedule, lr_scheduler.OneCycleLR):
            end = schedule.total_steps - self._batches_without_step
        elif self.steps_per_call > 1 and isinstance(schedule, lr_scheduler.CosineAnnealingLR):
            end = schedule.T_max
        elif self.steps_per_call > 1 and schedule.end_factor < schedule.start_factor:
            end = schedule.total_iters
        self._calls += 1
        if end is None or schedule.last_epoch < end:
            return
        self._calls_past_end += 1
        # The last step of an epoch may be filled: a run has up to one call more for each epoch than its schedule.
        epoch = getattr(self.gradient_state.active_dataloader, "iteration", 0)
        if self._calls_past_end > 1 + epoch and not self._early_end_reported:
            self._early_end_reported = True
            _logger.warning(
                f"{type(schedule).__name__} ended at step {end} of its schedule, after "
                f"{self._calls - self._calls_past_end} calls in this run, but the loop continues: "
                f"each call advances it by {self.steps_per_call}. Give it as many steps as one "
                "process would need for all data, or pass step_scheduler_with_optimizer=False to "
                "Accelerator to advance it by one"
            )

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
