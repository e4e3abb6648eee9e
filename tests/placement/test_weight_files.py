# SPDX-License-Identifier: Apache-2.0
"""Tensors of safetensors files at any time: every dtype, files that change, files that are broken."""

import json
import os

import pytest
import torch
from safetensors.torch import save_file

from accelerate.core.errors import CheckpointError
from accelerate.core.tensor_files import BY_NAME
from accelerate.placement import weight_files


@pytest.mark.parametrize("dtype", list(BY_NAME.values()), ids=str)
def test_safetensors_are_read_as_they_are(tmp_path, dtype):
    path = tmp_path / "x.safetensors"
    tensors = {
        "a": torch.tensor([True]),
        "b": (torch.rand(3, 5) * 3).to(dtype),
        "c": torch.zeros(0, 2).to(dtype),
    }
    save_file(tensors, path, metadata={"format": "pt"})
    files = weight_files.SafetensorsFiles()
    for name, tensor in tensors.items():
        found = files.tensor(path, name)
        assert found.untyped_storage().nbytes() == tensor.nbytes
        assert found.dtype == tensor.dtype and found.shape == tensor.shape
        assert torch.equal(
            found.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)
        )


def test_a_file_is_mapped_once_and_written_nowhere(tmp_path):
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.zeros(3)}, path)
    files = weight_files.SafetensorsFiles()
    files.tensor(path, "a").add_(1)
    assert weight_files.SafetensorsFiles().tensor(path, "a").sum() == 0
    os.remove(path)
    save_file({"b": torch.ones(4)}, path)
    assert files.tensor(path, "a").sum() == 3


def test_safetensors_with_an_unaligned_header(tmp_path):
    header = json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    header += b" " * ((3 - len(header)) % 8)
    path = tmp_path / "x.safetensors"
    path.write_bytes(
        len(header).to_bytes(8, "little") + header + torch.tensor([1.5, 2.5]).numpy().tobytes()
    )
    assert torch.equal(weight_files.SafetensorsFiles().tensor(path, "a"), torch.tensor([1.5, 2.5]))


def test_broken_safetensors_are_named(tmp_path):
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.zeros(30)}, path)

    def read(name):
        return weight_files.SafetensorsFiles().tensor(path, name)

    with pytest.raises(CheckpointError, match=r"x\.safetensors does not contain the tensor b"):
        read("b")
    content = path.read_bytes()
    path.write_bytes(content[:-8])
    with pytest.raises(CheckpointError, match="not a complete safetensors file"):
        read("a")
    path.write_bytes(b"PK\x03\x04 is another format")
    with pytest.raises(CheckpointError, match="not a complete safetensors file"):
        read("a")
    os.remove(path)
    with pytest.raises(CheckpointError, match="no longer exists"):
        read("a")
