# SPDX-License-Identifier: Apache-2.0
"""Checkpoints brought into models: files, shards and folders, device maps, dtypes, what does not fit, memory."""

import json
import logging
import subprocess

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from accelerate.big_modeling import init_empty_weights, load_checkpoint_and_dispatch
from accelerate.core.env import patch_environment
from accelerate.core.errors import CheckpointError, WeightFileError
from accelerate.placement.load import (
    load_checkpoint_in_model,
    load_offloaded_weights,
    load_state_dict,
)
from accelerate.placement.offload import OffloadedWeightsLoader, offload_weight
from accelerate.placement.weight_files import checkpoint_files


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.norm = nn.BatchNorm1d(4)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight


@pytest.fixture
def trained():
    torch.manual_seed(0)
    model = Model()
    model.norm.running_mean.normal_()
    model.norm.num_batches_tracked.fill_(5)
    return model


def on_meta():
    with init_empty_weights():
        model = Model()
    model.head.weight = model.embed.weight
    return model


def stored(model):
    """The state dict as checkpoints of tied models have it: under one name."""
    state = model.state_dict()
    del state["head.weight"]
    return state


@pytest.fixture(params=["file", "shards", "folder", "index", "bin", "bin shards", "legacy bin"])
def checkpoint(request, trained, tmp_path):
    state = stored(trained)
    kind = request.param
    if kind in ("file", "folder"):
        path = tmp_path / "model.safetensors"
        save_file(state, path, metadata={"format": "pt"})
        return path if kind == "file" else tmp_path
    if kind == "bin":
        torch.save(state, tmp_path / "pytorch_model.bin")
        return str(tmp_path)
    if kind == "legacy bin":
        torch.save(state, tmp_path / "x.bin", _use_new_zipfile_serialization=False)
        return tmp_path / "x.bin"
    ending = "bin" if kind == "bin shards" else "safetensors"
    weight_map = {}
    for part, prefix in enumerate(("embed", "norm", "body.0", "body.2")):
        names = [name for name in state if name.startswith(prefix)]
        weights = {name: state[name] for name in names}
        file = f"part-{part}.{ending}"
        if ending == "bin":
            torch.save(weights, tmp_path / file)
        else:
            save_file(weights, tmp_path / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(names, file))
    index = tmp_path / f"model.{ending}.index.json"
    index.write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map} if kind != "index" else weight_map)
    )
    return tmp_path if kind == "shards" else index


def equal_states(model, expected, dtype=None):
    for name, value in expected.state_dict().items():
        wanted = value.to(dtype) if dtype and value.is_floating_point() else value
        found = model.state_dict()[name]
        assert found.dtype == wanted.dtype and torch.equal(found, wanted), name


@pytest.mark.parametrize("spill", [False, True])
@pytest.mark.parametrize("device_map", [None, {"": "cpu"}, {"": torch.device("cpu")}], ids=str)
def test_every_kind_of_checkpoint(checkpoint, trained, device_map, spill):
    model = Model() if device_map is None and not spill else on_meta()
    load_checkpoint_in_model(
        model, checkpoint, device_map=device_map, offload_state_dict=spill, strict=True
    )
    equal_states(model, trained)
    assert model.head.weight is model.embed.weight  # still tied


@pytest.mark.parametrize("device_map", [None, {"": "cpu"}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, "bfloat16"])
def test_dtype(checkpoint, trained, device_map, dtype):
    model = Model() if device_map is None else on_meta()
    load_checkpoint_in_model(model, checkpoint, device_map=device_map, dtype=dtype)
    equal_states(model, trained, dtype if isinstance(dtype, torch.dtype) else torch.bfloat16)
    assert model.head.weight is model.embed.weight
    model = on_meta()
    load_checkpoint_in_model(
        model, checkpoint, device_map, dtype=dtype, keep_in_fp32_modules=["norm", "body.2"]
    )
    kept = {name for name, value in model.state_dict().items() if value.dtype == torch.float32}
    assert kept == {
        f"norm.{name}" for name in ("weight", "bias", "running_mean", "running_var")
    } | {
        "body.2.weight",
        "body.2.bias",
    }


def test_a_model_that_is_there_already_gets_the_values_of_the_checkpoint(checkpoint, trained):
    # Under its second name the tied weight is still what the model was initialised with.
    model = Model()
    load_checkpoint_in_model(model, checkpoint, device_map={"": "cpu"})
    equal_states(model, trained)
    assert model.head.weight is model.embed.weight


def test_offload_to_disk(checkpoint, trained, tmp_path):
    folder = tmp_path / "new" / "offload"
    device_map = {"embed": "cpu", "head": "cpu", "norm": "disk", "body": "disk"}
    model = on_meta()
    load_checkpoint_in_model(model, checkpoint, device_map=device_map, offload_folder=folder)
    weights = OffloadedWeightsLoader(save_folder=folder)
    assert set(weights) == {
        name for name, _ in trained.named_parameters() if not name.startswith(("embed", "head"))
    }
    for name, value in trained.state_dict().items():
        if name in weights:
            assert model.state_dict()[name].device.type == "meta" and torch.equal(
                weights[name], value
            )
        else:
            # Buffers of offloaded modules that stay with the module get their values too.
            assert torch.equal(model.state_dict()[name], value)
    model = on_meta()
    load_checkpoint_in_model(
        model,
        checkpoint,
        device_map,
        tmp_path / "b",
        dtype="float16",
        offload_buffers=True,
        offload_state_dict=True,
    )
    weights = OffloadedWeightsLoader(save_folder=tmp_path / "b")
    assert torch.equal(weights["norm.running_mean"], trained.norm.running_mean.half())
    assert (
        weights["norm.num_batches_tracked"] == 5 and weights["body.0.weight"].dtype == torch.float16
    )
    assert model.norm.running_mean.device.type == "meta"
    # On the meta device a weight has the dtype that it will have on a real one.
    assert model.body[0].weight.dtype == model.embed.weight.dtype == torch.float16


def test_clear_errors(trained, tmp_path, caplog):
    path = tmp_path / "x.safetensors"
    state = stored(trained)
    save_file(state, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"disk, .*`offload_folder`"):
        load_checkpoint_in_model(on_meta(), path, device_map={"": "disk"})
    with pytest.raises(ValueError, match=r"doesn't have any device set"):
        load_checkpoint_in_model(on_meta(), path, device_map={"embed": "cpu", "body": "cpu"})
    shape = tmp_path / "shape.safetensors"
    save_file({**state, "body.0.weight": torch.zeros(5, 5)}, shape, metadata={"format": "pt"})
    for place in ("cpu", "disk"):
        with pytest.raises(ValueError, match=r'shape torch.Size\(\[5, 5\]\) in "body.0.weight"'):
            load_checkpoint_in_model(
                on_meta(), shape, device_map={"": place}, offload_folder=tmp_path
            )
    with pytest.raises(RuntimeError, match=r"size mismatch for body.0.weight"):
        load_checkpoint_in_model(Model(), shape)
    extra = {name: value for name, value in state.items() if not name.startswith("norm")} | {
        "more.w": torch.ones(1)
    }
    save_file(extra, tmp_path / "extra.safetensors", metadata={"format": "pt"})
    for model, device_map in ((Model(), None), (on_meta(), {"": "cpu"})):
        with pytest.raises(
            CheckpointError,
            match=r"unknown .*: more.w; not in the checkpoint: norm.bias, ",
        ):
            load_checkpoint_in_model(model, tmp_path / "extra.safetensors", device_map, strict=True)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            load_checkpoint_in_model(model, tmp_path / "extra.safetensors", device_map)
        assert (
            "not used when initializing Model: ['more.w']" in caplog.text
            and "'norm.bias'" in caplog.text
        )
        assert "head.weight" not in caplog.text  # tied to one that is there
        caplog.clear()
        with caplog.at_level(logging.WARNING), patch_environment(rank=1, world_size=2):
            load_checkpoint_in_model(model, tmp_path / "extra.safetensors", device_map)
        assert not caplog.records  # it is rank 0 that warns


def test_checkpoints_that_are_none(tmp_path, trained):
    with pytest.raises(
        WeightFileError, match=r"not a folder containing a `.index.json` file or a pytorch_model"
    ):
        checkpoint_files(tmp_path)
    with pytest.raises(WeightFileError, match=r"`checkpoint` .* file .* got .*nothing"):
        checkpoint_files(tmp_path / "nothing")
    (tmp_path / "a.index.json").write_text(json.dumps({"weight_map": {"w": "gone.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"do not exist: .*gone\.safetensors"):
        checkpoint_files(tmp_path)
    (tmp_path / "b.index.json").write_text("{}")
    with pytest.raises(WeightFileError, match=r"more than one `.index.json` file"):
        checkpoint_files(tmp_path)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        load_state_dict(tmp_path / "x.bin")
    (tmp_path / "x.bin").write_bytes(b"nothing of the kind")
    (tmp_path / "x.safetensors").write_bytes(b"nothing of the kind")
    torch.save([1, 2], tmp_path / "list.bin")
    torch.save({"w": subprocess.run}, tmp_path / "code.bin")
    for name in ("x.bin", "x.safetensors", "list.bin", "code.bin"):
        with pytest.raises(CheckpointError, match=name):
            load_checkpoint_in_model(trained, tmp_path / name)


@pytest.mark.parametrize(
    ("device_map", "damage"),
    [(None, "cut"), ({"": "cpu"}, "cut"), ({"": "cpu"}, "shape"), ({"": "cpu"}, "no tensor")],
)
def test_nothing_is_loaded_where_the_last_file_is_damaged(trained, tmp_path, device_map, damage):
    ending = "bin" if damage == "no tensor" else "safetensors"
    weight_map = {}
    for part, prefix in enumerate(("embed", "norm", "body")):
        weights = {
            name: value.clone()
            for name, value in stored(trained).items()
            if name.startswith(prefix)
        }
        if prefix == "body" and damage == "shape":
            weights["body.2.weight"] = torch.zeros(2, 8)
        elif prefix == "body" and damage == "no tensor":
            weights["body.2.weight"] = [1.0]
        path = tmp_path / f"part-{part}.{ending}"
        if ending == "bin":
            torch.save(weights, path)
        else:
            save_file(weights, path, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(weights, path.name))
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-5])
    (tmp_path / "model.index.json").write_text(json.dumps({"weight_map": weight_map}))
    model = Model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        load_checkpoint_in_model(model, tmp_path, device_map=device_map)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_load_state_dict(trained, tmp_path, caplog):
    state = stored(trained)
    save_file(state, tmp_path / "x.safetensors")
    torch.save(state, tmp_path / "x.bin")
    with caplog.at_level(logging.WARNING):
        for name in ("x.safetensors", "x.bin"):
            loaded = load_state_dict(tmp_path / name, {"body": "meta", "norm": "disk"})
            assert loaded.keys() == state.keys()
            for key, value in loaded.items():
                assert value.device.type == ("meta" if key.startswith("body") else "cpu")
                assert value.device.type == "meta" or torch.equal(value, state[key])
    assert "does not contain metadata" in caplog.text
    save_file(state, tmp_path / "tf.safetensors", metadata={"format": "tf"})
    with pytest.raises(WeightFileError, match="saved with tf"):
        load_state_dict(tmp_path / "tf.safetensors")
    # A file may be written again while its weights are in use.
    loaded = load_state_dict(tmp_path / "x.bin")
    model = on_meta()
    load_checkpoint_in_model(model, tmp_path / "x.bin", device_map={"": "cpu"})
    torch.save({}, tmp_path / "x.bin")
    assert all(torch.equal(loaded[key], value) for key, value in state.items())
    equal_states(model, trained)


def test_load_offloaded_weights(tmp_path, trained):
    index = {}
    for name, value in stored(trained).items():
        offload_weight(value, name, tmp_path, index)
    model = on_meta()
    load_offloaded_weights(model, {}, tmp_path)
    load_offloaded_weights(model, None, tmp_path)
    load_offloaded_weights(model, index, tmp_path)
    for path in tmp_path.iterdir():
        path.write_bytes(b"")  # nothing reads the folder any more
    model.head.weight = model.embed.weight
    equal_states(model, trained)


@pytest.mark.parametrize("device_map", [None, {"": "cpu"}, {"": "disk"}], ids=str)
def test_a_checkpoint_of_another_model(trained, tmp_path, device_map):
    path = tmp_path / "x.safetensors"
    save_file(
        {f"encoder.{name}": value for name, value in stored(trained).items()},
        path,
        metadata={"format": "pt"},
    )
    model = on_meta() if device_map else Model()
    before = {
        name: value.clone() for name, value in model.state_dict().items() if not value.is_meta
    }
    with pytest.raises(
        CheckpointError,
        match=r"any weight of Model: .*encoder.body.*model has body.0",
    ):
        load_checkpoint_in_model(model, path, device_map, offload_folder=tmp_path / "offload")
    assert not (tmp_path / "offload").exists()
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in before.items())
    # Some of the weights: an error where the others have no values.
    save_file({"embed.weight": trained.embed.weight.detach()}, path, metadata={"format": "pt"})
    if device_map:
        with pytest.raises(
            CheckpointError,
            match=r"body.0.bias, .* of Model, .*meta device",
        ):
            load_checkpoint_and_dispatch(
                model, path, device_map=device_map, offload_folder=tmp_path / "offload"
            )
        assert model.embed.weight.is_meta
