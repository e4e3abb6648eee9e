# SPDX-License-Identifier: Apache-2.0
"""`MainLoop`: what a run itself does at each event of its loop, in order. Observers are told after that."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from ..core.errors import ConfigurationError
from ..core.observers import RunLoop
from ..gradient_state import GradientState
from ..optimizer import AcceleratedOptimizer
from ..parallel.base import Strategy
from ..parallel.items import ItemWindow
from ..runtime.step_exchange import StepExchange
from ..torch_internals.grad_scaler import SCALER_CHECKS
from .accumulation import Accumulation
from .batch_weights import BatchWeights
from .checkpoints import ResumeController
from .non_finite import NonFiniteGuard
from .objects import RunObjects
from .preemption import StopController


class MainLoop(RunLoop):
    """The loop of one run. It resumes and stops the run, refuses wrong steps, and moves what follows the steps.

    Loaders and optimizers refer to it, so its reference to the prepared objects is weak.

    Args:
        objects: the prepared objects.
        accumulation: the accumulation window.
        weights: with `exact`, the weights of batches.
        strategy: the layout.
        items: the accumulation window of backwards with `num_items`.
        guard: leaves steps out, with `Accelerator(non_finite=...)`.
        controller: resumes the run.
        stopper: stops the run.
        exchange: by which the ranks agree on the step after which they stop.
    """

    def __init__(
        self,
        objects: RunObjects,
        accumulation: Accumulation,
        weights: BatchWeights | None,
        strategy: Strategy,
        items: ItemWindow,
        guard: NonFiniteGuard | None,
        controller: ResumeController,
        stopper: StopController,
        exchange: StepExchange,
    ) -> None:
        super().__init__()
        self._objects = weakref.ref(objects)
        self._accumulation = accumulation
        self._weights = weights
        self.strategy = strategy
        self._items = items
        self._guard = guard
        self._controller = controller
        self._stopper = stopper
        self._exchange = exchange
        # Whether a prepared optimizer has stepped.
        self._steps_are_seen = False

    # -- passes over a loader

    def before_pass(self, loader: Any) -> None:
        """Do a pending resume."""
        self._controller.resume_if_pending()
        for observer in self.active:
            observer.before_pass(loader)

    def batch(self, loader: Any, data: Any) -> None:
        """With `exact`, note the weight of the batch."""
        if self._weights is not None:
            self._weights.add(loader, data)
        if self._exchange.is_watching:
            self._stopper.begin_batch(loader)
        for observer in self.active:
            observer.batch(loader, data)

    def end_batch(self, loader: Any) -> None:
        """Stop the run where a signal requests it."""
        if self._exchange.is_watching:
            self._stopper.end_batch(loader)
        for observer in self.active:
            observer.end_batch(loader)

    def before_collective(self) -> None:
        """Stop an evaluation where a signal requests it."""
        if self._exchange.is_watching:
            self._stopper.stop_if_whole()

    # -- the step

    def after_backward(self, loss: torch.Tensor, num_items: Any) -> None:
        """Add the loss to those that decide about the next step.

        In a run whose steps are not seen, because its optimizer was not prepared, it counts as the step.
        """
        if self._guard is not None:
            self._guard.add_loss(loss, num_items)
        if not self._steps_are_seen and GradientState().sync_gradients:
            self._stopper.record_step()
            if self._exchange.is_watching:
                self._exchange.step()
        for observer in self.active:
            observer.after_backward(loss, num_items)

    def keeps_gradients(self, optimizer: AcceleratedOptimizer) -> bool:
        """Whether the step that uses the gradients is still to come in this window."""
        return self._accumulation.keeps_gradients(optimizer)

    def after_zero_grad(self, optimizer: AcceleratedOptimizer) -> None:
        """Clear what the layout of a model keeps elsewhere."""
        objects = self._objects()
        if objects is not None:
            for prepared in objects.models:
                prepared.drop_waiting_gradients(optimizer.optimizer)

    def before_step(
        self, optimizer: AcceleratedOptimizer, closure: Callable[[], Any] | None
    ) -> bool:
        """Raise for a step that would train wrongly, and ask the guard whether it is left out.

        Returns:
            Whether the optimizer may step.

        Raises:
            ConfigurationError: a pending resume was not done.
            PrepareError: of parameters added to a model, of a closure with `non_finite`, of averages.
            AccelerateError: of gradients that were not averaged.
        """
        if self._accumulation.unreduced:
            self._accumulation.check_reduced(optimizer)
        # A closure clears gradients inside of the step.
        optimizer.stepped_in = self._accumulation.number
        objects = self._objects()
        if objects is not None:
            if optimizer.has_new_groups:
                objects.refuse_new_parameters(optimizer)
            for average in objects.averages:
                average.check_not_applied()
        if optimizer.steps_made == 0:
            if self._controller.is_pending:
                raise ConfigurationError(
                    "resume='auto' loads when a prepared loader is first read, but an optimizer "
                    "stepped before that: read `accelerator.resumed` before the loop"
                )
            self._stopper.record_step()
        self._steps_are_seen = True
        self._stopper.is_in_step = True
        for observer in self.active:
            observer.before_step(optimizer, closure)
        if self._guard is None:
            return True
        self._guard.check_closure(closure)
        return not self._guard.leaves_out(optimizer)

    def after_scaled_step(self, optimizer: AcceleratedOptimizer) -> None:
        """Update the loss scale after the last optimizer of the step, since the gradients of all have the same one.

        If some of them do not step, it is updated before the next backward.
        """
        optimizer.awaits_scale = True
        optimizers = self._scaled_optimizers()
        if SCALER_CHECKS.is_on and not all(other.awaits_scale for other in optimizers):
            return
        for stepped in (optimizer, *optimizers):
            stepped.awaits_scale = False
        super().after_scaled_step(optimizer)

    def update_scale(self) -> None:
        """Update the loss scale, if an optimizer has stepped since the last update."""
        if self.strategy.precision.scaler is None:
            return
        waiting = [other for other in self._scaled_optimizers() if other.awaits_scale]
        for other in waiting:
            other.awaits_scale = False
        if waiting:
            super().after_scaled_step(waiting[0])

    def _scaled_optimizers(self) -> list[AcceleratedOptimizer]:
        objects = self._objects()
        if objects is None:
            return []
        return [optimizer for optimizer in objects.optimizers if optimizer.scaler is not None]

    def weighted(self, loss: Any) -> Any:
        """The loss that a closure returns, times the weight that its backward had."""
        weight = self._accumulation.weight
        if loss is None or weight == 1.0:
            return loss
        if weight == 0.0:
            # The mean over a placeholder may not be finite.
            return torch.zeros_like(torch.as_tensor(loss))
        return loss * weight

    def after_step(self, optimizer: AcceleratedOptimizer) -> None:
        """Do what the layout does after a step, end the window of items, update averages, exchange signals."""
        for call in self.strategy.after_step:
            call()
        self._stopper.is_in_step = False
        self._items.spent = False
        objects = self._objects()
        if objects is not None:
            for average in objects.averages:
                average.after_step(optimizer)
        if self._exchange.is_watching:
            self._stopper.record_step()
            self._exchange.step()
        for observer in self.active:
            observer.after_step(optimizer)
