# SPDX-License-Identifier: Apache-2.0
"""fp8 through Transformer Engine, against an engine of the same interface that computes in full precision.

The package itself needs CUDA; what is ours is which layers are replaced, what is copied, and when autocast is on.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accelerate.config.precision import TERecipeKwargs
from accelerate.core import imports
from accelerate.core.errors import ConfigurationError
from accelerate.precision import fp8_te

STAND_INS = Path(__file__).parents[1] / "stand_ins"


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The stand-in for the package, installed; what it notes is empty."""
    monkeypatch.syspath_prepend(STAND_INS)
    for cached in (imports.is_available, imports.version_of):
        cached.cache_clear()
    import transformer_engine.pytorch as installed

    yield installed
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformer_engine"]:
        del sys.modules[name]
    for cached in (imports.is_available, imports.version_of):
        cached.cache_clear()


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(16, 32, bias=False),
        nn.LayerNorm(32, eps=1e-3),
        nn.Linear(32, 16),
        nn.Linear(16, 7),
    )
    model[2].weight.requires_grad_(False)
    return model


def test_layers_are_replaced_and_come_back_with_their_values(engine: Any) -> None:
    model, plain, x = make_model(), make_model(), torch.randn(4, 16)
    fp8_te.convert_model(model)
    assert [type(layer) for layer in model] == [
        engine.Linear,
        engine.LayerNorm,
        engine.Linear,
        nn.Linear,
    ]
    assert fp8_te.has_transformer_engine_layers(model) and not fp8_te.has_transformer_engine_layers(
        plain
    )
    assert model[1].eps == 1e-3 and not model[2].weight.requires_grad
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(model.get_parameter(name), parameter, rtol=0, atol=0)
    fp8_te.convert_model(model, to_transformer_engine=False)
    assert [type(layer) for layer in model] == [nn.Linear, nn.LayerNorm, nn.Linear, nn.Linear]
    assert model[0].bias is None
    torch.testing.assert_close(model(x), plain(x), rtol=0, atol=0)


def test_autocast_is_on_while_training_and_in_evaluation_only_when_asked(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformer_engine.common import recipe

    monkeypatch.setenv("ACCELERATE_FP8_MARGIN", "2")  # a handler's values may come from variables
    for during_eval in (False, True):
        engine.entered.clear()
        engine.computed.clear()
        model, x = make_model(), torch.randn(4, 16)
        wanted = model(x)
        handler = TERecipeKwargs(
            use_autocast_during_eval=during_eval, amax_history_len=16, amax_compute_algo="max"
        )
        assert fp8_te.apply_fp8_autowrap(model, handler) is model
        torch.testing.assert_close(model(x), wanted, rtol=0, atol=0)
        model.eval()
        model(x)
        assert [enabled for enabled, _ in engine.entered] == [True, during_eval]
        assert engine.entered[0][1] == recipe.DelayedScaling(2, recipe.Format.HYBRID, 16, "max")


def test_block_scaling_takes_no_history(engine: Any) -> None:
    from transformer_engine.common import recipe

    handler = TERecipeKwargs(use_mxfp8_block_scaling=True, fp8_format="E4M3")
    assert fp8_te.make_recipe(handler) == recipe.MXFP8BlockScaling(0, recipe.Format.E4M3)
    with pytest.raises(ConfigurationError, match="amax_history_len"):
        fp8_te.make_recipe(TERecipeKwargs(use_mxfp8_block_scaling=True, amax_history_len=16))


def test_the_engine_says_what_it_cannot_do(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformer_engine.common import recipe

    with pytest.raises(AssertionError, match="E5M2"):
        fp8_te.make_recipe(TERecipeKwargs(fp8_format="E5M2"))
    kept = TERecipeKwargs(override_linear_precision=(False, False, True))
    with pytest.raises(TypeError, match="override_linear_precision"):
        fp8_te.make_recipe(kept)

    def earlier(override_linear_precision: Any, **options: Any) -> Any:
        return override_linear_precision

    monkeypatch.setattr(recipe, "DelayedScaling", earlier)
    assert fp8_te.make_recipe(kept) == (False, False, True)


def test_without_the_engine_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accelerate.core.imports.is_available", lambda name: False)
    with pytest.raises(ImportError, match="pip install transformer_engine"):
        fp8_te.convert_model(make_model())
