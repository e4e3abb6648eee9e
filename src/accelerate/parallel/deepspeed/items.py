# SPDX-License-Identifier: Apache-2.0
"""A factor for an engine's gradients in its step, in every ZeRO stage."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from ...core.errors import ConfigurationError
from ..gradients import gradients_of, multiply


def check_multiplies(engine: Any) -> None:
    """Raise ConfigurationError for an engine that uses gradients before its step."""
    for option, is_on in (("zenflow", getattr(engine, "zenflow", False)), ("super_offload", _super_offload(engine))):
        if is_on:
            raise ConfigurationError(
                f"backward(loss, num_items=...): DeepSpeed's {option} updates parameters before all gradients of a "
                "window, and the number of its items, are known. Divide the loss by that number, leave num_items out, "
                f"or turn {option} off in the configuration"
            )


def _super_offload(engine: Any) -> bool:
    uses = getattr(engine, "super_offload", None)
    return bool(uses()) if callable(uses) else False


@contextlib.contextmanager
def multiplied(engine: Any, factor: torch.Tensor) -> Iterator[None]:
    """A block around `engine.step()` which uses the gradients times `factor`, for their norm and its limit too."""
    optimizer = engine.optimizer
    if hasattr(optimizer, "fp32_groups_gradients_flat"):
        # bf16 weights whose gradients are summed in fp32.
        multiply(optimizer.fp32_groups_gradients_flat, factor)
        yield
    elif engine.zero_optimization():
        # The step divides by the loss scale wherever gradients lie, on the host too.
        known = optimizer.custom_loss_scaler, optimizer.external_loss_scale
        scale, number = float(optimizer.loss_scale), float(factor)
        optimizer.external_loss_scale = scale / number if number else scale
        optimizer.custom_loss_scaler = True
        try:
            yield
        finally:
            optimizer.custom_loss_scaler, optimizer.external_loss_scale = known
    else:
        multiply(gradients_of(engine.module.parameters()), factor)
        yield
