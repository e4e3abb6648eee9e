# SPDX-License-Identifier: Apache-2.0
"""Gradient accumulation: which batch of a window this is, and whether its backward synchronizes gradients."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..core.errors import AccelerateError
from ..optimizer import AcceleratedOptimizer
from ..parallel.prepared import PreparedModel
from ..state import GradientState
from .batch_weights import WeighedBatch

NoSync = Callable[[torch.nn.Module], contextlib.AbstractContextManager[None]]


class Accumulation:
    """Where a run is in its accumulation window.

    Args:
        gradient_state: the shared state.
        exact: a window is the mean over its samples. Otherwise it is the sum of its losses divided by `steps`.

    Attributes:
        step: batches of the present window so far; 0 at the end of a loader, which ends it.
        steps: the batches that it ends with: what was set at its first one.
        samples: with `exact`, its samples so far on all processes. first_samples: those of its first batch.
        batch, loader: with `exact`, the present batch that was counted, and the loader whose batches are.
        scale: with `exact`, the weight of this batch's mean loss relative to that of the first batch.
        factor: with `exact`, what turns the gradients of the window into the mean over its samples, at its end.
        weight: with `exact`, the weight of the last loss in the mean over the ranks.
        is_first: the present batch is the first of its window.
        number: counts the windows.
        postponed: optimizers whose gradients were to be cleared in the last batch of this window, before they stepped.
        models: the models passed to `accumulate` for the present batch.
        is_open: whether a batch has begun and not ended.
        has_backward: whether `accelerator.backward` was called in the latest batch; None if it never was.
        unreduced: models of which earlier batches of the window have left gradients unreduced.
    """

    def __init__(self, gradient_state: GradientState, exact: bool = False) -> None:
        self.gradient_state: GradientState = gradient_state
        self.exact = exact
        self.step: int = 0
        self.steps: int = 1
        self.samples: int = 0
        self.first_samples: int = 0
        self.batch: WeighedBatch | None = None
        self.loader: weakref.ref[Any] | None = None
        self.scale: float = 1.0
        self.factor: float = 1.0
        self.models: tuple[PreparedModel, ...] = ()
        self.is_open: bool = False
        self.has_backward: bool | None = None
        self.unreduced: list[PreparedModel] = []
        self.weight: float = 1.0
        self.is_first: bool = True
        self.number: int = 0
        self.postponed: list[AcceleratedOptimizer] = []

    @property
    def is_unfinished(self) -> bool:
        """Whether the gradients of a window wait for its other batches."""
        return not self.gradient_state.sync_gradients or 0 < self.step < self.steps

    def check_models(self, models: tuple[PreparedModel, ...]) -> None:
        """Raise AccelerateError where the last batch of a window leaves out a model of an earlier one."""
        missing = [model for model in self.unreduced if model not in models]
        self.unreduced.clear()
        if missing:
            raise AccelerateError(
                f"{type(missing[0].inner).__name__} was passed to accumulate in an earlier batch "
                "of this window but not in the last one, so its gradients would not be reduced. "
                "Each accumulate call counts a batch: pass all models to one call, "
                "accelerator.accumulate(first, second)"
            )

    def keeps_gradients(self, optimizer: AcceleratedOptimizer) -> bool:
        """Whether `optimizer.zero_grad()` comes before the step that uses the gradients of this window.

        A loop may clear gradients before its backward, or after its step. If no step follows in this window, they are
        cleared when the next one begins.
        """
        if self.is_first or optimizer.stepped_in == self.number:
            return False
        self.postponed.append(optimizer)
        return True

    def clear_postponed(self) -> None:
        """Clear gradients of the window before, where the loop has left out the step and does not want them."""
        for optimizer in self.postponed:
            if optimizer.stepped_in != self.number - 1:
                optimizer.optimizer.zero_grad()
        self.postponed.clear()

    def check_reduced(self, optimizer: AcceleratedOptimizer) -> None:
        """Raise AccelerateError for a step in the middle of a window, of gradients that differ on each process."""
        for model in self.unreduced:
            if model.trains_with(optimizer.optimizer):
                raise AccelerateError(
                    f"{type(optimizer.optimizer).__name__} steps in the middle of an accumulation "
                    f"window: the gradients of {type(model.inner).__name__} have not been "
                    "averaged, so each process would train a different model. Setting "
                    "sync_gradients = True does not average gradients from earlier backward "
                    "passes. A window ends with the last batch of a prepared loader; to end it "
                    "elsewhere, run the forward and backward pass of its last batch outside "
                    "`accumulate`"
                )

    def weigh(self, batch: WeighedBatch) -> None:
        """Add the samples of the batch that a backward is of, and set its scale.

        A window counts those of one loader. What others yield beside its batches is scaled as they are.
        """
        if self.batch is None and (self.loader is None or self.loader() is batch.loader()):
            self.batch, self.loader = batch, batch.loader
            self.first_samples = self.first_samples or batch.samples
            self.samples += batch.samples
            self.scale = batch.samples / self.first_samples
            if self.gradient_state.sync_gradients:
                self.factor = self.first_samples * self.steps / self.samples

    def take_factor(self) -> float:
        """`factor`, for the first backward that synchronizes. The losses of further ones are weighted with it."""
        factor, self.factor = self.factor, 1.0
        self.scale *= factor
        return factor

    def release(self) -> None:
        """Forget what belongs to the present window."""
        self.unreduced.clear()
        self.postponed.clear()

    def state_dict(self) -> dict[str, int]:
        """The open window: its batches and samples."""
        return {name: getattr(self, name) for name in ("step", "steps", "samples", "first_samples")}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue a window. Its gradients have to be there."""
        self.step = self.samples = self.first_samples = 0
        self.release()
        self.loader = None
        self.__dict__.update(state)


class AccumulatedBatch(contextlib.ContextDecorator):
    """A context for one batch of an accumulation window: only the last one's backward communicates.

    Args:
        window: where the run is in its window.
        models: those that train in this batch.
        no_sync: the run's `no_sync`, which takes the module of a model.
    """

    __slots__ = ("contexts", "models", "no_sync", "window")

    def __init__(
        self, window: Accumulation, models: tuple[PreparedModel, ...], no_sync: NoSync
    ) -> None:
        self.window = window
        self.models = models
        self.no_sync: NoSync = no_sync
        self.contexts: list[contextlib.AbstractContextManager[Any]] = []

    def __enter__(self) -> None:
        """Count the batch, decide whether its backward synchronizes gradients, and enter `no_sync` if it does not.

        Raises:
            AccelerateError: it begins inside of another one, or leaves out a model whose gradients are not reduced.
        """
        window = self.window
        state = window.gradient_state
        options = state.plugin_kwargs
        loader = state.active_dataloader
        is_within = 0 < window.step < window.steps
        if is_within and window.has_backward is False and getattr(loader, "batches_read", 0) == 1:
            # The loop of the pass before was left between the start of a batch and its backward.
            window.step -= 1
            is_within = window.step > 0
        if not is_within:
            window.step, window.steps = 0, options.get("num_steps", 1)
            window.samples = window.first_samples = 0
            window.loader = None
            window.number += 1
            if window.postponed:
                window.clear_postponed()
        window.step += 1
        window.is_first = window.step == 1
        sync = window.step == window.steps
        ends_pass = loader is not None and loader.end_of_dataloader
        if ends_pass and options.get("sync_with_dataloader", True):
            window.step, sync = 0, True
        state.sync_gradients = sync
        if window.steps > 1:
            if window.is_open:
                raise AccelerateError(
                    "accumulate was entered inside accumulate: each call counts a batch, so one "
                    "model would step with unreduced gradients. Pass all models to one call: "
                    "accelerator.accumulate(first, second)"
                )
            if sync:
                window.check_models(self.models)
        window.models = self.models
        window.is_open = True
        window.scale = window.factor = 1.0
        window.batch = None
        if window.has_backward:
            window.has_backward = False
        if sync or options.get("sync_each_batch", False):
            return
        for model in self.models:
            reduces = isinstance(model.no_sync(), contextlib.nullcontext)
            context = self.no_sync(model.module)
            context.__enter__()
            if not reduces and model not in window.unreduced:
                window.unreduced.append(model)
            self.contexts.append(context)

    def __exit__(self, *error: Any) -> None:
        self.window.models = ()
        self.window.is_open = False
        while self.contexts:
            self.contexts.pop().__exit__(*error)
