# SPDX-License-Identifier: Apache-2.0
"""Quantised models: which layers are replaced, where they go, and how far their outputs are from the plain model's."""

import copy
import sys

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from accelerate.big_modeling import init_empty_weights
from accelerate.config.quantization import BnbQuantizationConfig
from accelerate.placement import quantize
from accelerate.placement.quantize import (
    get_keys_to_not_convert,
    has_4bit_bnb_layers,
    load_and_quantize_model,
)

EIGHT = {"load_in_8bit": True, "torch_dtype": "fp32"}
FOUR = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "fp32"}
SPREAD = {"first": "cpu", "norm": "cpu", "second": "disk", "head": "cpu"}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(64, 128)
        self.norm = nn.LayerNorm(128)
        self.second = nn.Linear(128, 64)
        self.head = nn.Linear(64, 8)

    def forward(self, x):
        return self.head(self.second(self.norm(self.first(x))))


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Model().eval()


@pytest.fixture
def weights(model, tmp_path):
    path = tmp_path / "model.safetensors"
    save_file(model.state_dict(), path, metadata={"format": "pt"})
    return path


def empty():
    with init_empty_weights():
        return Model().eval()


def kinds(model):
    return {name: type(module).__name__ for name, module in model.named_children()}


def test_the_output_layer_and_tied_layers_stay(model):
    assert get_keys_to_not_convert(model) == ["head"]
    model.first.weight = model.second.weight
    assert get_keys_to_not_convert(model) == ["first", "head", "second"]
    body = Model()
    body.base_model_prefix = "model"
    assert get_keys_to_not_convert(body) == []
    body.model = nn.Linear(2, 2)
    assert get_keys_to_not_convert(body) == ["model"]


def test_without_the_package(model, monkeypatch):
    monkeypatch.setattr(quantize, "is_8bit_bnb_available", lambda: False)
    monkeypatch.setattr(quantize, "is_4bit_bnb_available", lambda: False)
    for options, bits in ((EIGHT, 8), (FOUR, 4)):
        with pytest.raises(ImportError, match=f"quantizing to {bits} bits needs bitsandbytes"):
            load_and_quantize_model(model, BnbQuantizationConfig(**options))
    monkeypatch.setitem(sys.modules, "bitsandbytes.nn", None)
    assert not has_4bit_bnb_layers(model)


class TestWithBitsandbytes:
    @pytest.fixture(autouse=True)
    def package(self):
        return pytest.importorskip("bitsandbytes")

    @pytest.mark.parametrize(
        "options, layer, error", [(EIGHT, "Linear8bitLt", 0.02), (FOUR, "Linear4bit", 0.12)]
    )
    @pytest.mark.parametrize("device_map", ["loaded", None, "auto", "sequential", SPREAD], ids=str)
    def test_every_way(self, model, weights, options, layer, error, device_map, tmp_path):
        config = BnbQuantizationConfig(**options)
        if device_map == "loaded":
            quantised = load_and_quantize_model(copy.deepcopy(model), config)
        else:
            folder = tmp_path / "offload"
            quantised = load_and_quantize_model(
                empty(), config, weights, device_map=device_map, offload_folder=folder
            )
        # 4-bit layers are not offloaded: those are kept as they are.
        spread = device_map is SPREAD
        second = "Linear" if spread and layer == "Linear4bit" else layer
        assert kinds(quantised) == {
            "first": layer,
            "norm": "LayerNorm",
            "second": second,
            "head": "Linear",
        }
        assert quantised.second.weight.device.type == ("meta" if spread else "cpu")
        if spread and layer == "Linear8bitLt":
            assert (tmp_path / "offload" / "second.weight.dat").stat().st_size == 64 * 128
        assert (
            has_4bit_bnb_layers(quantised) == (layer == "Linear4bit") == quantised.is_loaded_in_4bit
        )
        x = torch.randn(4, 64)
        for _ in range(2):
            far = (quantised(x) - model(x)).abs().max()
            assert 0 < far < error
        assert quantised.second.weight.device.type == ("meta" if spread else "cpu")

    def test_an_offloaded_8bit_layer_gives_what_a_resident_one_gives(self, weights, tmp_path):
        config = BnbQuantizationConfig(**EIGHT)
        x = torch.randn(4, 64)
        resident = load_and_quantize_model(empty(), config, weights, device_map={"": "cpu"})(x)
        spread = load_and_quantize_model(
            empty(), config, weights, device_map=SPREAD, offload_folder=tmp_path / "o"
        )(x)
        assert torch.equal(spread, resident)

    def test_modules_that_are_kept(self, model, weights):
        config = BnbQuantizationConfig(
            load_in_8bit=True, skip_modules=["first"], keep_in_fp32_modules=["second"]
        )
        quantised = load_and_quantize_model(empty(), config, weights, device_map={"": "cpu"})
        assert kinds(quantised)["head"] == "Linear8bitLt" and kinds(quantised)["first"] == "Linear"
        dtypes = {name: parameter.dtype for name, parameter in quantised.named_parameters()}
        assert dtypes["first.weight"] == dtypes["norm.weight"] == torch.float16
        assert dtypes["second.weight"] == dtypes["second.bias"] == torch.float32
        assert dtypes["head.weight"] == torch.int8

    def test_attention_of_torch_keeps_its_projection(self):
        model = nn.Sequential(nn.MultiheadAttention(8, 2), nn.Linear(8, 8), nn.Linear(8, 8))
        assert quantize.replace_linear_layers(model, BnbQuantizationConfig(**EIGHT), ["2"]) == 1
        assert type(model[0].out_proj).__name__ == "NonDynamicallyQuantizableLinear"

    def test_refused(self, model, weights, tmp_path):
        with pytest.raises(RuntimeError, match="`weights_location`"):
            load_and_quantize_model(empty(), BnbQuantizationConfig(**EIGHT))
        with pytest.raises(ValueError, match="offloaded, but 4-bit layers"):
            limits = {"cpu": 3000}
            load_and_quantize_model(
                empty(),
                BnbQuantizationConfig(**FOUR),
                weights,
                device_map="auto",
                max_memory=limits,
            )
        with pytest.raises(ValueError, match="please choose 'auto', 'balanced'"):
            load_and_quantize_model(
                empty(), BnbQuantizationConfig(**FOUR), weights, device_map="cuda"
            )
