# SPDX-License-Identifier: Apache-2.0
"""A check before the first step of each prepared optimizer: whether it trains the prepared models."""

from __future__ import annotations

import weakref

from .data_loader.diagnose import uneven_epoch, uneven_window
from .logging import MultiProcessAdapter, get_logger
from .optimizer import AcceleratedOptimizer
from .run_checkpoints import RunCheckpoints
from .run_objects import RunObjects
from .state import GradientState, PartialState

logger: MultiProcessAdapter = get_logger(__name__)


class FirstStepCheck:
    """Logs a warning for what looks wrong before an optimizer's first step, each message once a run.

    References to the run's objects are weak, since their optimizers refer to this check until they step.
    """

    def __init__(self, objects: RunObjects, checkpoints: RunCheckpoints, gradient_state: GradientState) -> None:
        self._objects = weakref.ref(objects)
        self._checkpoints = weakref.ref(checkpoints)
        self._gradient_state = gradient_state
        self._logged: set[str] = set()

    def __call__(self, optimizer: AcceleratedOptimizer) -> None:
        """Check the run before the first step of `optimizer`."""
        objects, checkpoints = self._objects(), self._checkpoints()
        if objects is None or checkpoints is None:
            return
        checkpoints.check_resumed()
        checkpoints.controller.record_step()
        self._check_epoch()
        self._check_parameters(optimizer, objects)

    def check_window(self) -> None:
        """Check the length of the epoch before the first loss is divided by the accumulation steps."""
        loader = self._gradient_state.active_dataloader
        self._log_once(None if loader is None else uneven_window(loader, self._gradient_state.num_steps))

    def _check_epoch(self) -> None:
        loader = self._gradient_state.active_dataloader
        self._log_once(None if loader is None else uneven_epoch(loader))

    def _log_once(self, note: str | None) -> None:
        if note is not None and note not in self._logged:
            self._logged.add(note)
            logger.warning(note)

    def _check_parameters(self, optimizer: AcceleratedOptimizer, objects: RunObjects) -> None:
        prepared = {id(parameter) for model in objects.models for parameter in model.module.parameters()}
        own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if objects.models and own and not any(id(parameter) in prepared for parameter in own):
            logger.warning(
                f"the {type(optimizer.optimizer).__name__} steps on parameters that belong to no prepared model"
                + (": their gradients are not averaged over the processes" if PartialState().use_distributed else "")
                + ". Was the model replaced after the optimizer was made, or never given to prepare?"
            )
