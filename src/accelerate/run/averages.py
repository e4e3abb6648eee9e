# SPDX-License-Identifier: Apache-2.0
"""Averages of the weights of a prepared model (EMA, SWA), in the layout of the model."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim.swa_utils import get_ema_multi_avg_fn, get_swa_multi_avg_fn

from ..core.errors import CheckpointError, ConfigurationError, PrepareError
from ..core.modules import class_name
from ..optimizer import AcceleratedOptimizer
from ..parallel.gradients import local
from ..parallel.prepared import PreparedModel
from ..precision.base import Precision
from .objects import RunObjects


class AveragedWeights:
    """The average of the weights that train in a prepared model; of a sharded weight, this rank's shard of it.

    `Accelerator.track_average` makes it. It follows each step of the model's optimizers, is part of checkpoints, and
    computes what `torch.optim.swa_utils.AveragedModel` does: the first update copies the weights.

    Args:
        prepared: the model.
        objects: those of the run, with the optimizers. The reference is weak.
        precision: the run's precision.
        decay: the weight of the former average in an exponential average (EMA); None for the mean (SWA).

    Attributes:
        updates: the number of updates so far.

    Raises:
        ConfigurationError: `decay` is not at least 0 and less than 1.
        PrepareError: the weights have 16 bits.
    """

    def __init__(
        self,
        prepared: PreparedModel,
        objects: RunObjects,
        precision: Precision,
        decay: float | None = 0.999,
    ) -> None:
        if decay is not None and not 0 <= decay < 1:
            raise ConfigurationError(
                f"decay={decay}: use a value of at least 0 and less than 1, or None for the mean "
                "(SWA)"
            )
        self.updates: int = 0
        self._model: PreparedModel | None = prepared  # None once it is released
        self._objects = weakref.ref(objects)
        self._precision = precision
        self._combine: Callable[[Any, Any, Any], None] = (
            get_swa_multi_avg_fn() if decay is None else get_ema_multi_avg_fn(decay)
        )
        self._is_trained_by: weakref.WeakKeyDictionary[AcceleratedOptimizer, bool] = (
            weakref.WeakKeyDictionary()
        )
        # By optimizer, since the last update: whether its step was not skipped.
        self._has_stepped: weakref.WeakKeyDictionary[AcceleratedOptimizer, bool] = (
            weakref.WeakKeyDictionary()
        )
        self._is_applied = False
        with self._shards():
            self._names = prepared.trained_names()
            self._weights = [
                p for p in prepared.module.parameters() if p.requires_grad and not p.is_meta
            ]
            self._averages = self._copies()
        for average in self._averages:
            if average.dtype in (torch.bfloat16, torch.float16):
                raise PrepareError(
                    f"track_average: weights of {class_name(prepared.inner)} are {average.dtype}, "
                    "which is too coarse for the small steps of an average. Train fp32 weights "
                    "(mixed_precision='bf16' still computes in bf16), or use MasterWeightsKwargs"
                )

    @property
    def is_applied(self) -> bool:
        """Whether the model has the averages instead of its weights."""
        return self._is_applied

    @property
    def _prepared(self) -> PreparedModel:
        if self._model is None:
            raise PrepareError("free_memory has released the model of this average")
        return self._model

    # -- what the run does

    def check_not_applied(self) -> None:
        """Raise PrepareError for what would use the averages as the weights that train: a step, a save, a load."""
        if self._is_applied:
            raise PrepareError(
                "inside average.applied(), the model holds the averages: call optimizer.step, "
                "save_state and load_state after the block. save_model saves the averages"
            )

    def after_step(self, optimizer: AcceleratedOptimizer) -> None:
        """Update when all optimizers of the model have stepped, unless all of these steps were skipped."""
        objects = self._objects()
        if objects is None:
            return
        for trainer in objects.optimizers:
            if trainer not in self._is_trained_by:
                self._is_trained_by[trainer] = self._prepared.trains_with(trainer.optimizer)
        if not self._is_trained_by.get(optimizer):
            return
        self._has_stepped[optimizer] = not optimizer.step_was_skipped
        trainers = [trainer for trainer, trains in self._is_trained_by.items() if trains]
        if all(trainer in self._has_stepped for trainer in trainers):
            if any(self._has_stepped.values()):
                self.update()
            self._has_stepped.clear()

    def release(self) -> None:
        """Forget the model, and free the averages."""
        self._model = None
        self._weights, self._averages = [], []

    # -- the average

    @torch.no_grad()
    def update(self) -> None:
        """Move the averages towards the present weights. Steps of prepared optimizers call it."""
        if self._averages:
            weights = [local(weight) for weight in self._weights]
            if self.updates:
                self._combine(self._averages, weights, self.updates)
            else:
                _copy(self._averages, weights)
        self.updates += 1

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """A block in which the model has the averages instead of its weights. Every rank enters it.

        In the block the weights are kept aside: one more copy of this rank's shard.

        Raises:
            PrepareError: in the block an optimizer steps, or the block is entered again.
            CheckpointError: in the block `save_state` or `load_state` is called.
        """
        if self._is_applied:
            raise PrepareError(
                "average.applied() was entered inside average.applied(): the model already holds "
                "the averages"
            )
        weights = self._put(self._averages)
        self._is_applied = True
        try:
            yield
        finally:
            self._is_applied = False
            self._put(weights)

    def state_dict(self) -> dict[str, Any]:
        """The number of updates, and the averages, unsharded under the names of the plain model.

        Every rank calls it. In layouts that shard a model, the averages are in the host memory of rank 0.
        """
        with self._shards():
            weights = self._put(self._averages)
            try:
                state = self._prepared.state_dict()
                averages = {
                    name: value.detach().clone()
                    for name, value in state.items()
                    if name in self._names
                }
            finally:
                self._put(weights)
        return {"updates": self.updates, "averages": averages}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what `state_dict` has returned on rank 0, in any layout. Every rank calls it.

        Raises:
            CheckpointError: the names differ from those of the model's weights.
        """
        averages = state["averages"]
        differing = sorted(set(averages) ^ self._names)
        if self._prepared.is_partial:
            # slow to import, and loaded where a model is sharded
            from ..parallel.materialize import (
                from_first,
            )

            differing = from_first(differing, None)
        if differing:
            raise CheckpointError(
                f"the saved averages and the weights that train differ in {len(differing)} names: "
                f"{', '.join(differing[:5])}"
            )
        with self._shards():
            weights = self._put(self._averages)
            try:
                self._prepared.load_state_dict(averages, strict=False)
                self._averages = self._copies()
            finally:
                self._put(weights)
        self.updates = int(state["updates"])

    @contextlib.contextmanager
    def _shards(self) -> Iterator[None]:
        """The model has this rank's shards, and master weights instead of parameters that were cast."""
        prepared = self._prepared
        prepared.reshard()
        with self._precision.swap_in_master_weights([prepared.module], [], [prepared.swappable()]):
            yield

    @torch.no_grad()
    def _copies(self) -> list[torch.Tensor]:
        return [local(weight.detach()).clone() for weight in self._weights]

    @torch.no_grad()
    def _put(self, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Give the model these values. Returns those that it had."""
        with self._shards():
            former = self._copies()
            _copy([local(weight.detach()) for weight in self._weights], values)
        return former


def _copy(targets: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    for target, value in zip(targets, values, strict=True):
        target.copy_(value)
