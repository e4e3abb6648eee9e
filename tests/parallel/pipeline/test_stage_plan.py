# SPDX-License-Identifier: Apache-2.0
"""What follows from a forward that was seen: who holds which tensor, what cannot be cut, and what would fit."""

import pytest
import torch
from torch import nn

from accelerate.config.parallel import PipelineParallelConfig as Options
from accelerate.core.errors import PrepareError
from accelerate.parallel.pipeline.dataflow import END, observe
from accelerate.parallel.pipeline.split import computing_units, find_units
from accelerate.parallel.pipeline.stage_plan import CutError, cut_along, remedy


class Reading(nn.Module):
    """Weights that are read and not called: before the blocks, in a block, and at the end."""

    def __init__(self, counts=False):
        super().__init__()
        self.counts = counts
        self.scale = nn.Parameter(torch.ones(4))
        self.idle = nn.Parameter(torch.ones(4))
        self.embed = nn.Embedding(8, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.blocks[0].register_buffer("seen", torch.zeros(()))
        self.blocks[3].forward = self.last_block
        self.relative = nn.Embedding(2, 4)

    def last_block(self, x):
        return nn.functional.linear(x, self.blocks[3].weight) + self.blocks[0].bias + self.blocks[0].seen

    def forward(self, x):
        x = self.embed(x) + self.relative.weight[0]
        for number, block in enumerate(self.blocks):
            x = block(x * self.scale if number == 2 else x)
            if self.counts and number == 0:
                block.seen += 1
        return nn.functional.linear(x, self.embed.weight)


X = torch.zeros(2, 3, dtype=torch.long)


def flow_of(model, x=X):
    units = computing_units(model)
    return units, observe(model, [unit.name for unit in units], (x,), {})


def test_reads_are_seen_where_their_value_is_used():
    _, flow = flow_of(Reading())
    assert flow.reads == {
        "relative.weight": {"blocks.0"},
        "scale": {"blocks.2"},
        "blocks.0.bias": {"blocks.3"},
        "blocks.0.seen": {"blocks.3"},
        "embed.weight": {END},
    }
    assert flow.written == set() and "relative" not in flow.called


def test_holders_are_the_stages_that_use_a_tensor():
    model = Reading()
    units, flow = flow_of(model)
    found = cut_along(model, Options(), 2, units, flow)
    assert found.cut.stage_of(found.cut.units.index("blocks.2")) == 1
    locations = {name: found.stages_of(found.locations(model)[id(p)]) for name, p in model.named_parameters()}
    assert locations["relative.weight"] == {0} and locations["scale"] == {1} and locations["embed.weight"] == {0, 1}
    assert locations["blocks.0.bias"] == {0, 1} and locations["blocks.0.weight"] == {0} and locations["idle"] == {0}
    assert found.stages_of(found.locations(model)[id(model.blocks[0].seen)]) == {1}
    # Not seen: a parameter outside of all units is wherever it may be used.
    unseen = cut_along(model, Options(), 2, units, None)
    locations = {name: unseen.stages_of(unseen.locations(model)[id(p)]) for name, p in model.named_parameters()}
    assert locations["scale"] == locations["idle"] == {0, 1} and locations["embed.weight"] == {0}


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen += 1
        return self.linear(x)


class Counting(nn.Module):
    """Its first block changes a buffer that its last one uses."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Counter() for _ in range(2))

    def forward(self, x):
        x = self.blocks[0](x)
        return self.blocks[1](x + self.blocks[0].seen)


def test_a_buffer_that_would_go_apart_is_refused():
    model = Counting()
    units, flow = flow_of(model, torch.ones(3, 4))
    with pytest.raises(PrepareError, match=r"changes blocks\.0\.seen in its forward, and stages 0, 1 use it"):
        cut_along(model, Options(), 2, units, flow)


class Ordered(nn.Module):
    """Registered in one order and called in another."""

    def __init__(self, registered, called, skip=False):
        super().__init__()
        self.called, self.skip = called, skip
        for name in registered:
            module = nn.ModuleList(nn.Linear(4, 4) for _ in range(4)) if name == "blocks" else nn.Linear(4, 4)
            setattr(self, name, module)

    def forward(self, x):
        first = None
        for name in self.called:
            for module in self.blocks if name == "blocks" else [self.get_submodule(name)]:
                x = module(x)
                first = x if first is None else first
        return x + first if self.skip else x


@pytest.mark.parametrize(
    ("registered", "called", "skip", "proposed"),
    [
        (("embed", "blocks", "norm"), ("embed", "norm", "blocks"), False, "(example_inputs={...})"),
        (("norm", "embed", "blocks"), ("embed", "blocks", "norm"), False, "(example_inputs={...})"),
        # Two modules at once, outputs that are used later, and both.
        (("head", "blocks", "embed", "norm"), ("embed", "norm", "blocks", "head"), False, "(example_inputs={...})"),
        (("embed", "blocks", "norm"), ("embed", "blocks", "norm"), True, "(example_inputs={...})"),
        (("embed", "blocks", "norm"), ("embed", "norm", "blocks"), True, "(example_inputs={...})"),
        (
            ("embed", "blocks"), ("embed", "blocks.1", "blocks.0", "blocks.3", "blocks.2"), False,
            "(example_inputs={...})",
        ),
        (
            ("embed", "blocks"), ("embed", "blocks", "blocks.2"), False,
            "No cut into 2 stages was found",
        ),
        (("embed", "blocks"), ("embed", "blocks", "embed"), False, "No cut into 2 stages was found"),
    ],
)  # fmt: skip
def test_what_is_proposed_fits(registered, called, skip, proposed):
    model = Ordered(registered, called, skip)
    units, flow = flow_of(model, torch.ones(2, 4))
    text = remedy(model, Options(), 2, units, flow, observed=False)
    assert proposed in text, text


def test_an_order_that_was_seen_and_does_not_fit():
    model = Ordered(("embed", "blocks"), ("embed", "blocks", "blocks.2"))
    units, flow = flow_of(model, torch.ones(2, 4))
    with pytest.raises(CutError, match=r"blocks\.2 computes behind blocks\.3, on a later stage than its own"):
        cut_along(model, Options(split_points=["blocks.3"]), 2, units, flow)
    text = remedy(model, Options(split_points=["blocks.3"]), 2, units, flow, observed=True)
    assert "No cut into 2 stages was found" in text


def test_entries_of_a_list_in_a_list_are_units_and_what_is_not_called_is_refused():
    model = nn.Module()
    model.blocks = nn.ModuleList([nn.ModuleList([nn.Linear(4, 4)]), nn.ModuleList([nn.Linear(4, 4)])])
    assert [(unit.name, unit.blocks) for unit in find_units(model)] == [
        ("blocks.0.0", "blocks"), ("blocks.1.0", "blocks"),
    ]  # fmt: skip
    direct = Ordered(("embed", "blocks"), ("embed",))
    units, flow = flow_of(direct, torch.ones(2, 4))
    with pytest.raises(PrepareError, match=r"cannot be cut behind blocks\.\d: its forward does not call it"):
        cut_along(direct, Options(), 2, units, flow)
