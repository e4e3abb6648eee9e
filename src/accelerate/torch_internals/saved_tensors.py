# SPDX-License-Identifier: Apache-2.0
"""The hooks for tensors that autograd saves which are around a block with hooks of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from . import Internal

SAVED_TENSORS_HOOKS = Internal(
    name="saved_tensors_hooks",
    what="torch._C._autograd, which hooks for saved tensors are in force: torch calls the innermost ones only",
    versions="2.11 to 2.14",
    upstream="not reported",
    needed_by="training with offloaded weights under activation checkpointing or activation_offload",
    without="activations of modules with offloaded weights stay on the device",
    test="tests/torch_internals/test_saved_tensors.py::test_the_hooks_around_a_block",
)

Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]


def outer_hooks() -> Hooks | None:
    """The pack and unpack hooks that are in force here; None without any."""
    if not SAVED_TENSORS_HOOKS.is_on:
        return None
    hooks: Hooks | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks
