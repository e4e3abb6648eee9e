# SPDX-License-Identifier: Apache-2.0
"""Gradient accumulation: which batch of a window this is, and whether its backward synchronizes gradients."""

from __future__ import annotations

import contextlib
from typing import Any

from .parallel.prepared import PreparedModel
from .state import GradientState


class Accumulation:
    """Where a run is in its accumulation window.

    Attributes:
        step: batches of the present window so far.
        models: the models passed to `accumulate` for the present batch.
    """

    __slots__ = ("gradient_state", "models", "step")

    def __init__(self, gradient_state: GradientState) -> None:
        self.gradient_state: GradientState = gradient_state
        self.step: int = 0
        self.models: tuple[PreparedModel, ...] = ()

    def advance(self) -> bool:
        """Count a batch. Returns whether its backward synchronizes gradients."""
        state = self.gradient_state
        options = state.plugin_kwargs
        if options.get("sync_with_dataloader", True) and state.end_of_dataloader:
            self.step = 0
            sync = True
        else:
            self.step += 1
            sync = self.step % options.get("num_steps", 1) == 0
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
        sync = accumulation.advance()
        accumulation.models = self.models
        if not sync and not accumulation.gradient_state.plugin_kwargs.get("sync_each_batch", False):
            for model in self.models:
                context = model.no_sync()
                context.__enter__()
                self.contexts.append(context)

    def __exit__(self, *error: Any) -> None:
        self.accumulation.models = ()
        while self.contexts:
            self.contexts.pop().__exit__(*error)
