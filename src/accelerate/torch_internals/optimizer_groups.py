# SPDX-License-Identifier: Apache-2.0
"""Groups of an optimizer that have no parameters."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from . import Internal

EMPTY_GROUPS = Internal(
    name="empty_groups",
    what="nothing private: groups without parameters are left out while torch loads a flattened state",
    versions="2.11 to 2.14",
    upstream="not reported",
    needed_by="load_state with SHARDED_STATE_DICT of LoRA by transformers.Trainer, whose group without weight decay "
    "(norms and biases) is empty",
    without="IndexError: list index out of range in load_state",
    test="tests/torch_internals/test_optimizer_groups.py::test_a_group_may_be_empty",
)


@contextlib.contextmanager
def without_empty_groups(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """A block in which an optimizer has only its groups with parameters. The others come back as they were."""
    if not EMPTY_GROUPS.is_on:
        yield
        return
    groups = optimizer.param_groups
    optimizer.param_groups = [group for group in groups if group["params"]]
    try:
        yield
    finally:
        # Loading a state replaces the groups.
        loaded = iter(optimizer.param_groups)
        optimizer.param_groups = [next(loaded) if group["params"] else group for group in groups]
