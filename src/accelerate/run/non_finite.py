# SPDX-License-Identifier: Apache-2.0
"""Optimizer steps whose loss or gradients are not finite are left out on all ranks, before anything is updated."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

from ..collectives import gather_object
from ..core.errors import NonFiniteError, PrepareError
from ..logging import MultiProcessAdapter, get_logger
from ..optimizer import AcceleratedOptimizer
from ..parallel.gradients import gradients_of, local, not_finite
from ..parallel.unwrap import canonical_name
from ..runtime import marks
from ..runtime.calls import ranks_in_words
from .objects import RunObjects
from .observers import RunObserver

logger: MultiProcessAdapter = get_logger(__name__)


class NonFiniteGuard(RunObserver):
    """Decides before each step of a prepared optimizer, on all ranks alike, whether it is left out.

    A rank looks at the losses of its backwards since the last step, and at its gradients of the optimizer's
    parameters. The gradients of fp16 are left to the gradient scaler, which skips steps to find its scale.

    Args:
        objects: the prepared objects of the run. The reference is weak, since optimizers refer to the guard.
        device: of the run.
        limit: the run ends at so many steps in a row that are left out.
    """

    def __init__(self, objects: RunObjects, device: torch.device, limit: int) -> None:
        self._objects = weakref.ref(objects)
        self._device = device
        self._limit = limit
        self._loss: torch.Tensor | None = None  # the sum, which is finite if all are
        self._has_stepped = False  # since the last backward

    def after_backward(self, loss: Any, num_items: Any) -> None:
        """Add a loss. A mean over no items is not finite, and has no weight."""
        if self._has_stepped:
            self._loss, self._has_stepped = None, False
        if isinstance(loss, torch.Tensor):
            value = local(loss.detach()).sum().float()
            if num_items is not None:
                value = torch.where(torch.as_tensor(num_items, device=value.device) > 0, value, 0.0)
            self._loss = value if self._loss is None else self._loss + value

    def before_step(
        self, optimizer: AcceleratedOptimizer, closure: Callable[[], Any] | None
    ) -> None:
        """Raise PrepareError for a closure, which computes its losses inside of the step."""
        if closure is not None:
            raise PrepareError(
                "non_finite: optimizer.step(closure) computes losses while it updates parameters, so that it cannot "
                "be left out before. Leave non_finite out, or use an optimizer without a closure"
            )

    def leaves_out(self, optimizer: AcceleratedOptimizer) -> bool:
        """Whether a step is left out. Every rank calls it; each waits for its device.

        Raises:
            NonFiniteError: it is the last of `limit` in a row.
        """
        self._has_stepped = True
        flag = not_finite(gradients_of(_checked(optimizer)), self._device)
        if self._loss is not None:
            flag += (~torch.isfinite(self._loss)).to(self._device)
        if dist.is_initialized():
            dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        if not flag.item():
            optimizer.left_out = 0
            return False
        optimizer.left_out += 1
        cause, place = self._explain(optimizer), marks.own_place()
        at = f" in {place}" if place else ""
        if optimizer.left_out < self._limit:
            logger.warning(f"an optimizer step is left out{at}: {cause}")
            return True
        if self._limit > 1:
            in_a_row = f", for the step and the {self._limit - 1} before it"
        else:
            in_a_row = ""
        raise NonFiniteError(
            f"{cause}{at}{in_a_row}. Nothing was updated by it. Look for values in the data that are not finite, a "
            "division by zero in the loss, or a learning rate that is too high; "
            "torch.autograd.detect_anomaly() shows the operation"
        )

    def _explain(self, optimizer: AcceleratedOptimizer) -> str:
        """What is not finite on which ranks. Every rank calls it."""
        if self._loss is None or torch.isfinite(self._loss):
            loss = None
        else:
            loss = self._loss.item()
        objects = self._objects()
        named: dict[int, str] = {}
        for model in () if objects is None else objects.models:
            model.reshard()
            named |= {
                id(parameter): canonical_name(name)
                for name, parameter in model.inner.named_parameters()
            }
        names = [
            named.get(id(parameter), "a parameter")
            for parameter in _checked(optimizer)
            if not_finite(gradients_of(parameter), self._device)
        ]
        # One name of each rank: the message has to be short on many ranks.
        ranks = gather_object([(loss, names[:1], len(names))])

        def on(affected: Iterable[int]) -> str:
            if len(ranks) > 1:
                return f" on {ranks_in_words(affected)}"
            return ""

        words = []
        losses = {rank: loss for rank, (loss, _, _) in enumerate(ranks) if loss is not None}
        if losses:
            words.append(f"the loss is {next(iter(losses.values()))}{on(losses)}")
        gradients = {rank: names[0] for rank, (_, names, _) in enumerate(ranks) if names}
        if gradients:
            more = max(count for _, _, count in ranks) - 1
            first = next(iter(gradients.values())) + (
                f" and of {more} other parameters" if more else ""
            )
            words.append(f"the gradient of {first} is not finite{on(gradients)}")
        return "; ".join(words)


def _checked(optimizer: AcceleratedOptimizer) -> list[torch.Tensor]:
    """The parameters whose gradients are looked at."""
    groups = [] if optimizer.scaler else optimizer.param_groups
    return [parameter for group in groups for parameter in group["params"]]


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Raise PrepareError for an optimizer that updates parameters before its step."""
    if hasattr(optimizer, "fused_backward"):
        raise PrepareError(
            f"non_finite: {type(optimizer).__name__} updates parameters inside of the backward, where no step can be "
            "left out. Leave non_finite out, or use another optimizer"
        )
