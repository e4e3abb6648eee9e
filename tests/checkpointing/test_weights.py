# SPDX-License-Identifier: Apache-2.0
"""Model weights as files of their own, read back by the format's own library."""

from __future__ import annotations

import json

import pytest
import safetensors.torch
import torch
from full_disk import full_disk

from accelerate import Accelerator
from accelerate.checkpointing import clean_state_dict_for_safetensors, load, save, save_model
from accelerate.core.errors import CheckpointError, ConfigurationError


def weights():
    torch.manual_seed(0)
    state = {f"layer.{number}": torch.rand(10, 25) for number in range(5)}  # 1000 bytes each
    return {**state, "head": state["layer.0"]}


def read_all(folder):
    found = {}
    for path in folder.glob("*.safetensors"):
        found.update(safetensors.torch.load_file(path))
    return found


def test_one_file_or_shards_with_an_index(tmp_path, process):
    state = weights()
    save_model(state, tmp_path, max_shard_size="2KB", process=process)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 5000}
    files = {f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)}
    assert {path.name for path in tmp_path.iterdir()} == files | {"model.safetensors.index.json"}
    for name, file in index["weight_map"].items():
        assert torch.equal(safetensors.torch.load_file(tmp_path / file)[name], state[name])
    assert set(index["weight_map"]) == set(state) - {"head"}
    # Fewer shards, then one file: nothing of the earlier ones is left.
    save_model(state, tmp_path, max_shard_size=3500, process=process)
    assert len(list(tmp_path.iterdir())) == 3
    (tmp_path / "config.json").write_text("{}")
    save_model(state, tmp_path, process=process)
    assert {path.name for path in tmp_path.iterdir()} == {"model.safetensors", "config.json"}
    found = read_all(tmp_path)
    assert all(torch.equal(found[name], state[name]) for name in found) and len(found) == 5


def test_a_tied_model_loads_with_the_format_s_own_function(tmp_path, process):
    def build():
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        model[1].weight = model[0].weight
        return model

    model, other = build(), build()
    save_model(model.state_dict(), tmp_path, process=process)
    assert safetensors.torch.load_model(other, tmp_path / "model.safetensors") == (set(), [])
    assert torch.equal(model[1].weight, other[1].weight) and torch.equal(
        model[0].bias, other[0].bias
    )


def test_torch_files_hold_every_name(tmp_path, process):
    state = weights()
    save_model(state, tmp_path, max_shard_size="3KB", safe_serialization=False, process=process)
    index = json.loads((tmp_path / "pytorch_model.bin.index.json").read_text())
    assert set(index["weight_map"]) == set(state)
    for name, file in index["weight_map"].items():
        assert torch.equal(torch.load(tmp_path / file)[name], state[name])


def test_what_cannot_be_saved(tmp_path, process):
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigurationError, match="is a file"):
        save_model(weights(), tmp_path / "file", process=process)
    with pytest.raises(CheckpointError, match=r"not tensors.*extra\.state"):
        save_model({**weights(), "extra.state": {"a": 1}}, tmp_path / "m", process=process)
    for size in ("lots", "-5GB", True, "5XB"):
        with pytest.raises(ConfigurationError, match="max_shard_size"):
            save_model(weights(), tmp_path / "m", max_shard_size=size, process=process)


def test_an_error_while_writing_leaves_the_earlier_file(tmp_path, process, monkeypatch):
    state = weights()
    save_model(state, tmp_path, process=process)
    before = (tmp_path / "model.safetensors").read_bytes()
    monkeypatch.setattr(
        "os.pwritev", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    )
    with pytest.raises(OSError, match="No space"):
        save_model({name: value * 2 for name, value in state.items()}, tmp_path, process=process)
    assert (tmp_path / "model.safetensors").read_bytes() == before and len(
        list(tmp_path.iterdir())
    ) == 1


def test_the_utility_functions(tmp_path):
    save({"a": torch.ones(3), "n": [1, "x"]}, tmp_path / "plain.bin")
    assert load(tmp_path / "plain.bin")["n"] == [1, "x"]
    state = weights()
    save(state, tmp_path / "safe.safetensors", safe_serialization=True)
    with pytest.raises(ValueError, match="dict of tensors, not a list"):
        save([1], tmp_path / "list.safetensors", safe_serialization=True)
    found = safetensors.torch.load_file(tmp_path / "safe.safetensors")
    assert set(found) == set(clean_state_dict_for_safetensors(state)) == set(state) - {"head"}
    torch.save({"f": print}, tmp_path / "code.bin")
    with pytest.raises(CheckpointError, match="plain data"):
        load(tmp_path / "code.bin")
    assert load(tmp_path / "code.bin", weights_only=False)["f"] is print
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "none")


@pytest.mark.parametrize("safe", [True, False])
def test_a_full_disk_leaves_the_former_weights(tmp_path, safe):
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(40, 40)
    accelerator.save_model(model, tmp_path, safe_serialization=safe)
    former = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with full_disk(), pytest.raises(OSError, match=r"too large: '/.*model\.(safetensors|bin)"):
        accelerator.save_model(torch.nn.Linear(50, 50), tmp_path, safe_serialization=safe)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == former
