# SPDX-License-Identifier: Apache-2.0
"""One kernel for many tensors. torch's optimizers use these functions; none of them has a public name."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from . import Internal

FOREACH = Internal(
    name="foreach",
    what="torch._foreach_copy_ and torch._foreach_mul_",
    versions="2.11 to 2.14",
    upstream="https://github.com/pytorch/pytorch/issues/58833",
    needed_by="examples/train_gpt.py with bf16 master weights; gradient accumulation with num_items",
    without="the same values with one kernel for each tensor: a step of a model with many parameters takes longer",
    test="tests/torch_internals/test_foreach.py::test_one_call_for_all_tensors",
)


def copy_(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each source to its target, casting it where their dtypes differ."""
    if not targets:
        return
    if FOREACH.is_on:
        torch._foreach_copy_(list(targets), list(sources))
        return
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def mul_(tensors: Sequence[torch.Tensor], factor: torch.Tensor | float) -> None:
    """Multiply tensors by one number in place."""
    if not tensors:
        return
    if FOREACH.is_on:
        torch._foreach_mul_(list(tensors), factor)
        return
    for tensor in tensors:
        tensor.mul_(factor)
