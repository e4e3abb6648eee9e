# SPDX-License-Identifier: Apache-2.0
"""Where a model is cut into stages: at its blocks, balanced, or at named modules; what cannot be cut is refused."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from torch import nn

from accelerate.config.parallel import PipelineParallelConfig
from accelerate.core.errors import PrepareError
from accelerate.parallel.pipeline.split import balance, cut_model, find_units, measure


class Model(nn.Module):
    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 8)
        self.body = nn.ModuleDict(
            {"blocks": nn.ModuleList([nn.Linear(8, 8) for _ in range(blocks)])}
        )
        self.head = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.body["blocks"]:
            x = block(x)
        return self.head(x)


def test_units_are_blocks_and_what_stands_beside() -> None:
    units = find_units(Model())
    assert [unit.name for unit in units] == [
        "embed", "body.blocks.0", "body.blocks.1", "body.blocks.2", "body.blocks.3", "head.0", "head.1",
    ]  # fmt: skip
    assert units[0].size == (4 * 8 + 8) * 4 and units[0].blocks is None
    assert units[1].blocks == "body.blocks" and units[5].blocks == "head"
    kept = [unit.name for unit in find_units(Model(), ("ModuleDict", "Sequential"))]
    assert kept == ["embed", "body", "head"]
    nested = nn.Sequential(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)), nn.Linear(1, 1))
    assert [unit.name for unit in find_units(nested)] == ["0", "1"]
    assert [unit.name for unit in find_units(nested, nested=True)] == ["0.0", "0.1", "1"]


def test_the_costliest_stage_is_as_cheap_as_it_can_be() -> None:
    dice = random.Random(0)
    for _ in range(30):
        sizes = [dice.randint(0, 9) for _ in range(dice.randint(3, 8))]
        stages = dice.randint(2, 3)
        cuts = balance(sizes, stages)
        assert len(cuts) == stages - 1

        def costliest(places: tuple[int, ...], sizes: list[int] = sizes) -> int:
            edges = (0, *places, len(sizes))
            return max(sum(sizes[a:b]) for a, b in itertools.pairwise(edges))

        best = min(
            costliest(places) for places in itertools.combinations(range(1, len(sizes)), stages - 1)
        )
        assert costliest(tuple(cuts)) == best


def test_a_model_is_cut_at_its_blocks() -> None:
    cut = cut_model(Model(), 2)
    assert cut.bounds == (0, 3, 7) and cut.tail == 5
    assert [cut.stage_of(number) for number in range(7)] == [0, 0, 0, 1, 1, 1, 1]
    # With its head as costly as all else the blocks go to the first stage, but for one.
    heavy = cut_model(Model(), 2, cost=lambda units: [1.0] * 6 + [9.0])
    assert heavy.bounds == (0, 4, 7)
    named = cut_model(Model(), 3, ["body.blocks.1", "head.0"])
    assert named.bounds == (0, 2, 5, 7) and named.tail == 5
    # A module that contains units: its first one.
    assert cut_model(Model(), 3, ["body", "head"]).bounds == (0, 1, 5, 7)


def test_what_cannot_be_cut_is_refused() -> None:
    for points, stages, named in (
        (["body.blocks.9"], 2, r"names body\.blocks\.9, where Model cannot be cut"),
        (["head.0"], 3, "make 2 stages, but 3 are requested"),
        (["head.0", "body.blocks.2"], 3, "not in the order"),
        (["embed"], 2, "leave a stage empty"),
    ):
        with pytest.raises(PrepareError, match=named):
            cut_model(Model(), stages, points)
    nested = nn.Sequential(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)), nn.Linear(1, 1))
    with pytest.raises(PrepareError, match=r"0\.1, where Sequential cannot be cut.* 0, 1"):
        cut_model(nested, 2, ["0.1"])
    with pytest.raises(PrepareError, match=r"has 4 blocks \(body\.blocks\.0.*\) but 5 stages"):
        cut_model(Model(), 5)


def test_units_are_measured_in_time() -> None:
    class Slow(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(300):
                super().forward(x)
            return super().forward(x)

    model = Model()
    model.body["blocks"][3] = Slow(8, 8)
    units = find_units(model)
    spent = measure(model, units, {"x": torch.ones(2, 4)})
    assert len(spent) == 7 and max(spent) == spent[4] > 10 * sorted(spent)[5]
    assert not any(module._forward_hooks for module in model.modules())
    with pytest.raises(PrepareError, match="not have weights yet"):
        measure(model.to("meta"), units, {})


@pytest.mark.parametrize(
    "options, named",
    [
        ({"schedule": "2f2b"}, "schedule='2f2b'"),
        ({"num_microbatches": 0}, "num_microbatches=0"),
        ({"schedule": "1f1b", "stages_per_rank": 2}, "stages_per_rank=2"),
        ({"schedule": "zbv", "stages_per_rank": 3}, "stages_per_rank=3"),
        ({"balance": "memory"}, "balance='memory'"),
        ({"loss_reduction": "max"}, "loss_reduction='max'"),
        ({"loss_reduction": "sum", "num_items": len}, "num_items"),
    ],
)
def test_options_that_cannot_be_are_refused(options, named) -> None:
    with pytest.raises(ValueError, match=named):
        PipelineParallelConfig(**options)


def test_options_from_variables(monkeypatch) -> None:
    monkeypatch.setenv("PARALLELISM_CONFIG_PP_SCHEDULE", "Interleaved")
    monkeypatch.setenv("PARALLELISM_CONFIG_PP_NUM_MICROBATCHES", "6")
    config = PipelineParallelConfig()
    assert (config.schedule, config.num_microbatches, config.stages_per_rank) == (
        "interleaved",
        6,
        2,
    )
    assert PipelineParallelConfig(schedule="gpipe", num_microbatches=2).stages_per_rank == 1


def test_entries_of_a_dict_outside_of_the_blocks_are_units():
    """As peft keeps the encoders of prompts: the dict itself is subscripted, not called."""
    model = nn.ModuleDict({"blocks": nn.ModuleList([nn.Linear(2, 2)])})
    model["prompts"] = nn.ModuleDict({"default": nn.Embedding(2, 2)})
    assert [unit.name for unit in find_units(model)] == ["blocks.0", "prompts.default"]
