# SPDX-License-Identifier: Apache-2.0
"""Losses with terms of `model.parameters()`, against the plain loop in float64; never silently wrong."""

import pytest
import torch
from layouts import compare_state, sharded_by_size, sized
from rank_pool import on_ranks
from states import reset_states
from torch import nn

from accelerate import Accelerator
from accelerate.core.errors import PrepareError

pytestmark = pytest.mark.usefixtures("float64")


PLAN = {"0": "colwise", "2": "rowwise"}
LAYOUTS = {
    "ddp": dict,
    "fsdp2": lambda: sharded_by_size(2),
    "fsdp2, unsharded after forward": lambda: sharded_by_size(2, reshard_after_forward=False),
    "tp": lambda: sized(PLAN, tp_size=2),
    "fsdp2 and tp": lambda: sharded_by_size(2) | sized(PLAN, tp_size=2, dp_shard_size=2),
}


def gathered(term):
    return getattr(term, "full_tensor", lambda: term)()


LOSSES = {
    "squares": lambda model, x: (
        model(x).square().mean() + 0.1 * sum(gathered(p.square().sum()) for p in model.parameters())
    ),
    "before": lambda model, x: (
        0.1 * sum(gathered(p.norm()) for p in model.parameters()) + model(x).square().mean()
    ),
    "stacked": lambda model, x: (
        model(x).square().mean()
        - 0.1 * torch.stack([gathered(p.abs().mean()) for p in model.parameters()]).sum()
    ),
    "parameters": lambda model, x: (
        model(x).square().mean() + 0.1 * sum(gathered(p).norm() for p in model.parameters())
    ),
}
# The gradient of a gathered parameter also fits a rank without rows. That of a gathered sum is a torch error there.
ROWS = {"parameters": 1}


def make(rows=2):
    torch.manual_seed(0)
    head = nn.Linear(4, rows)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4), nn.Tanh(), head)
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


def compare(layout, loss, windows=2):
    reset_states()
    run = Accelerator(cpu=True, gradient_accumulation_steps=2, **LAYOUTS[layout]())
    rows = ROWS.get(loss, 2)
    model, optimizer = run.prepare(*make(rows))
    expected, plain = make(rows)
    index, shards = run.strategy.data_shard
    for step in range(2 * windows):
        parts = torch.randn(shards, 4, 4, generator=torch.Generator().manual_seed(step))
        with run.accumulate(model):
            run.backward(LOSSES[loss](model, parts[index]))
            optimizer.step()
            optimizer.zero_grad()
        (sum(LOSSES[loss](expected, rows) for rows in parts) / shards / 2).backward()
        if step % 2:
            plain.step()
            plain.zero_grad()
    compare_state(run, model, expected.state_dict())


@on_ranks(2)
@pytest.mark.parametrize("layout", ["ddp", "fsdp2", "fsdp2, unsharded after forward", "tp"])
def test_equals_the_plain_loop(layout):
    for loss in LOSSES:
        compare(layout, loss)
    if layout in ("fsdp2", "tp"):
        LOSSES["sharded"] = lambda model, x: (
            model(x).square().mean() + sum(p.norm() for p in model.parameters())
        )
        with pytest.raises(PrepareError, match=r"the loss is a DTensor.*full_tensor"):
            compare(layout, "sharded")
        del LOSSES["sharded"]


@on_ranks(4)
def test_equals_the_plain_loop_on_two_dimensions():
    compare("fsdp2 and tp", "squares")
    compare("fsdp2 and tp", "parameters")
