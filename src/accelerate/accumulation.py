# SPDX-License-Identifier: Apache-2.0
"""Gradient accumulation: which batch of a window this is, and whether its backward synchronizes gradients."""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

from .core.errors import AccelerateError
from .parallel.prepared import PreparedModel
from .state import GradientState


class Accumulation:
    """Where a run is in its accumulation window.

    Attributes:
        step: batches of the present window so far.
        models: the models passed to `accumulate` for the present batch.
        is_open: whether a batch has begun and not ended.
        unreduced: models of which earlier batches of the window have left gradients unreduced.
    """

    __slots__ = ("gradient_state", "is_open", "models", "step", "unreduced")

    def __init__(self, gradient_state: GradientState) -> None:
        self.gradient_state: GradientState = gradient_state
        self.step: int = 0
        self.models: tuple[PreparedModel, ...] = ()
        self.is_open: bool = False
        self.unreduced: weakref.WeakSet[PreparedModel] = weakref.WeakSet()

    def check_nesting(self) -> None:
        """Raise AccelerateError for a batch inside of another one, which the window would count twice."""
        if self.is_open and self.gradient_state.num_steps > 1:
            raise AccelerateError(
                "accumulate was entered inside of accumulate: each counts a batch, so that one model would step with "
                "unreduced gradients. Pass all models to one: accelerator.accumulate(first, second)"
            )

    def check_models(self, models: tuple[PreparedModel, ...]) -> None:
        """Raise AccelerateError where the last batch of a window leaves out a model of an earlier one."""
        missing = [model for model in self.unreduced if model not in models]
        self.unreduced.clear()
        if missing:
            raise AccelerateError(
                f"{type(missing[0].inner).__name__} was passed to accumulate in an earlier batch of this window and "
                "not in its last one, so its gradients would stay unreduced. Each accumulate counts a batch: pass "
                "all models to one, accelerator.accumulate(first, second)"
            )

    def advance(self) -> bool:
        """Count a batch. Returns whether its backward synchronizes gradients."""
        state = self.gradient_state
        options = state.plugin_kwargs
        if options.get("sync_with_dataloader", True) and state.end_of_dataloader:
            self.step = 0
            sync = True
        else:
            steps = options.get("num_steps", 1)
            if self.unreduced and self.step % steps == 0:
                # Of a window that was given up: `step` was set.
                self.unreduced.clear()
            self.step += 1
            sync = self.step % steps == 0
        state.sync_gradients = sync
        return sync


class AccumulatedBatch:
    """A context for one batch of an accumulation window: only the last one's backward communicates."""

    __slots__ = ("accumulation", "contexts", "models")

    def __init__(self, accumulation: Accumulation, models: tuple[PreparedModel, ...]) -> None:
        self.accumulation: Accumulation = accumulation
        self.models: tuple[PreparedModel, ...] = models
        self.contexts: list[contextlib.AbstractContextManager[Any]] = []

    def __enter__(self) -> None:
        accumulation = self.accumulation
        accumulation.check_nesting()
        sync = accumulation.advance()
        if sync and accumulation.unreduced:
            accumulation.check_models(self.models)
        accumulation.models = self.models
        accumulation.is_open = True
        if not sync and not accumulation.gradient_state.plugin_kwargs.get("sync_each_batch", False):
            for model in self.models:
                context = model.no_sync()
                context.__enter__()
                if not isinstance(context, contextlib.nullcontext):
                    accumulation.unreduced.add(model)
                self.contexts.append(context)

    def __exit__(self, *error: Any) -> None:
        self.accumulation.models = ()
        self.accumulation.is_open = False
        while self.contexts:
            self.contexts.pop().__exit__(*error)
