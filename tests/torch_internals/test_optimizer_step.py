# SPDX-License-Identifier: Apache-2.0
"""Steps that were replaced, and groups without parameters."""

from __future__ import annotations

import warnings

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from accelerate.torch_internals.optimizer_step import replace_step, without_empty_groups


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


def test_a_group_may_be_empty() -> None:
    model = torch.nn.Linear(2, 2)
    groups = [{"params": []}, {"params": list(model.parameters())}, {"params": [], "lr": 0.5}]
    optimizer = torch.optim.AdamW(groups, lr=0.25)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    state = get_optimizer_state_dict(model, optimizer, options=options)
    optimizer.param_groups[1]["lr"] = 0.0
    with without_empty_groups(optimizer):
        set_optimizer_state_dict(model, optimizer, state, options=options)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.25, 0.5]
    assert [len(group["params"]) for group in optimizer.param_groups] == [0, 2, 0]
