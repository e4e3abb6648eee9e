# SPDX-License-Identifier: Apache-2.0
"""fp8: which backend computes, which layers it converts, and what is said where none can."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from accelerate.config.precision import AORecipeKwargs, MSAMPRecipeKwargs
from accelerate.core.enums import FP8BackendType
from accelerate.core.errors import ConfigurationError, PrepareError
from accelerate.core.imports import is_available
from accelerate.parallel.sharded_optimizer import repoint_all
from accelerate.precision import fp8
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
    with pytest.raises(ConfigurationError, match="MSAMP is not supported"):
        make_fp8("cpu", None, FP8BackendType.MSAMP, None, gathers=False)


# --- through torchao


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.Linear(32, 20), nn.Linear(20, 16)
    )


def test_the_filter_leaves_the_ends_and_odd_sizes() -> None:
    model = make_model()
    first, last = fp8.find_first_last_linear_layers(model)
    assert (first, last) == ("0", "4")
    taken = [
        name
        for name, layer in model.named_modules()
        if fp8.filter_linear_layers(layer, name, [first, last])
    ]
    assert taken == ["2"]
    assert fp8.find_first_last_linear_layers(nn.ReLU()) == (None, None)


def test_without_torchao_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accelerate.core.imports.is_available", lambda name: False)
    for call in (fp8.has_ao_layers, fp8.convert_model_to_fp8_ao):
        with pytest.raises(ImportError, match="pip install torchao"):
            call(make_model())


@needs_torchao
def test_converted_layers_compute_in_float8_with_the_same_parameters() -> None:
    from torchao.float8 import Float8LinearConfig

    plain, model = make_model(), make_model()
    parameters = {name: id(parameter) for name, parameter in model.named_parameters()}
    assert not fp8.has_ao_layers(model)
    # The emulation rounds to float8 and multiplies in full precision: it runs on any device.
    fp8.convert_model_to_fp8_ao(model, config=Float8LinearConfig(emulate=True))
    assert fp8.has_ao_layers(model)
    assert [type(layer).__name__ for layer in model] == [
        "Linear",
        "ReLU",
        "Float8Linear",
        "Linear",
        "Linear",
    ]
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == parameters
    x = torch.randn(16, 16)
    difference = (model(x) - plain(x)).abs().max().item()
    assert 0 < difference < 0.05, "float8 rounds: near the full precision, and not equal to it"
    model(x).sum().backward()
    assert model[2].weight.grad is not None


@needs_torchao
def test_a_filter_of_the_user_decides_alone() -> None:
    model = make_model()
    fp8.convert_model_to_fp8_ao(model, module_filter_func=lambda layer, name: name == "0")
    assert [
        name for name, layer in model.named_children() if type(layer).__name__ == "Float8Linear"
    ] == ["0"]
    model = make_model()
    fp8.convert_model_to_fp8_ao(model, module_filter_func=fp8.filter_first_and_last_linear_layers)
    assert [
        name for name, layer in model.named_children() if type(layer).__name__ == "Float8Linear"
    ] == ["2"]
