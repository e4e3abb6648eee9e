# SPDX-License-Identifier: Apache-2.0
"""Tensors of safetensors files at any time: every dtype, files that change, files that are broken."""

import json
import os

import pytest
import torch
from safetensors.torch import save_file

from accelerate.core.dtypes import BY_NAME
from accelerate.core.errors import CheckpointError
from accelerate.placement import weight_files


@pytest.mark.parametrize("dtype", list(BY_NAME.values()), ids=str)
def test_safetensors_are_read_as_they_are(tmp_path, dtype):
    path = tmp_path / "x.safetensors"
    tensors = {"a": torch.tensor([True]), "b": (torch.rand(3, 5) * 3).to(dtype), "c": torch.zeros(0, 2).to(dtype)}
    save_file(tensors, path, metadata={"format": "pt"})
    files = weight_files.SafetensorsFiles()
    for name, tensor in tensors.items():
        found = files.tensor(path, name)
        assert found.untyped_storage().nbytes() == tensor.nbytes
        assert found.dtype == tensor.dtype and found.shape == tensor.shape
        assert torch.equal(found.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


def test_safetensors_headers_are_read_once_and_again_when_the_file_is_another(tmp_path, monkeypatch):
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.zeros(3)}, path)
    read = []
    original = weight_files._read_header
    monkeypatch.setattr(weight_files, "_read_header", lambda *args: read.append(args) or original(*args))
    files = weight_files.SafetensorsFiles()
    first = files.tensor(path, "a")
    first += 1
    # A change to one tensor reaches neither the file nor the next to read it.
    assert files.tensor(path, "a").sum() == 0 and len(read) == 1
    save_file({"b": torch.ones(4), "a": torch.ones(5)}, path)
    assert files.tensor(path, "a").shape == (5,) and len(read) == 2


def test_safetensors_with_an_unaligned_header(tmp_path):
    header = json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    header += b" " * ((3 - len(header)) % 8)
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + torch.tensor([1.5, 2.5]).numpy().tobytes())
    assert torch.equal(weight_files.SafetensorsFiles().tensor(path, "a"), torch.tensor([1.5, 2.5]))


def test_broken_safetensors_are_named(tmp_path):
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.zeros(30)}, path)
    files = weight_files.SafetensorsFiles()
    with pytest.raises(CheckpointError, match=r"x\.safetensors has no tensor b"):
        files.tensor(path, "b")
    content = path.read_bytes()
    path.write_bytes(content[:-8])
    with pytest.raises(CheckpointError, match="a lies outside of it"):
        files.tensor(path, "a")
    path.write_bytes(b"PK\x03\x04 is another format")
    with pytest.raises(CheckpointError, match="is not a safetensors file"):
        files.tensor(path, "a")
    os.remove(path)
    with pytest.raises(CheckpointError, match="does not exist any more"):
        files.tensor(path, "a")
