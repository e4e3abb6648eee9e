# SPDX-License-Identifier: Apache-2.0
"""Mistakes in checkpoints, device maps and folders: an error that names the place, and a model that is as before."""

import copy
import json
import operator
import os
import pickle

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import accelerate
from accelerate import (
    cpu_offload,
    disk_offload,
    dispatch_model,
    infer_auto_device_map,
    init_empty_weights,
    load_checkpoint_and_dispatch,
    load_checkpoint_in_model,
)
from accelerate.core.errors import CheckpointError

PLACES = {"0": "cpu", "1": "disk", "2": "disk"}


def build(seed=1, size=8):
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(size, size) for _ in range(3)))


@pytest.fixture(params=["safetensors", "bin"])
def checkpoint(request, tmp_path):
    """Two shards and their index; `write` writes a shard."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()

    def write(number, weights):
        path = folder / f"shard-{number}.{request.param}"
        if request.param == "bin":
            torch.save(weights, path)
        else:
            save_file(weights, path, metadata={"format": "pt"})
        return path

    state = build(0).state_dict()
    shards = [
        {name: value for name, value in state.items() if (name[0] == "2") == bool(number)}
        for number in (0, 1)
    ]
    index = {
        name: write(number, shard).name for number, shard in enumerate(shards) for name in shard
    }
    (folder / f"model.{request.param}.index.json").write_text(json.dumps({"weight_map": index}))
    return folder, write, shards


@pytest.mark.parametrize("value", [3, None, [1], "gpt2"], ids=repr)
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("cpu_offload", ()),
        ("cpu_offload_with_hook", ()),
        ("disk_offload", ("folder",)),
        ("dispatch_model", ({"": "cpu"},)),
        ("infer_auto_device_map", ()),
        ("load_checkpoint_and_dispatch", ("folder",)),
        ("load_checkpoint_in_model", ("folder",)),
        ("prepare_pippy", ()),
        ("big_modeling.attach_layerwise_casting_hooks", (torch.float16, torch.float32)),
        ("utils.calculate_maximum_sizes", ()),
        ("utils.check_device_map", ({"": "cpu"},)),
        ("utils.compile_regions", ()),
        ("utils.compute_module_sizes", ()),
        ("utils.find_tied_parameters", ()),
        ("utils.set_module_tensor_to_device", ("weight", "cpu")),
    ],
)
def test_model_that_is_no_module(name, arguments, value):
    function = operator.attrgetter(name)(accelerate)
    with pytest.raises((AttributeError, TypeError, ValueError)):
        function(value, *arguments)


def remove(folder, write):
    next(folder.glob("shard-1.*")).unlink()


def cut(folder, write):
    path = next(folder.glob("shard-1.*"))
    path.write_bytes(path.read_bytes()[:-100])


def empty(folder, write):
    next(folder.glob("shard-1.*")).write_bytes(b"")


def take_weight(folder, write):
    write(1, {"2.bias": torch.zeros(8)})


def take_names(folder, write):
    for number in (0, 1):
        write(number, {f"layers.{number}": torch.zeros(8)})
    index = next(folder.glob("*.index.json"))
    index.write_text(
        json.dumps(
            {f"layers.{number}": next(folder.glob(f"shard-{number}.*")).name for number in (0, 1)}
        )
    )


def take_shape(folder, write):
    write(1, {"2.weight": torch.zeros(4, 8), "2.bias": torch.zeros(8)})


def unindexed(folder, write):
    next(folder.glob("*.index.json")).write_text("{")


def leave_the_folder(folder, write):
    next(folder.glob("*.index.json")).write_text(
        json.dumps({"weight_map": {"2.weight": "shards/../../secret"}})
    )


def name_a_pipe(folder, write):
    os.mkfifo(folder / "pipe.safetensors")
    next(folder.glob("*.index.json")).write_text(
        json.dumps({"weight_map": {"2.weight": "pipe.safetensors"}})
    )


def name_a_device(folder, write):
    (folder / "device.safetensors").symlink_to("/dev/zero")
    next(folder.glob("*.index.json")).write_text(
        json.dumps({"weight_map": {"2.weight": "device.safetensors"}})
    )


CHECKPOINTS = {
    leave_the_folder: "outside its folder",
    name_a_pipe: "names files that do not exist: .*pipe",
    name_a_device: "names files that do not exist: .*device",
    remove: r"index\.json names files that do not exist: .*shard-1",
    cut: "shard-1",
    empty: "shard-1.*(not a complete safetensors file|empty or incomplete)",
    take_weight: r"names .*shard-1.* for 2\.weight, but that file does not contain it",
    take_names: r"does not have any weight of Sequential: it has layers\.0, layers\.1",
    take_shape: r"2\.weight.*(checkpoint|does not fit)",
    unindexed: r"index\.json cannot be read",
}


@pytest.mark.parametrize("damage", CHECKPOINTS, ids=lambda damage: damage.__name__)
def test_a_checkpoint_that_cannot_be_loaded(checkpoint, damage, tmp_path):
    folder, write, shards = checkpoint
    index = next(folder.glob("*.index.json"))
    text = index.read_text()
    damage(folder, write)
    model = build()
    offload = tmp_path / "offload"
    with pytest.raises((RuntimeError, ValueError), match=CHECKPOINTS[damage]):
        load_checkpoint_in_model(build(), folder)
    with pytest.raises((RuntimeError, ValueError), match=CHECKPOINTS[damage]):
        load_checkpoint_and_dispatch(model, folder, PLACES, offload_folder=offload)
    check_unchanged(model)
    for places in (
        {"2.weight": "x" * 1_000_000},
        {"y" * 1_000_000: next(folder.glob("shard-0.*")).name},
    ):
        index.write_text(json.dumps({"weight_map": places}))
        with pytest.raises(CheckpointError) as raised:
            load_checkpoint_in_model(build(), folder, strict=True)
        assert len(str(raised.value)) < 2000
    index.write_text(text)
    for number in (0, 1):
        write(number, shards[number])
    load_checkpoint_and_dispatch(model, folder, PLACES, offload_folder=offload)
    torch.testing.assert_close(model(torch.ones(2, 8)), build(0)(torch.ones(2, 8)))


def check_unchanged(model):
    expected = build().state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
    assert not any(hasattr(module, "_hf_hook") for module in model.modules())


def in_the_way(folder):
    folder.write_text("")
    return folder


def of_another_model(folder, size=4):
    disk_offload(build(size=size), folder)
    return folder


OFFLOADS = {
    "a device that is not there": (
        lambda model, folder: dispatch_model(model, {"": "cuda:99"}),
        "cuda:99",
    ),
    "a word": (
        lambda model, folder: dispatch_model(model, {**PLACES, "1": "dsk"}, offload_dir=folder),
        "'dsk'",
    ),
    "a module without a device": (
        lambda model, folder: dispatch_model(model, {"0": "cpu"}),
        r"1\.weight",
    ),
    "main device": (
        lambda model, folder: dispatch_model(model, PLACES, "cuda:99", offload_dir=folder),
        "cuda:99",
    ),
    "cpu_offload": (lambda model, folder: cpu_offload(model, "cuda:99"), "cuda:99"),
    "disk_offload": (lambda model, folder: disk_offload(model, folder, "cuda:99"), "cuda:99"),
    "a file for a folder": (
        lambda model, folder: disk_offload(model, in_the_way(folder)),
        "offload folder .*written",
    ),
    "a file for a folder of a map": (
        lambda model, folder: dispatch_model(model, PLACES, offload_dir=in_the_way(folder)),
        "offload folder .*written",
    ),
    "weights of another model": (
        lambda model, folder: disk_offload(model, of_another_model(folder)),
        r"\(4, 4\)",
    ),
    "part of a state dict": (
        lambda model, folder: cpu_offload(model, state_dict={"0.weight": model[0].weight}),
        r"lacks 0\.bias",
    ),
}


@pytest.mark.parametrize("case", OFFLOADS)
def test_an_offload_that_cannot_work(case, tmp_path):
    call, message = OFFLOADS[case]
    model = build()
    with pytest.raises((RuntimeError, ValueError), match=message):
        call(model, tmp_path / "offload")
    check_unchanged(model)


def test_a_new_head_that_is_to_be_on_the_disk(tmp_path):
    model = build()
    body = {name: value for name, value in build(0).state_dict().items() if name[0] != "2"}
    save_file(body, tmp_path / "body.safetensors", metadata={"format": "pt"})
    expected = build()
    expected.load_state_dict(body, strict=False)
    load_checkpoint_and_dispatch(
        model, tmp_path / "body.safetensors", PLACES, offload_folder=tmp_path / "offload"
    )
    torch.testing.assert_close(model(torch.ones(2, 8)), expected(torch.ones(2, 8)))


class Loose(nn.Module):
    """Uses weights without calling the modules that have them."""

    def __init__(self):
        super().__init__()
        self.direct = nn.Linear(8, 8)
        self.scales = nn.ParameterList([torch.randn(8), torch.randn(8)])
        self.shifts = nn.ParameterDict({"a": torch.randn(8)})
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, x):
        x = x @ self.direct.weight.T + self.direct.bias
        return self.encoder(x * self.scales[0] * self.scales[1] + self.shifts["a"])


@pytest.mark.parametrize("classes", [None, "Loose", {"Loose"}, [("Loose",), []]])
@pytest.mark.parametrize("way", ["cpu", "disk", "split"])
def test_weights_used_without_the_forward_of_their_module(way, classes, tmp_path):
    model, x = Loose().double(), torch.randn(2, 3, 8, dtype=torch.float64, requires_grad=True)
    expected = model(x)
    (gradient,) = torch.autograd.grad(expected.sum(), x)
    if way == "cpu":
        cpu_offload(model, preload_module_classes=classes)
    elif way == "disk":
        disk_offload(model, tmp_path, preload_module_classes=classes)
    else:
        places = {
            "direct.weight": "disk",
            "direct.bias": "cpu",
            "scales": "disk",
            "shifts": "cpu",
            "encoder": "disk",
        }
        dispatch_model(model, places, offload_dir=tmp_path, preload_module_classes=classes)
    for other in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        output = other(x)
        torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)
        torch.testing.assert_close(
            torch.autograd.grad(output.sum(), x)[0], gradient, rtol=0, atol=1e-10
        )


class Repeated(nn.Module):
    """One module under three names, in two modules."""

    def __init__(self):
        super().__init__()
        self.a = nn.BatchNorm1d(8)
        self.b = self.a
        self.c = nn.Sequential(nn.Linear(8, 8), self.a)

    def forward(self, x):
        return self.c(self.b(self.a(x)))


@pytest.mark.parametrize(
    "places",
    [
        {"a": "disk", "b": "disk", "c": "disk"},
        {"a": "disk", "b": "disk", "c": "cpu"},
        {"a": "cpu", "c": "disk"},
        {"b": "disk", "c.0": "cpu"},
        {"": "disk"},
        600,
        400,
        100,
    ],
)
def test_a_module_that_has_several_names(places, tmp_path):
    torch.manual_seed(0)
    model, x = Repeated().double().eval(), torch.randn(3, 8, dtype=torch.float64)
    model.a.running_mean.normal_()
    expected = model(x)
    save_file(
        {name: value.clone() for name, value in model.state_dict().items()},
        tmp_path / "model.safetensors",
    )
    if isinstance(places, int):
        places = infer_auto_device_map(model, {"cpu": places})
        assert {name.partition(".")[0] for name in places} in ({""}, {"a", "b", "c"})
    loaded = load_checkpoint_and_dispatch(
        Repeated().double().eval(), tmp_path, places, offload_folder=tmp_path / "o"
    )
    for other in (
        loaded,
        dispatch_model(model, places, offload_dir=tmp_path / "other"),
        cpu_offload(model),
    ):
        for _ in range(2):
            torch.testing.assert_close(other(x), expected, rtol=0, atol=1e-12)


def test_classes_and_names_that_no_module_has(tmp_path):
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    for function, option in (
        (
            lambda names: infer_auto_device_map(model, {"cpu": 100}, no_split_module_classes=names),
            "no_split",
        ),
        (lambda names: cpu_offload(copy.deepcopy(model), preload_module_classes=names), "preload"),
        (
            lambda names: dispatch_model(
                copy.deepcopy(model), {"": "cpu"}, preload_module_classes=names
            ),
            "preload",
        ),
    ):
        with pytest.warns(UserWarning, match=f"{option}.*Sequential.*mean Linear"):
            function([{"Linaer"}])
        function({"Linear", "LlamaDecoderLayer"})
    with pytest.raises(ValueError, match=r"a on 'disk'.*'cpu'|b on 'disk'.*'cpu'"):
        dispatch_model(Repeated(), {"a": "cpu", "b": "disk", "c": "cpu"}, offload_dir=tmp_path)
    model._no_split_modules = ["Part"]  # a class of a part that this model does not have
    infer_auto_device_map(model, {"cpu": 100}, no_split_module_classes=model._no_split_modules)


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(8))
        self.parts = nn.ModuleDict(
            {"a": nn.ModuleDict({"b": nn.Linear(8, 8)}), "c": nn.ModuleList([nn.Linear(8, 8)])}
        )

    def forward(self, x):
        twice = self.parts["a"]["b"](self.parts["a"]["b"](x * self.scale))
        return self.parts["c"][0](twice)


@pytest.mark.parametrize("preload", [None, ["ModuleDict"]])
def test_containers_that_cannot_be_called_are_copied_and_offloaded_again(preload, tmp_path):
    model, x = Nested(), torch.randn(3, 8)
    expected = model(x)
    places = {"scale": "disk", "parts.a": "disk", "parts.c": "cpu"}
    spread = dispatch_model(
        copy.deepcopy(model), places, offload_dir=tmp_path / "a", preload_module_classes=preload
    )
    for other in (spread, copy.deepcopy(spread), pickle.loads(pickle.dumps(spread))):
        assert torch.equal(other(x), expected)
    for again in (cpu_offload, lambda one: disk_offload(one, tmp_path / "b"), cpu_offload):
        assert torch.equal(again(spread)(x), expected)


def test_models_that_cannot_be_placed_are_refused_by_name(tmp_path):
    with init_empty_weights():
        empty = nn.Linear(2, 2)
    with pytest.raises(
        CheckpointError, match=r"weight, bias of Linear .*meta device .*load_checkpoint"
    ):
        dispatch_model(empty, {"": "cpu"})
    for wrong in (None, "auto"):
        with pytest.raises(TypeError, match="mapping from names to devices"):
            dispatch_model(nn.Linear(2, 2), wrong)
    for offload in (cpu_offload, lambda one: disk_offload(one, tmp_path)):
        assert torch.equal(offload(nn.ReLU())(torch.tensor([-1.0, 2.0])), torch.tensor([0.0, 2.0]))
