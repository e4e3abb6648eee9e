# SPDX-License-Identifier: Apache-2.0
"""`parameter.register_hook` under layouts that replace parameters: an error, because nothing would call the hook."""

from __future__ import annotations

import functools
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


def refuse_later_hooks(parameters: Iterable[torch.Tensor], accumulated: bool = False) -> None:
    """Make `register_hook` of sharded parameters an error: the backward computes gradients of the gathered ones.

    With `accumulated` also `register_post_accumulate_grad_hook`, which FSDP2 calls with the reduced gradients.
    """
    names = ("register_hook", "register_post_accumulate_grad_hook") if accumulated else ("register_hook",)
    for parameter in parameters:
        vars(parameter).update({name: functools.partial(_refuse, name) for name in names})


def _refuse(name: str, hook: object) -> None:
    raise PrepareError(
        f"{name} on a parameter that FSDP shards: a backward computes gradients of the gathered parameter, and "
        f"nothing would call the hook. {_REMEDY}"
    )
