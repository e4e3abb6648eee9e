# SPDX-License-Identifier: Apache-2.0
"""Steps that were replaced."""

from __future__ import annotations

import warnings

import torch

from accelerate.torch_internals.optimizer_step import replace_step


def test_schedulers_count_a_step_that_was_replaced() -> None:
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    replace_step(optimizer, lambda present, step, closure: step())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    parameter.grad = torch.ones(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
        scheduler.step()
    assert parameter.item() == 0.0
