# SPDX-License-Identifier: Apache-2.0
"""What units of a model use of each other, seen in one forward, and what follows for the stages."""

import pytest
import torch
from torch import nn

from accelerate.config.parallel import PipelineParallelConfig as Options
from accelerate.core.errors import PrepareError
from accelerate.parallel.pipeline.observe import observe
from accelerate.parallel.pipeline.split import computing_units, cut_along


class Model(nn.Module):
    """Registered in another order than it computes; `a` is used once more behind `c`; `b` reads a weight of `a`."""

    def __init__(self, dropout=0.0, asks=False):
        super().__init__()
        self.asks = asks
        self.scale = nn.Parameter(torch.ones(4))
        self.d, self.c, self.b, self.a = (nn.Linear(4, 4) for _ in range(4))
        self.idle = nn.Linear(4, 4)
        self.drop = nn.Dropout(dropout)

    def forward(self, x):
        a = self.a(x)
        view = self.drop(a).reshape(-1)
        x = self.c(nn.functional.linear(self.b(a) * self.scale, self.a.weight))
        if self.asks and x.sum().item() > 1e9:
            x = x * 2
        x += view.view(x.shape)
        return self.d(x)


UNITS = ["d", "c", "b", "a", "idle"]


@pytest.mark.parametrize("asks", [False, True], ids=["on meta", "with values"])
def test_order_and_what_is_carried(asks):
    model, before = Model(asks=asks), torch.get_rng_state()
    seen = observe(model, UNITS, (torch.ones(2, 4),), {})
    assert seen.calls == ["a", "b", "c", "d"] and seen.reads == {"a.weight"}
    order = seen.order(UNITS)
    assert order == ["a", "idle", "b", "c", "d"]
    assert seen.used_across(seen.calls, [1]) == []
    assert seen.used_across(seen.calls, [2]) == ["a"] and seen.used_across(seen.calls, [3]) == ["a"]
    assert seen.used_across(order, [4]) == ["a"] and seen.used_across(order, [1]) == []
    assert torch.equal(before, torch.get_rng_state())
    assert all(parameter.grad is None and not parameter.is_meta for parameter in model.parameters())


class Cache:
    """No container that is looked into."""


class Prefixed(nn.Module):
    """Its blocks find the output of the prompt in an object."""

    def __init__(self):
        super().__init__()
        self.prompt = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(Prefixing() for _ in range(3))

    def forward(self, x):
        cache = Cache()
        cache.prefix = self.prompt(x)
        for block in self.blocks:
            x = block(x, cache)
        return x


class Prefixing(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)

    def forward(self, x, cache):
        return super().forward(x + cache.prefix)


def test_outputs_in_objects_are_carried():
    model = Prefixed()
    units = computing_units(model)
    names = [unit.name for unit in units]
    plan = cut_along(model, Options(), 2, units, observe(model, names, (torch.ones(2, 4),), {}))
    assert plan.carried == {"prompt": 0}


def test_stages_of_parameters():
    model = Model()
    units = computing_units(model)
    plan = cut_along(model, Options(), 2, units, observe(model, UNITS, (torch.ones(2, 4),), {}))
    locations = {name: plan.locations(model)[id(p)] for name, p in model.named_parameters()}
    assert plan.carried == {"a": 0}
    # One that is read elsewhere, and one outside of all units, is on every stage.
    assert locations["a.weight"] == locations["scale"] == {0, 1}
    assert locations["a.bias"] == {0} and locations["d.bias"] == {1}


def test_an_order_that_does_not_fit():
    class Again(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

        def forward(self, x):
            for block in [*self.blocks, self.blocks[2]]:
                x = block(x)
            return x

    model = Again()
    units = computing_units(model)
    seen = observe(model, [unit.name for unit in units], (torch.ones(2, 4),), {})
    with pytest.raises(PrepareError, match=r"blocks\.2 computes behind blocks\.3.*split_points"):
        cut_along(model, Options(split_points=["blocks.3"]), 2, units, seen)
