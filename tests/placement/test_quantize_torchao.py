# SPDX-License-Identifier: Apache-2.0
"""Weights quantized by torchao: offloaded, streamed and quantized while loading, bit-equal to the resident model."""

import copy
import json

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from accelerate.big_modeling import cpu_offload, disk_offload, dispatch_model, init_empty_weights
from accelerate.core.errors import ConfigurationError
from accelerate.core.imports import is_available
from accelerate.placement import streaming
from accelerate.placement.align import get_state_dict_offloaded_model
from accelerate.placement.module_hooks import remove_hook_from_submodules
from accelerate.placement.quantize import load_and_quantize_model
from accelerate.placement.subclasses import is_quantized_tensor

pytestmark = pytest.mark.skipif(not is_available("torchao"), reason="torchao is not installed")


def config(name):
    from torchao.quantization import (
        Float8WeightOnlyConfig,
        Int8WeightOnlyConfig,
        IntxWeightOnlyConfig,
        PerGroup,
    )

    if name == "int4":
        prototype = pytest.importorskip("torchao.prototype.quantization.int4")
        return prototype.PrototypeInt4WeightOnlyConfig(group_size=32)
    if name == "intx":
        return IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32))
    return Int8WeightOnlyConfig() if name == "int8" else Float8WeightOnlyConfig()


KINDS = ["int8", "float8", "int4", "intx"]
SPREAD = {"0": "cpu", "1": "cpu", "2": "disk", "3": "disk", "4": "cpu"}


def plain():
    torch.manual_seed(0)
    layers = [nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64)]
    return nn.Sequential(*layers).bfloat16().eval()


def quantized(kind):
    from torchao.quantization import quantize_

    model = plain()
    quantize_(
        model, config(kind), lambda module, name: isinstance(module, nn.Linear) and name != "4"
    )
    return model


@pytest.fixture
def x():
    torch.manual_seed(1)
    return torch.randn(3, 64, dtype=torch.bfloat16)


@torch.no_grad()
def outputs(model, x):
    # Twice: the second forward uses what was fetched ahead.
    return torch.stack([model(x), model(x)])


@pytest.mark.parametrize("kind", KINDS)
def test_offloaded_equals_resident(kind, x, tmp_path, monkeypatch):
    monkeypatch.setattr(streaming, "MINIMUM", 0)
    model = quantized(kind)
    expected = outputs(model, x)
    assert torch.equal(outputs(cpu_offload(copy.deepcopy(model)), x), expected)
    disk = disk_offload(copy.deepcopy(model), tmp_path / "all")
    assert disk[0].weight.is_meta
    assert torch.equal(outputs(disk, x), expected)
    spread = dispatch_model(copy.deepcopy(model), SPREAD, offload_dir=tmp_path / "some")
    assert torch.equal(outputs(spread, x), expected)
    assert not is_quantized_tensor(spread[3].weight)
    # A file that torch reads without running code, in an index in JSON.
    entry = json.loads((tmp_path / "some" / "index.json").read_text())["2.weight"]
    assert entry["shape"] == list(model[2].weight.shape)
    stored = torch.load(tmp_path / "some" / "2.weight.dat", weights_only=True)
    assert type(stored) is type(model[2].weight.data)


def test_the_inner_tensors_are_fetched_ahead(x, tmp_path, monkeypatch):
    monkeypatch.setattr(streaming, "MINIMUM", 0)
    read = []
    fetch = streaming._read
    monkeypatch.setattr(
        streaming, "_read", lambda request: read.append(request.names) or fetch(request)
    )
    model = disk_offload(quantized("int8"), tmp_path)
    expected = outputs(quantized("int8"), x)
    for _ in range(3):
        assert torch.equal(outputs(model, x), expected)
    assert any("weight" in names for names in read)


def test_tied_quantized_weights_are_not_mixed_up(x, tmp_path):
    from torchao.quantization import quantize_

    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4))).bfloat16().eval()
    quantize_(model, config("int8"))
    model[3].weight = model[0].weight
    expected = outputs(model, x)
    assert torch.equal(outputs(cpu_offload(copy.deepcopy(model)), x), expected)
    assert torch.equal(outputs(disk_offload(copy.deepcopy(model), tmp_path / "a"), x), expected)
    places = {"0": "cpu", "1": "disk", "2": "cpu", "3": "disk"}
    assert torch.equal(
        outputs(dispatch_model(model, places, offload_dir=tmp_path / "b"), x), expected
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "device_map", [None, SPREAD, {"": "disk"}], ids=["resident", "spread", "disk"]
)
def test_quantized_while_loading(kind, device_map, x, tmp_path):
    save_file(plain().state_dict(), tmp_path / "model.safetensors", metadata={"format": "pt"})
    with init_empty_weights():
        model = plain()
    options = {"device_map": device_map, "offload_folder": tmp_path / "o"}
    load_and_quantize_model(model, config(kind), tmp_path / "model.safetensors", **options)
    if device_map is None:
        assert is_quantized_tensor(model[0].weight) and not is_quantized_tensor(model[4].weight)
    assert torch.equal(outputs(model, x), outputs(quantized(kind), x))


def test_only_one_weight_at_a_time_is_in_full_precision(tmp_path, monkeypatch):
    import torchao.quantization

    save_file(plain().state_dict(), tmp_path / "model.safetensors", metadata={"format": "pt"})
    with init_empty_weights():
        model = plain()
    present = []
    quantize_ = torchao.quantization.quantize_

    def watch(layer, config):
        present.append(
            [
                name
                for name in ("0", "2")
                if type(model.get_submodule(name).weight.data) is torch.Tensor
            ]
        )
        present[-1] = [name for name in present[-1] if not model.get_submodule(name).weight.is_meta]
        quantize_(layer, config)

    monkeypatch.setattr(torchao.quantization, "quantize_", watch)
    load_and_quantize_model(
        model, config("int8"), tmp_path / "model.safetensors", skip_modules=["4"]
    )
    assert present == [[], []]


def test_what_cannot_be(tmp_path):
    from torchao.quantization import Int4WeightOnlyConfig

    with pytest.raises(
        ConfigurationError, match=r"cannot quantize 0\.weight .* on cpu with Int4WeightOnlyConfig"
    ):
        load_and_quantize_model(
            plain(), Int4WeightOnlyConfig(group_size=32), device_map={"": "cpu"}
        )
    with pytest.raises(ConfigurationError, match="not have a linear layer"):
        load_and_quantize_model(plain(), config("int8"), skip_modules=["0", "2", "4"])
    with pytest.raises(
        ConfigurationError, match="BnbQuantizationConfig or a torchao configuration"
    ):
        load_and_quantize_model(plain(), "int8")
    with pytest.raises(RuntimeError, match="weights_location"), init_empty_weights():
        load_and_quantize_model(plain(), config("int8"))


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_taken_back_from_disk(kind, x, tmp_path):
    model = quantized(kind)
    expected = outputs(model, x)
    spread = dispatch_model(model, SPREAD, offload_dir=tmp_path / "o")
    state = get_state_dict_offloaded_model(spread)
    assert type(state["2.weight"]) is type(state["0.weight"])
    spread = dispatch_model(spread, {"": "disk"}, offload_dir=tmp_path / "p")
    remove_hook_from_submodules(spread)
    restored = quantized(kind)
    restored.load_state_dict(state, assign=True)
    assert torch.equal(outputs(restored, x), expected)
    assert torch.equal(outputs(dispatch_model(spread, {"": "cpu"}), x), expected)


def test_activations_that_are_quantized_too(x, tmp_path):
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

    model = plain()
    quantize_(model, Int8DynamicActivationInt8WeightConfig())
    expected = outputs(model, x)
    assert torch.equal(outputs(disk_offload(model, tmp_path), x), expected)
