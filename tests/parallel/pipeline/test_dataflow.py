# SPDX-License-Identifier: Apache-2.0
"""What units of a model use of each other, seen in one forward: their order, what is carried over which cut."""

from __future__ import annotations

import torch
from torch import nn

from accelerate.parallel.pipeline.dataflow import observe


class Model(nn.Module):
    """Registered in another order than it computes; `a` is used once more behind `c`, in another shape, in place."""

    def __init__(self, dropout: float = 0.0, asks: bool = False) -> None:
        super().__init__()
        self.asks = asks
        self.d, self.c, self.b, self.a = (nn.Linear(4, 4) for _ in range(4))
        self.idle = nn.Linear(4, 4)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = self.a(x)
        view = self.drop(a).reshape(-1)
        x = self.c(self.b(a) * 2)
        if self.asks and x.sum().item() > 1e9:
            x = x * 2
        x += view.view(x.shape)
        return self.d(x)


UNITS = ["d", "c", "b", "a", "idle"]


def test_order_and_what_is_carried() -> None:
    for asks in (False, True):
        flow = observe(Model(asks=asks), UNITS, (torch.ones(2, 4),), {})
        assert flow.called == ["a", "b", "c", "d"] and flow.random == set()
        order = flow.order(UNITS)
        assert order == ["a", "idle", "b", "c", "d"]
        # A stage that begins at b gets a's output as what the unit before it gave, where nothing stands between.
        assert flow.carried(flow.called, [1]) == []
        assert flow.carried(flow.called, [2]) == ["a"] and flow.carried(flow.called, [3]) == ["a"]
        assert flow.carried(order, [4]) == ["a"] and flow.carried(order, [1]) == []
        # The sum of both is made where c has computed, and used by d alone.
        assert flow.used["c"] == "c" and flow.used["a"] == "c"


def test_what_is_made_at_random_is_told() -> None:
    assert observe(Model(dropout=0.5), UNITS, (), {"x": torch.ones(2, 4)}).random == {"a"}
    assert observe(Model(dropout=0.5).eval(), UNITS, (), {"x": torch.ones(2, 4)}).random == set()


def test_nothing_stays_behind() -> None:
    model, before = Model(), torch.get_rng_state()
    observe(model, UNITS, (torch.ones(2, 4),), {})
    assert torch.equal(before, torch.get_rng_state())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert all(parameter.grad is None and type(parameter) is nn.Parameter for parameter in model.parameters())
