# SPDX-License-Identifier: Apache-2.0
"""The hooks for saved tensors around a block."""

from __future__ import annotations

import torch
from torch.autograd.graph import saved_tensors_hooks

from accelerate.torch_internals.saved_tensors import outer_hooks


def test_the_hooks_around_a_block() -> None:
    assert outer_hooks() is None
    with saved_tensors_hooks(torch.abs, torch.neg):
        assert outer_hooks() == (torch.abs, torch.neg)
    assert outer_hooks() is None
