# SPDX-License-Identifier: Apache-2.0
"""Activation checkpointing: activations are recomputed in the backward instead of kept."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    CheckpointWrapper,
    OffloadWrapper,
    checkpoint_wrapper,
    offload_wrapper,
)

from ..core.errors import PrepareError


def checkpoint_activations(
    model: nn.Module, modules: Sequence[nn.Module], device: torch.device, offload: bool = False
) -> list[nn.Module]:
    """Wrap each of `modules`, at every place in `model`, so that its activations are recomputed in the backward.

    The names of parameters in state dicts stay those of the plain model.

    Args:
        model: changed in place.
        modules: modules inside of the model.
        device: that of the run.
        offload: keep a module's inputs in host memory (no effect on the CPU).

    Returns:
        The wrappers, in the order of `modules`.

    Raises:
        PrepareError: there is no module to wrap.
    """
    if not modules:
        raise PrepareError(
            "activation_checkpointing=True finds no module to wrap: choose an auto_wrap_policy that finds the "
            "model's blocks, TRANSFORMER_BASED_WRAP (...) or SIZE_BASED_WRAP (min_num_params)"
        )
    wrappers: dict[int, nn.Module] = {}
    for module in modules:
        wrapped = _recomputing(module)
        if offload and device.type != "cpu":
            wrapped = offload_wrapper(wrapped)
        wrappers[id(module)] = wrapped
    inside = {id(layer) for wrapped in wrappers.values() for layer in _layers(wrapped)}
    for parent in list(model.modules()):
        if id(parent) in inside:
            continue
        for name, child in list(parent.named_children()):
            if id(child) in wrappers:
                setattr(parent, name, wrappers[id(child)])
    return [wrappers[id(module)] for module in modules]


def _recomputing(module: nn.Module) -> nn.Module:
    if isinstance(module, CheckpointWrapper):
        return module
    return checkpoint_wrapper(module, checkpoint_impl=CheckpointImpl.NO_REENTRANT)


def _layers(wrapped: nn.Module) -> list[nn.Module]:
    """A wrapper and the wrapper inside it: their children are not to be wrapped again."""
    found = [wrapped]
    if isinstance(wrapped, OffloadWrapper):
        found.append(wrapped._checkpoint_wrapped_module)
    return found
