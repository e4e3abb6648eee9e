# SPDX-License-Identifier: Apache-2.0
"""`RunObserver`, the interface of what watches a run, and `RunLoop`, which loaders and optimizers report to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class RunObserver:
    """Is told what happens in a run. Every method does nothing, so that an observer has only those that it needs.

    A loader, optimizer or model is always the one that `prepare` returned.
    """

    def after_prepare(self, prepared: Any) -> None:
        """A model to train (its `PreparedModel`) or an optimizer was prepared."""

    def before_pass(self, loader: Any) -> None:
        """A pass over a loader is set up, or a loader of the rest of one; this may still change the position."""

    def begin_pass(self, loader: Any) -> None:
        """A pass over a loader begins."""

    def batch(self, loader: Any, data: Any) -> None:
        """A loader has read a batch and is about to yield it."""

    def end_batch(self, loader: Any) -> None:
        """The loop has used a batch and requests the next one."""

    def end_pass(self, loader: Any) -> None:
        """A pass over a loader has ended, complete or not."""

    def before_backward(self, loss: Any, num_items: Any) -> None:
        """`accelerator.backward` was called."""

    def after_backward(self, loss: Any, num_items: Any) -> None:
        """`accelerator.backward` has computed the gradients. `loss` is the argument; it is not divided or scaled."""

    def after_clip(self, norm: Any, seconds: float) -> None:
        """`accelerator.clip_grad_norm_` has returned this norm, and took so long."""

    def after_collective(self, seconds: float) -> None:
        """A collective of the accelerator (`gather`, `reduce`, `wait_for_everyone`, ...) has ended."""

    def before_step(self, optimizer: Any, closure: Callable[[], Any] | None) -> None:
        """An optimizer is about to step."""

    def after_step(self, optimizer: Any) -> None:
        """An optimizer has stepped, and the gradients have been used."""

    def before_save(self) -> None:
        """The run is about to be saved."""

    def saved(self, path: str, step: int, seconds: float) -> None:
        """The run was saved at a step, or is written in the background; the loop waited for `seconds`."""

    def before_load(self) -> None:
        """A checkpoint is about to be loaded."""

    def loaded(self, path: str, step: int, seconds: float) -> None:
        """The run continues after `step` optimizer steps."""

    def released(self) -> None:
        """`free_memory` has released what was prepared."""

    def close(self) -> None:
        """The run has ended."""


class RunLoop:
    """What loaders and optimizers call at the events of their loop. It tells the observers of the run.

    This class is the loop of objects that no accelerator has prepared. `accelerate.run.loop.MainLoop` adds what a run
    itself does at these events.

    Attributes:
        active: the observers that are told. An event of a run without any costs one test of this tuple.
    """

    def __init__(self) -> None:
        self.active: tuple[RunObserver, ...] = ()

    def add(self, observer: RunObserver) -> None:
        """Tell an observer too, from the next event on."""
        if observer not in self.active:
            self.active = (*self.active, observer)

    def remove(self, observer: RunObserver) -> None:
        """Tell an observer nothing more. It may call this itself, in an event."""
        self.active = tuple(other for other in self.active if other is not observer)

    def before_pass(self, loader: Any) -> None:
        """A pass over a loader is set up."""
        for observer in self.active:
            observer.before_pass(loader)

    def begin_pass(self, loader: Any) -> None:
        """A pass over a loader begins."""
        for observer in self.active:
            observer.begin_pass(loader)

    def batch(self, loader: Any, data: Any) -> None:
        """A loader is about to yield a batch."""
        for observer in self.active:
            observer.batch(loader, data)

    def end_batch(self, loader: Any) -> None:
        """The loop has used a batch."""
        for observer in self.active:
            observer.end_batch(loader)

    def end_pass(self, loader: Any) -> None:
        """A pass over a loader has ended."""
        for observer in self.active:
            observer.end_pass(loader)

    def before_collective(self) -> None:
        """A collective of the accelerator is about to begin."""

    def keeps_gradients(self, optimizer: Any) -> bool:
        """Whether gradients that are to be cleared belong to a step that is still to come."""
        return False

    def after_zero_grad(self, optimizer: Any) -> None:
        """An optimizer has cleared the gradients that it knows."""

    def before_step(self, optimizer: Any, closure: Callable[[], Any] | None) -> bool:
        """An optimizer is about to step. Returns whether it may: all ranks decide alike."""
        for observer in self.active:
            observer.before_step(optimizer, closure)
        return True

    def after_scaled_step(self, optimizer: Any) -> None:
        """An optimizer has stepped through the gradient scaler, or skipped that step: update the scale."""
        optimizer.scaler.update()

    def update_scale(self) -> None:
        """Update the loss scale, if an optimizer has stepped since the last update."""

    def weighted(self, loss: Any) -> Any:
        """The loss that a closure returns, with the weight of this rank in the mean over all."""
        return loss

    def after_step(self, optimizer: Any) -> None:
        """An optimizer has stepped."""
        for observer in self.active:
            observer.after_step(optimizer)


# That of a loader or optimizer that no accelerator has prepared.
NO_LOOP: RunLoop = RunLoop()
