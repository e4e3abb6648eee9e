# SPDX-License-Identifier: Apache-2.0
"""fp8 through torchao: which layers are converted, what they compute, and what is said without the package."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch import nn

from accelerate.precision import fp8

needs_torchao = pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None, reason="needs torchao"
)


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
