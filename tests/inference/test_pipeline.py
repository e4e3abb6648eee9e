# SPDX-License-Identifier: Apache-2.0
"""Pipelined inference on one process; the pipeline itself is tested on two processes in tests/distributed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from accelerate.core.errors import PrepareError
from accelerate.inference import pipeline as inference
from accelerate.state import PartialState


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 8)
        self.body = nn.ModuleDict({"blocks": nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])})
        self.drop = nn.Dropout()
        self.head = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.body["blocks"]:
            x = block(x)
        return self.head(self.drop(x))


def cut(asked: str | list[str], stages: int) -> None:
    inference._cut(Model(), asked, (), ((torch.ones(2, 4),), {}), stages)


def test_split_points_that_do_not_fit_are_refused() -> None:
    with pytest.raises(PrepareError, match=r"names body\.blocks\.9, where"):
        cut(["body.blocks.9"], 2)
    with pytest.raises(PrepareError, match="make 2 stages, but 3 are requested"):
        cut(["head"], 3)
    with pytest.raises(
        PrepareError,
        match=r"drop, where Model .* embed, .* head\.0, head\.1",
    ):
        cut(["drop"], 2)
    with pytest.raises(PrepareError, match="the order in which Model computes"):
        cut(["head.0", "body.blocks.1"], 3)
    with pytest.raises(PrepareError, match="7 units"):
        cut("auto", 8)


def test_on_one_process_the_model_stays_as_it_is() -> None:
    PartialState(cpu=True)
    model = nn.Linear(2, 2)
    prepared = inference.prepare_pippy(model, example_args=(torch.ones(1, 2),))
    assert prepared is model and "forward" not in vars(model) and not model.training
