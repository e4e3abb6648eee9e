# SPDX-License-Identifier: Apache-2.0
"""Optimizer steps whose loss or gradients are not finite are left out on all ranks, before anything is updated."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from ..core.errors import NonFiniteError, PrepareError
from ..core.objects import ranks_in_words
from ..logging import MultiProcessAdapter, get_logger
from ..optimizer import AcceleratedOptimizer, parameters_of
from ..parallel.gradients import gradients_of, local, not_finite
from ..parallel.unwrap import canonical_name
from ..runtime import marks
from ..runtime.step_exchange import StepExchange
from .objects import RunObjects

logger: MultiProcessAdapter = get_logger(__name__)


class NonFiniteGuard:
    """Decides before each step of a prepared optimizer, on all ranks alike, whether it is left out.

    A rank looks at the losses of its backwards since the last step, and at its gradients of the optimizer's
    parameters. The gradients of fp16 are left to the gradient scaler, which skips steps to find its scale.

    Args:
        objects: the prepared objects of the run. The reference is weak, since optimizers refer to the guard.
        device: of the run.
        limit: the run ends at so many steps in a row that are left out.
        exchange: by which the ranks decide.
    """

    def __init__(
        self, objects: RunObjects, device: torch.device, limit: int, exchange: StepExchange
    ) -> None:
        self._objects = weakref.ref(objects)
        self._device = device
        self._limit = limit
        self._loss: torch.Tensor | None = None  # the sum, which is finite if all are
        self._has_stepped = False  # since the last backward
        self._exchange = exchange
        exchange.register("cause", _cause)

    def add_loss(self, loss: Any, num_items: Any) -> None:
        """Add a loss. A mean over no items is not finite, and has no weight."""
        if self._has_stepped:
            self._loss, self._has_stepped = None, False
        if isinstance(loss, torch.Tensor):
            value = local(loss.detach()).sum().float()
            if num_items is not None:
                value = torch.where(torch.as_tensor(num_items, device=value.device) > 0, value, 0.0)
            self._loss = value if self._loss is None else self._loss + value

    def check_closure(self, closure: Callable[[], Any] | None) -> None:
        """Raise PrepareError for a closure, which computes its losses inside the step."""
        if closure is not None:
            raise PrepareError(
                "non_finite: optimizer.step(closure) computes losses while it updates "
                "parameters, so the step cannot be skipped in advance. Remove non_finite, or use "
                "an optimizer without a closure"
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
        if not self._exchange.any_rank(flag):
            optimizer.left_out = 0
            return False
        optimizer.left_out += 1
        cause = self._exchange.collect("cause", self._cause_here(optimizer))
        position = marks.own_place()
        if position:
            position = f" in {position}"
        if optimizer.left_out < self._limit:
            logger.warning(f"an optimizer step was skipped{position}: {cause}")
            return True
        if self._limit > 1:
            in_a_row = f", for this step and the {self._limit - 1} before it"
        else:
            in_a_row = ""
        raise NonFiniteError(
            f"{cause}{position}{in_a_row}. The step did not update anything. Look for non-finite "
            "values in the data, a division by zero in the loss, or a learning rate that is too "
            "high; torch.autograd.detect_anomaly() shows the operation"
        )

    def _cause_here(self, optimizer: AcceleratedOptimizer) -> dict[str, Any]:
        """What is not finite on this rank. One name is enough: the message has to be short on many ranks."""
        loss = None
        if self._loss is not None and not torch.isfinite(self._loss):
            loss = str(self._loss.item())
        names: dict[int, str] = {}
        objects = self._objects()
        if objects is not None:
            for model in objects.models:
                model.reshard()
                for name, parameter in model.inner.named_parameters():
                    names[id(parameter)] = canonical_name(name)
        affected = [
            parameter
            for parameter in _checked(optimizer)
            if not_finite(gradients_of(parameter), self._device)
        ]
        first = None
        if affected:
            first = names.get(id(affected[0]), "a parameter")
        return {"loss": loss, "parameter": first, "parameters": len(affected)}


def _cause(rows: Mapping[int, dict[str, Any]]) -> str:
    """What is not finite, in words with the ranks."""

    def on(ranks: Iterable[int]) -> str:
        if len(rows) > 1:
            return f" on {ranks_in_words(ranks)}"
        return ""

    words = []
    losses = {rank: row["loss"] for rank, row in rows.items() if row["loss"] is not None}
    if losses:
        words.append(f"the loss is {next(iter(losses.values()))}{on(losses)}")
    parameters = {rank: row["parameter"] for rank, row in rows.items() if row["parameter"]}
    if parameters:
        which = next(iter(parameters.values()))
        others = max(row["parameters"] for row in rows.values()) - 1
        if others:
            which += f" and of {others} other parameters"
        words.append(f"the gradient of {which} is not finite{on(parameters)}")
    return "; ".join(words)


def _checked(optimizer: AcceleratedOptimizer) -> list[torch.Tensor]:
    """The parameters whose gradients are looked at."""
    if optimizer.scaler:
        return []
    return parameters_of(optimizer)


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Raise PrepareError for an optimizer that updates parameters before its step."""
    if hasattr(optimizer, "fused_backward"):
        raise PrepareError(
            f"non_finite: {type(optimizer).__name__} updates parameters inside the backward pass, "
            "where steps cannot be skipped. Remove non_finite, or use another optimizer"
        )
