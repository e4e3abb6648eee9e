# SPDX-License-Identifier: Apache-2.0
"""Where a model is cut into stages; the pipeline itself is tested on two processes in tests/distributed."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from torch import nn

from accelerate import inference
from accelerate.core.errors import PrepareError
from accelerate.state import PartialState


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 8)
        self.body = nn.ModuleDict({"blocks": nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])})
        self.head = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))


def test_stages_are_cut_between_blocks_and_balanced() -> None:
    units = list(inference._units(Model(), "", frozenset()))
    assert [name for name, _ in units] == [
        "embed", "body.blocks.0", "body.blocks.1", "body.blocks.2", "body.blocks.3", "head.0", "head.1",
    ]  # fmt: skip
    assert dict(units)["embed"] == (4 * 8 + 8) * 4
    kept = [name for name, _ in inference._units(Model(), "", frozenset({"ModuleDict", "Sequential"}))]
    assert kept == ["embed", "body", "head"]


def test_the_largest_stage_is_as_small_as_it_can_be() -> None:
    dice = random.Random(0)
    for _ in range(30):
        sizes = [dice.randint(0, 9) for _ in range(dice.randint(3, 8))]
        stages = dice.randint(2, 3)
        cuts = inference._balanced([(str(place), size) for place, size in enumerate(sizes)], stages)
        assert len(cuts) == stages - 1

        def largest(places: tuple[int, ...], sizes: list[int] = sizes) -> int:
            edges = (0, *places, len(sizes))
            return max(sum(sizes[a:b]) for a, b in itertools.pairwise(edges))

        best = min(largest(places) for places in itertools.combinations(range(1, len(sizes)), stages - 1))
        assert largest(tuple(map(int, cuts))) == best


def test_split_points_that_do_not_fit_are_refused() -> None:
    with pytest.raises(PrepareError, match=r"name no module of Model: body\.blocks\.9"):
        inference._split_points(Model(), ["body.blocks.9"], (), 2)
    with pytest.raises(PrepareError, match="make 2 stages; there are 3 processes"):
        inference._split_points(Model(), ["head"], (), 3)
    with pytest.raises(PrepareError, match="7 parts"):
        inference._split_points(Model(), "auto", (), 8)


def test_on_one_process_the_model_stays_as_it_is() -> None:
    PartialState._reset_state()
    PartialState(cpu=True)
    model = nn.Linear(2, 2)
    prepared = inference.prepare_pippy(model, example_args=(torch.ones(1, 2),))
    assert prepared is model and "forward" not in vars(model) and not model.training
    PartialState._reset_state()
