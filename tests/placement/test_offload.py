# SPDX-License-Identifier: Apache-2.0
"""Weights on disk: files of every dtype, the index, safetensors entries, and mappings over them."""

import copy
import json
import pickle

import numpy
import pytest
import torch
from safetensors.torch import save_file

from accelerate.core.errors import CheckpointError
from accelerate.placement.offload import (
    OffloadedWeightsLoader,
    load_offloaded_weight,
    offload_state_dict,
    offload_weight,
)

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.bool,
    torch.complex64,
]


def same(left, right):
    """Equal to the bit, whatever the dtype can compare."""
    return (
        left.dtype == right.dtype
        and left.shape == right.shape
        and torch.equal(left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8))
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3, 5), (), (0, 4)], ids=str)
def test_round_trip(tmp_path, dtype, shape):
    weight = (torch.rand(shape) * 3).to(dtype)
    index = offload_weight(weight, "layer.weight", tmp_path, {})
    assert index == {"layer.weight": {"dtype": str(dtype)[6:], "shape": list(shape)}}
    assert (tmp_path / "layer.weight.dat").stat().st_size == weight.nbytes
    assert same(load_offloaded_weight(tmp_path / "layer.weight.dat", index["layer.weight"]), weight)


def test_the_files_are_plain_numbers(tmp_path):
    weight = torch.randn(4, 3)
    offload_weight(weight.t(), "w", tmp_path)  # not contiguous, no index asked for
    assert numpy.array_equal(
        numpy.memmap(tmp_path / "w.dat", dtype="float32", shape=(3, 4), mode="r"), weight.t()
    )
    # What numpy wrote is read.
    written = numpy.memmap(tmp_path / "n.dat", dtype="int16", mode="w+", shape=(4,))
    written[:] = torch.arange(4).bfloat16().view(torch.int16).numpy()
    written.flush()
    read = load_offloaded_weight(str(tmp_path / "n.dat"), {"dtype": "bfloat16", "shape": [4]})
    assert same(read, torch.arange(4).bfloat16())


def test_what_is_read_is_not_the_file(tmp_path):
    offload_weight(torch.ones(5), "w", tmp_path)
    entry = {"dtype": "float32", "shape": [5]}
    first = load_offloaded_weight(tmp_path / "w.dat", entry)
    first += 1
    assert load_offloaded_weight(tmp_path / "w.dat", entry).sum() == 5
    # Writing the file again leaves those who read the former one alone.
    second = load_offloaded_weight(tmp_path / "w.dat", entry)
    offload_weight(torch.zeros(5), "w", tmp_path)
    assert second.sum() == 5 and load_offloaded_weight(tmp_path / "w.dat", entry).sum() == 0


def test_offload_refuses_what_a_flat_file_cannot_hold(tmp_path):
    from torch.testing._internal.two_tensor import TwoTensor

    with pytest.raises(TypeError, match="w is a TwoTensor"):
        offload_weight(TwoTensor(torch.ones(2), torch.ones(2)), "w", tmp_path)
    with pytest.raises(ValueError, match="w is on the meta device"):
        offload_weight(torch.ones(2, device="meta"), "w", tmp_path)
    assert not list(tmp_path.iterdir())


def test_broken_files_are_named(tmp_path):
    entry = {"dtype": "float32", "shape": [5]}
    with pytest.raises(CheckpointError, match=r"gone\.dat cannot be read"):
        load_offloaded_weight(tmp_path / "gone.dat", entry)
    (tmp_path / "short.dat").write_bytes(b"12")
    with pytest.raises(CheckpointError, match=r"short\.dat cannot be read"):
        load_offloaded_weight(tmp_path / "short.dat", entry)


@pytest.mark.parametrize("name", ["../outside", "a/../../outside", "{outside}", "link/outside"])
def test_names_stay_in_their_folder(name, tmp_path):
    folder, outside = tmp_path / "offload", tmp_path / "outside"
    folder.mkdir()
    (folder / "link").symlink_to(tmp_path)
    name = name.format(outside=outside)
    outside.with_suffix(".dat").write_bytes(b"12345678")
    for write in (
        offload_state_dict,
        lambda folder, state: offload_weight(state[name], name, folder),
    ):
        with pytest.raises(CheckpointError, match="outside"):
            write(folder, {name: torch.zeros(2)})
    loader = OffloadedWeightsLoader(
        save_folder=folder, index={name: {"dtype": "float32", "shape": [2]}}
    )
    with pytest.raises(CheckpointError, match="outside"):
        loader[name]
    assert outside.with_suffix(".dat").read_bytes() == b"12345678"
    offload_weight(torch.ones(2), "a/inside", folder, index := {})
    assert same(OffloadedWeightsLoader(save_folder=folder, index=index)["a/inside"], torch.ones(2))


def test_loader_joins_memory_files_and_safetensors(tmp_path):
    state = {"a.w": torch.randn(3), "a.b": torch.randn(2).bfloat16()}
    offload_state_dict(tmp_path / "offload", state)
    assert {path.name for path in (tmp_path / "offload").iterdir()} == {
        "a.w.dat",
        "a.b.dat",
        "index.json",
    }
    tensors = {"inner": torch.randn(4, 2), "other": torch.randn(2)}
    save_file(tensors, tmp_path / "x.safetensors")
    index = json.loads((tmp_path / "offload" / "index.json").read_text())
    index["c"] = {
        "safetensors_file": str(tmp_path / "x.safetensors"),
        "weight_name": "inner",
        "dtype": "float16",
    }
    index["other"] = {"safetensors_file": str(tmp_path / "x.safetensors")}
    held = torch.randn(1)
    loader = OffloadedWeightsLoader({"m": held}, tmp_path / "offload", index)
    assert list(loader) == loader.all_keys == ["m", "a.w", "a.b", "c", "other"] and len(loader) == 5
    assert (
        loader["m"] is held
        and same(loader["a.w"], state["a.w"])
        and same(loader["a.b"], state["a.b"])
    )
    assert same(loader["c"], tensors["inner"].half()) and same(loader["other"], tensors["other"])
    assert same(OffloadedWeightsLoader(save_folder=str(tmp_path / "offload"))["a.b"], state["a.b"])
    for twin in (copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))):
        assert same(twin["c"], loader["c"])
    with pytest.raises(KeyError, match="nothing"):
        loader["nothing"]
    with pytest.raises(CheckpointError, match=r"a\.w as a file"):
        OffloadedWeightsLoader(index=index)["a.w"]
