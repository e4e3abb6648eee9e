# SPDX-License-Identifier: Apache-2.0
"""Big models: built without memory, dispatched, offloaded, loaded in parts; outputs equal the plain model's."""

import copy
import json
import logging
import os

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from accelerate import Accelerator
from accelerate.big_modeling import (
    attach_layerwise_casting_hooks,
    cpu_offload,
    cpu_offload_with_hook,
    disk_offload,
    dispatch_model,
    infer_auto_device_map,
    init_empty_weights,
    init_on_device,
    load_checkpoint_and_dispatch,
)
from accelerate.core.errors import PrepareError
from accelerate.hooks import remove_hook_from_submodules
from accelerate.placement.align import get_state_dict_offloaded_model

META = torch.device("meta")
SPREAD = {"embed": "cpu", "norm": "disk", "body": "disk", "head": "cpu"}


class Model(nn.Module):
    """An embedding tied to the output layer, blocks between, and buffers that no state dict has."""

    def __init__(self, tied=True):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.norm = nn.BatchNorm1d(8)
        self.body = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
        self.head = nn.Linear(8, 11, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.norm.register_buffer("scale", torch.full((8,), 2.0), persistent=False)

    def forward(self, ids, bias=None):
        x = self.norm(self.embed(ids).flatten(0, 1)) * self.norm.scale
        logits = self.head(self.body(x))
        return {"logits": logits if bias is None else logits + bias}


@pytest.fixture
def model():
    torch.manual_seed(0)
    model = Model().eval()
    model.norm.running_mean.normal_()
    return model


@pytest.fixture
def ids():
    return torch.randint(0, 11, (2, 5))


@pytest.fixture
def plain(model, ids):
    return model(ids)["logits"].detach()


def test_init_empty_weights(monkeypatch):
    with init_empty_weights():
        model = Model()
        huge = nn.Linear(30_000, 30_000)
        outside = torch.zeros(2)
    assert {tensor.device for tensor in [*model.parameters(), huge.weight]} == {META}
    assert {buffer.device.type for buffer in model.buffers()} == {outside.device.type} == {"cpu"}
    assert model.head.weight is model.embed.weight and list(
        model.norm._non_persistent_buffers_set
    ) == ["scale"]
    assert nn.Linear(2, 2).weight.device.type == "cpu"
    with init_empty_weights(include_buffers=True):
        model = Model()
    assert {tensor.device for tensor in model.state_dict().values()} == {META}
    monkeypatch.setenv("ACCELERATE_INIT_INCLUDE_BUFFERS", "1")
    with init_empty_weights():
        assert Model().norm.running_mean.device == META
    with pytest.raises(KeyError), init_on_device("meta", include_buffers=True):
        raise KeyError
    assert Model().norm.running_mean.device.type == "cpu"


def test_init_keeps_what_a_parameter_is():
    class Marked(nn.Parameter):
        """A parameter of a class of its own."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.frozen = nn.Parameter(torch.zeros(2), requires_grad=False)
            self.marked = Marked(torch.zeros(2))
            self.none = None
            self.register_parameter("empty", None)

    with init_empty_weights():
        layer = Layer()
    assert not layer.frozen.requires_grad and type(layer.marked) is Marked and layer.empty is None
    assert layer.marked.device == META


@pytest.mark.parametrize("buffers", [False, True])
@pytest.mark.parametrize("way", ["cpu", "disk"])
def test_offload_of_the_whole_model(model, ids, plain, way, buffers, tmp_path):
    state = copy.deepcopy(model.state_dict())
    if way == "cpu":
        assert cpu_offload(model, offload_buffers=buffers) is model
    else:
        assert disk_offload(model, tmp_path / "offload", offload_buffers=buffers) is model
    assert {parameter.device for parameter in model.parameters()} == {META}
    assert model.norm.running_mean.device.type == ("meta" if buffers else "cpu")
    for _ in range(2):
        assert torch.equal(model(ids)["logits"], plain)
    assert {parameter.device for parameter in model.parameters()} == {META}
    assert all(
        torch.equal(value, state[name])
        for name, value in get_state_dict_offloaded_model(model).items()
    )
    remove_hook_from_submodules(model)
    assert torch.equal(model(ids)["logits"], plain)


@pytest.mark.parametrize("way", ["cpu", "disk", "map"])
def test_an_offloaded_model_is_prepared_in_place(
    model, ids, plain, way, tmp_path, caplog, monkeypatch
):
    if way == "cpu":
        cpu_offload(model)
    elif way == "disk":
        disk_offload(model, tmp_path)
    else:
        dispatch_model(model, {"": "disk"}, offload_dir=tmp_path)
    accelerator = Accelerator(cpu=True)
    assert accelerator.prepare_model(model, evaluation_mode=True) is model
    assert torch.equal(model(ids)["logits"], plain)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    prepared, optimizer = accelerator.prepare(model, optimizer)
    logits = prepared(ids)["logits"]
    assert torch.equal(logits, plain)
    accelerator.backward(logits.sum())
    optimizer.step()
    assert "parameters are offloaded" in caplog.text
    monkeypatch.setattr(Accelerator, "use_distributed", True)
    with pytest.raises(PrepareError, match=r"Model is offloaded.*several processes"):
        Accelerator(cpu=True).prepare(model)


def test_disk_offload_uses_what_the_folder_holds(model, ids, plain, tmp_path):
    disk_offload(model, tmp_path)
    with init_empty_weights():
        other = Model().eval()
    disk_offload(other, tmp_path, execution_device="cpu")
    other.norm.load_state_dict(
        {**other.norm.state_dict(), "running_mean": model.norm.running_mean}, strict=False
    )
    assert torch.equal(other(ids)["logits"], plain)


def test_cpu_offload_with_hook(ids, plain, model):
    model, hook = cpu_offload_with_hook(model)
    assert torch.equal(model(ids)["logits"], plain)
    hook.offload()
    hook.remove()
    assert not hasattr(model, "_hf_hook") and torch.equal(model(ids)["logits"], plain)


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu")])
def test_a_model_on_one_device_has_no_hooks(model, ids, plain, device):
    assert dispatch_model(model, {"": device}) is model
    assert (
        model.hf_device_map == {"": device}
        and not hasattr(model, "_hf_hook")
        and "to" not in vars(model)
    )
    dispatch_model(
        model, {"embed": device, "norm": device, "body": device, "head": device}, force_hooks=True
    )
    assert all(hasattr(module, "_hf_hook") for module in (model, model.embed, model.body[0]))
    assert torch.equal(model(ids)["logits"], plain)
    with torch.device("meta"):
        dispatched = dispatch_model(Model(), {"": "meta"})
    assert dispatched.embed.weight.device == META


@pytest.mark.parametrize("buffers", [False, True])
@pytest.mark.parametrize(
    "device_map",
    [
        SPREAD,
        {**SPREAD, "embed": "disk"},
        {**SPREAD, "head": "disk"},
        {"": "disk"},
        {"": "disk", "body.0": "cpu"},
        {"": "cpu", "embed": "disk", "body": "disk", "body.0": "cpu", "body.2.weight": "cpu"},
    ],
    ids=str,
)
def test_dispatch_over_cpu_and_disk(model, ids, plain, device_map, buffers, tmp_path):
    state = copy.deepcopy(model.state_dict())
    dispatch_model(model, device_map, offload_dir=tmp_path, offload_buffers=buffers)
    assert model.hf_device_map == device_map and model._hf_hook.io_same_device
    for _ in range(2):
        assert torch.equal(model(ids)["logits"], plain)
    assert model.body[0].weight.device == (
        META
        if device_map.get("body.0", device_map.get("body", "disk")) == "disk"
        else torch.device("cpu")
    )
    whole = get_state_dict_offloaded_model(model)
    assert list(whole) == list(state) and all(
        torch.equal(whole[name], value) for name, value in state.items()
    )
    twin = copy.deepcopy(model)
    del model
    assert torch.equal(twin(ids)["logits"], plain)
    remove_hook_from_submodules(twin)
    assert torch.equal(twin(ids)["logits"], plain) and {
        p.device.type for p in twin.parameters()
    } == {"cpu"}


def test_a_tied_weight_stays_with_its_twin_that_is_there(model, ids, plain, tmp_path):
    dispatch_model(model, {**SPREAD, "head": "disk"}, offload_dir=tmp_path)
    assert "embed.weight.dat" not in os.listdir(tmp_path)
    for _ in range(2):
        assert model.head.weight is model.embed.weight and model.head.weight.device.type == "cpu"
        assert torch.equal(model(ids)["logits"], plain)
    with torch.no_grad():
        model.embed.weight.mul_(2)
    assert not torch.equal(model(ids)["logits"], plain)  # one weight, not two
    remove_hook_from_submodules(model)
    assert model.head.weight is model.embed.weight


def test_a_checkpoint_holds_a_tied_weight_under_one_name(model, ids, plain, tmp_path):
    state = model.state_dict()
    del state["head.weight"]
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    names = [name for name, _ in model.named_parameters()]
    index = {
        name: {
            "safetensors_file": str(tmp_path / "model.safetensors"),
            "weight_name": name,
            "dtype": "float32",
        }
        for name in names
    }
    with init_empty_weights():
        empty = Model().eval()
    empty.norm.running_mean = model.norm.running_mean
    dispatch_model(empty, {"": "disk"}, offload_index=index)
    assert torch.equal(empty(ids)["logits"], plain)


def test_dispatch_refuses_what_cannot_work(model, tmp_path):
    with pytest.raises(ValueError, match=r"device .*parameters: norm\.weight, .*, head\.weight"):
        dispatch_model(model, {"embed": "cpu", "body": "cpu"})
    with pytest.raises(ValueError, match=r"`offload_dir` .*: norm, body\."):
        dispatch_model(model, SPREAD)
    with pytest.raises(ValueError, match=r"offloaded: the entire model\."):
        dispatch_model(model, {"": "disk"})
    with init_empty_weights():
        empty = Model()
    with pytest.raises(ValueError, match=r"norm\.weight .*meta device"):
        dispatch_model(empty, SPREAD, offload_dir=tmp_path)


def test_a_dispatched_model_is_not_moved(model, tmp_path, caplog):
    dispatch_model(model, {**SPREAD}, offload_dir=tmp_path)
    for move in (lambda: model.to("cpu"), lambda: model.cuda(), lambda: model.to(torch.float16)):
        caplog.clear()
        with (
            caplog.at_level(logging.WARNING),
            pytest.raises(RuntimeError, match="offloaded to cpu or disk"),
        ):
            move()
        assert "model that is dispatched" in caplog.text
    remove_hook_from_submodules(model)
    assert not {"to", "cuda"} & set(vars(model))
    model.to(torch.float64)
    dispatch_model(model, {"": "cpu"}, force_hooks=True)
    with caplog.at_level(logging.WARNING):
        assert model.to("cpu") is model  # a warning, no error: nothing is offloaded


def test_two_accelerators_the_cpu_and_a_tied_weight(model):
    """With tensors that have no data an operation over two devices is an error, on any machine."""
    fake = FakeTensorMode()
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            data = fake.from_tensor(parameter.detach(), static_shapes=True)
            module._parameters[name] = nn.Parameter(data, requires_grad=False)
        module._buffers.update(
            {name: fake.from_tensor(value) for name, value in module._buffers.items()}
        )
    ids, bias = (
        fake.from_tensor(torch.zeros(2, 5, dtype=torch.long)),
        fake.from_tensor(torch.zeros(11)),
    )
    with fake:
        spread = {
            "embed": "cuda:0",
            "norm": "cpu",
            "body.0": "cuda:1",
            "body.1": "cuda:1",
            "body.2": "cpu",
        }
        dispatch_model(model, {**spread, "head": "cuda:1"}, skip_keys="bias", main_device="cuda:1")
        assert (
            str(model.embed.weight.device) == "cuda:0" and str(model.head.weight.device) == "cuda:1"
        )
        # Offloaded weights wait for the forward, buffers do not.
        assert model.norm.weight.device == model.body[2].weight.device == META
        assert str(model.norm.running_mean.device) == str(model.norm.scale.device) == "cuda:1"
        assert model.norm._hf_hook.execution_device == "cuda:1"
        output = model(ids)["logits"]
        assert output.device == ids.device and output.shape == (10, 11)
        assert model.body[2].weight.device == META
        with pytest.raises(RuntimeError, match=r"same device|different devices"):
            model(ids, bias=bias)  # left where it is, as asked
        remove_hook_from_submodules(model)
        assert model.body[2].weight.device.type == "cpu"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
def test_an_accelerator_the_cpu_and_the_disk(model, ids, tmp_path):
    plain = (
        copy.deepcopy(model).to(torch.accelerator.current_accelerator())(ids.to(0))["logits"].cpu()
    )
    device_map = {
        "embed": 0,
        "norm": "cpu",
        "body.0": 0,
        "body.1": 0,
        "body.2": "disk",
        "head": "cpu",
    }
    dispatch_model(model, device_map, offload_dir=tmp_path)
    for _ in range(2):
        assert torch.equal(model(ids)["logits"], plain)  # back where the input came from
        assert model.norm.weight.device == model.body[2].weight.device == META
        assert model.embed.weight.device.index == model.norm.running_mean.device.index == 0
        assert model.head.weight is model.embed.weight  # one copy there
    with init_empty_weights():
        huge = nn.Sequential(nn.Linear(100, 100), nn.Linear(100, 100))
    assert infer_auto_device_map(huge) == {"": 0}
    remove_hook_from_submodules(model)
    first, hook = cpu_offload_with_hook(nn.Linear(4, 4))
    second, _ = cpu_offload_with_hook(nn.Linear(4, 4), prev_module_hook=hook)
    assert second(first(torch.ones(1, 4))).device.type != "cpu"
    assert first.weight.device.type == "cpu" and second.weight.device.type != "cpu"


@pytest.fixture
def checkpoint(model, tmp_path):
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    state = model.state_dict()
    del state["head.weight"]
    weight_map = {}
    for part, prefix in enumerate(("embed", "norm", "body")):
        weights = {name: value for name, value in state.items() if name.startswith(prefix)}
        save_file(weights, folder / f"part-{part}.safetensors", metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(weights, f"part-{part}.safetensors"))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


@pytest.mark.parametrize(
    "device_map", ["auto", "balanced", "balanced_low_0", "sequential", {"": "cpu"}, SPREAD, None]
)
@pytest.mark.parametrize("limit", [None, 900])
def test_load_checkpoint_and_dispatch(model, ids, plain, checkpoint, device_map, limit, tmp_path):
    with init_empty_weights():
        empty = Model()
    loaded = load_checkpoint_and_dispatch(
        Model() if device_map is None else empty,
        checkpoint,
        device_map=device_map,
        max_memory=None if limit is None else {"cpu": limit},
        offload_folder=tmp_path / "offload",
        strict=True,
    ).eval()
    assert torch.equal(loaded(ids)["logits"], plain)
    assert hasattr(loaded, "hf_device_map") == (device_map is not None)
    if isinstance(device_map, str):
        assert ("disk" in loaded.hf_device_map.values()) == (limit is not None)
    assert loaded.head.weight is loaded.embed.weight


def test_load_checkpoint_and_dispatch_in_half_precision(model, ids, checkpoint, tmp_path):
    wanted = copy.deepcopy(model).half()(ids)["logits"]
    with init_empty_weights():
        empty = Model()
    loaded = load_checkpoint_and_dispatch(
        empty, checkpoint, device_map=SPREAD, offload_folder=tmp_path / "o", dtype=torch.float16
    ).eval()
    loaded.norm.scale = loaded.norm.scale.half()
    assert torch.equal(loaded(ids)["logits"], wanted)
    assert (tmp_path / "o" / "body.0.weight.dat").stat().st_size == 2 * 64


def test_layerwise_casting_of_linear_layers_alone(ids):
    def cast(**options):
        torch.manual_seed(0)
        model = Model(tied=False).eval()
        attach_layerwise_casting_hooks(model, torch.float8_e4m3fn, torch.float32, **options)
        return model, {
            name for name, module in model.named_modules() if hasattr(module, "_hf_hook")
        }

    model, cast_layers = cast()
    assert cast_layers == {"body.0", "body.2", "head"}
    assert (
        model.head.weight.dtype == torch.float8_e4m3fn and model.embed.weight.dtype == torch.float32
    )
    rounded = Model(tied=False).eval()
    state = model.state_dict()
    rounded.load_state_dict({name: value.float() for name, value in state.items()})
    assert torch.equal(model(ids)["logits"], rounded(ids)["logits"])
    assert cast(skip_modules_pattern="head")[1] == {"body.0", "body.2"}
    assert cast(skip_modules_pattern=["^head$", r"body\.0"])[1] == {"body.2"}
    assert (
        cast(skip_modules_classes=nn.Sequential)[1]
        == cast(skip_modules_classes=[{nn.Sequential}])[1]
        == {"head"}
    )


def _transformers_model(kind):
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 97, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    torch.manual_seed(0)
    if kind == "llama":
        layers = {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
        }
        config = transformers.LlamaConfig(**sizes, **layers, num_key_value_heads=2)
    else:
        config = transformers.GPT2Config(**sizes, n_embd=32, n_layer=3, n_head=4)
    return transformers.AutoModelForCausalLM, transformers.AutoModelForCausalLM.from_config(
        config
    ).eval()


@pytest.mark.parametrize(
    "kind, device_map",
    [
        ("llama", {"model": "cpu", "model.layers": "disk", "lm_head": "disk"}),
        (
            "gpt2",
            {
                "transformer": "disk",
                "transformer.wte": "cpu",
                "transformer.h.1": "cpu",
                "lm_head": "disk",
            },
        ),
        ("gpt2", "auto"),
    ],
    ids=["llama", "gpt2 tied", "gpt2 auto"],
)
def test_transformers_generates_over_cpu_and_disk(kind, device_map, tmp_path):
    cls, model = _transformers_model(kind)
    prompt = torch.randint(3, 97, (2, 7))
    options = {"max_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
    tokens, logits = model.generate(prompt, **options), model(prompt).logits
    model.save_pretrained(tmp_path / "model", max_shard_size="30KB")
    limits = {"max_memory": {"cpu": "150KB"}} if device_map == "auto" else {}
    loaded = cls.from_pretrained(
        tmp_path / "model", device_map=device_map, offload_folder=tmp_path / "offload", **limits
    )
    assert {"cpu", "disk"} <= set(loaded.hf_device_map.values())
    assert any(parameter.device == META for parameter in loaded.parameters())
    assert torch.equal(loaded(prompt).logits, logits) and torch.equal(
        loaded.generate(prompt, **options), tokens
    )
    # What is spread can be saved again.
    loaded.save_pretrained(tmp_path / "again")
    again = cls.from_pretrained(tmp_path / "again")
    assert all(
        torch.equal(value, again.state_dict()[name]) for name, value in model.state_dict().items()
    )
