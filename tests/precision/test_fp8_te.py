# SPDX-License-Identifier: Apache-2.0
"""fp8 through Transformer Engine, against an engine of the same interface that computes in full precision.

The package itself needs CUDA; what is ours is which layers are replaced, what is copied, and when autocast is on.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from accelerate.config.fp8 import TERecipeKwargs
from accelerate.core.errors import ConfigurationError
from accelerate.precision import fp8_te


class EngineLinear(nn.Linear):
    def __init__(self, inputs: int, outputs: int, bias: bool, params_dtype: torch.dtype, device: Any) -> None:
        super().__init__(inputs, outputs, bias=bias, dtype=params_dtype, device=device)
        if not bias:  # as the package does it: an empty tensor, and no parameter
            del self.bias
            self.bias = torch.empty(0)


class EngineNorm(nn.LayerNorm):
    def __init__(self, size: int, eps: float, params_dtype: torch.dtype, device: Any) -> None:
        super().__init__(size, eps=eps, dtype=params_dtype, device=device)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[bool, Any]]]:
    """The stand-in for the package; yields the (enabled, recipe) of each autocast entered."""
    entered: list[tuple[bool, Any]] = []

    @contextlib.contextmanager
    def fp8_autocast(enabled: bool, fp8_recipe: Any) -> Iterator[None]:
        entered.append((enabled, fp8_recipe))
        yield

    pytorch = ModuleType("transformer_engine.pytorch")
    pytorch.Linear, pytorch.LayerNorm, pytorch.fp8_autocast = EngineLinear, EngineNorm, fp8_autocast
    for name in ("LayerNormLinear", "LayerNormMLP", "TransformerLayer"):
        setattr(pytorch, name, type(name, (nn.Module,), {}))
    recipe = ModuleType("transformer_engine.common.recipe")
    recipe.Format = SimpleNamespace(HYBRID="hybrid!", E4M3="e4m3!")
    recipe.DelayedScaling = lambda **options: ("delayed", options)
    recipe.MXFP8BlockScaling = lambda **options: ("blocks", options)
    package, common = ModuleType("transformer_engine"), ModuleType("transformer_engine.common")
    package.pytorch, package.common, common.recipe = pytorch, common, recipe
    for module in (package, pytorch, common, recipe):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for place in ("core.imports", "config.fp8"):
        monkeypatch.setattr(f"accelerate.{place}.is_available", lambda name: True)
    yield entered


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(16, 32, bias=False), nn.LayerNorm(32, eps=1e-3), nn.Linear(32, 16), nn.Linear(16, 7)
    )
    model[2].weight.requires_grad_(False)
    return model


def test_layers_are_replaced_and_come_back_with_their_values(engine: list[tuple[bool, Any]]) -> None:
    model, plain, x = make_model(), make_model(), torch.randn(4, 16)
    fp8_te.convert_model(model)
    assert [type(layer) for layer in model] == [EngineLinear, EngineNorm, EngineLinear, nn.Linear]
    assert fp8_te.has_transformer_engine_layers(model) and not fp8_te.has_transformer_engine_layers(plain)
    assert model[1].eps == 1e-3 and not model[2].weight.requires_grad
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(model.get_parameter(name), parameter, rtol=0, atol=0)
    fp8_te.convert_model(model, to_transformer_engine=False)
    assert [type(layer) for layer in model] == [nn.Linear, nn.LayerNorm, nn.Linear, nn.Linear]
    assert model[0].bias is None
    torch.testing.assert_close(model(x), plain(x), rtol=0, atol=0)


def test_either_kind_of_layer_may_be_left(engine: list[tuple[bool, Any]]) -> None:
    model = make_model()
    fp8_te.convert_model(model, _convert_linear=False)
    assert [type(layer) for layer in model] == [nn.Linear, EngineNorm, nn.Linear, nn.Linear]


def test_autocast_is_on_while_training_and_in_evaluation_only_when_asked(
    engine: list[tuple[bool, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_FP8_MARGIN", "2")  # a handler's values may come from variables
    for during_eval in (False, True):
        engine.clear()
        model, x = make_model(), torch.randn(4, 16)
        wanted = model(x)
        handler = TERecipeKwargs(use_autocast_during_eval=during_eval, fp8_format="HYBRID")
        assert fp8_te.apply_fp8_autowrap(model, handler) is model
        torch.testing.assert_close(model(x), wanted, rtol=0, atol=0)
        model.eval()
        model(x)
        assert [enabled for enabled, _ in engine] == [True, during_eval]
        kind, options = engine[0][1]
        assert kind == "delayed" and (options["fp8_format"], options["margin"]) == ("hybrid!", 2)


def test_block_scaling_takes_no_history(engine: list[tuple[bool, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8_te, "is_transformer_engine_mxfp8_available", lambda: True)
    handler = TERecipeKwargs(use_mxfp8_block_scaling=True, fp8_format="E4M3")
    assert fp8_te.make_recipe(handler) == ("blocks", {"fp8_format": "e4m3!", "margin": 0})
    with pytest.raises(ConfigurationError, match="amax_history_len"):
        fp8_te.make_recipe(TERecipeKwargs(use_mxfp8_block_scaling=True, amax_history_len=16))
    monkeypatch.setattr(fp8_te, "is_transformer_engine_mxfp8_available", lambda: False)
    with pytest.raises(ConfigurationError, match=r"2\.1"):
        fp8_te.make_recipe(handler)


def test_without_the_engine_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accelerate.core.imports.is_available", lambda name: False)
    with pytest.raises(ImportError, match="pip install transformer_engine"):
        fp8_te.convert_model(make_model())
