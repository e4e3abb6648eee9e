# SPDX-License-Identifier: Apache-2.0
"""`parameter.register_hook` under layouts that replace parameters: an error, because nothing would call the hook."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from ..core.errors import PrepareError

_REMEDY = "Change `parameter.grad` after `accelerator.backward` instead, where `accelerator.sync_gradients` is True"


def refuse_gradient_hooks(model: nn.Module, layout: str) -> None:
    """Raise PrepareError for parameters with hooks that `layout` would lose with them."""
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise PrepareError(
                f"{name} of {type(model).__name__} has a gradient hook, and {layout} replaces the parameter by its "
                f"shard: nothing would call the hook. {_REMEDY}"
            )


def refuse_later_hooks(parameters: Iterable[torch.Tensor]) -> None:
    """Make `register_hook` of sharded parameters an error: the backward computes gradients of the gathered ones."""
    for parameter in parameters:
        parameter.register_hook = _refuse  # type: ignore[method-assign]


def _refuse(hook: object) -> None:
    raise PrepareError(
        "register_hook on a parameter that FSDP shards: a backward computes gradients of the gathered parameter, and "
        f"nothing would call the hook. {_REMEDY}"
    )
