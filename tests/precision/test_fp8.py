# SPDX-License-Identifier: Apache-2.0
"""Which library computes in fp8, and what is refused before a model is touched."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from accelerate.config.precision import AORecipeKwargs, MSAMPRecipeKwargs
from accelerate.core.enums import FP8BackendType
from accelerate.core.errors import ConfigurationError, PrepareError
from accelerate.core.imports import is_available
from accelerate.parallel.sharded_optimizer import repoint_all
from accelerate.precision.fp8 import Float8Precision, make_fp8
from accelerate.run.resolve import Handlers, _fp8_backend
from accelerate.state import PartialState

needs_torchao = pytest.mark.skipif(not is_available("torchao"), reason="needs torchao")


class Replacing(Float8Precision):
    """A backend that makes new layers for those that are called `taken`."""

    backend = FP8BackendType.TE

    def replace_layers(self, model: nn.Module) -> list[str]:
        taken = [name for name, _ in model.named_children() if name == "taken"]
        for name in taken:
            setattr(model, name, nn.Linear(4, 4))
        return taken


def test_an_optimizer_follows_the_layers_that_are_replaced() -> None:
    model = nn.ModuleDict({"kept": nn.Linear(4, 4), "taken": nn.Linear(4, 4)})
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    PartialState(cpu=True)
    precision = Replacing("cpu")
    precision.convert(model, lambda pairs: repoint_all([optimizer], pairs))
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [
        id(p) for p in model.parameters()
    ]
    assert precision.computes_in.startswith("bfloat16 under autocast, 1 of 2 linear layers")
    assert precision.computes_in.endswith(" in float8 (TE); not: kept")


def test_a_model_without_a_layer_to_convert_is_refused() -> None:
    with pytest.raises(PrepareError, match="the 1 linear layers of ModuleDict"):
        Replacing("cpu").convert(nn.ModuleDict({"kept": nn.Linear(4, 4)}), lambda pairs: None)


def test_the_backend_is_that_of_the_recipe_else_of_the_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recipe = MSAMPRecipeKwargs()
    assert _fp8_backend(Handlers(msamp=recipe)) == (FP8BackendType.MSAMP, recipe)
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "te")
    assert _fp8_backend(Handlers()) == (FP8BackendType.TE, None)
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "nope")
    with pytest.raises(ConfigurationError, match="ACCELERATE_FP8_BACKEND='nope'"):
        _fp8_backend(Handlers())
    monkeypatch.delenv("ACCELERATE_FP8_BACKEND")
    monkeypatch.setattr("accelerate.run.resolve.is_available", lambda name: name == "torchao")
    assert _fp8_backend(Handlers()) == (FP8BackendType.AO, None)
    monkeypatch.setattr("accelerate.run.resolve.is_available", lambda name: False)
    with pytest.raises(ConfigurationError, match="pip install torchao"):
        _fp8_backend(Handlers())


@needs_torchao
def test_two_recipes_and_a_library_that_no_longer_runs_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="AO and MSAMP"):
        _fp8_backend(Handlers(ao=AORecipeKwargs(), msamp=MSAMPRecipeKwargs()))
    with pytest.raises(ConfigurationError, match="MSAMP is not driven"):
        make_fp8("cpu", None, FP8BackendType.MSAMP, None, gathers=False)
