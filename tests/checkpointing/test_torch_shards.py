# SPDX-License-Identifier: Apache-2.0
"""The index of torch's own shards: nothing outside its folder is opened, and no memory is taken on its word."""

from __future__ import annotations

import dataclasses
import os
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp

from accelerate.checkpointing.sharded import load_entries, shard_entries
from accelerate.core.errors import CheckpointError

STATE = {"a": torch.arange(600.0).reshape(20, 30), "b": torch.ones(7)}


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "pytorch_model_fsdp_0"
    dcp.save(
        {name: value.clone() for name, value in STATE.items()}, checkpoint_id=path, no_dist=True
    )
    return path


def change(folder, **fields):
    """Give the first shard of the index other fields."""
    index = folder / ".metadata"
    metadata = pickle.loads(index.read_bytes())
    first = next(iter(metadata.storage_data))
    metadata.storage_data[first] = dataclasses.replace(metadata.storage_data[first], **fields)
    index.write_bytes(pickle.dumps(metadata))


def test_sound_shards_are_read(folder):
    shard_entries(folder)
    found = {name: torch.zeros_like(value) for name, value in STATE.items()}
    load_entries(found, folder)
    assert all(torch.equal(found[name], value) for name, value in STATE.items())


@pytest.mark.parametrize(
    "name", ["pathlib PosixPath", "pathlib._local PosixPath", "pathlib WindowsPath"]
)
def test_the_path_in_an_index_is_of_any_python_and_system(folder, name):
    """Python 3.13 pickles paths as those of `pathlib._local`."""
    index = folder / ".metadata"
    # Protocol 2 has the names of classes as text.
    pickled = pickle.dumps(pickle.loads(index.read_bytes()), protocol=2)
    written = f"{type(folder).__module__}\n{type(folder).__name__}\n".encode()
    assert written in pickled
    index.write_bytes(pickled.replace(written, "\n".join([*name.split(), ""]).encode()))
    shard_entries(folder)
    read = {name: torch.zeros_like(value) for name, value in STATE.items()}
    load_entries(read, folder)
    assert all(torch.equal(read[name], value) for name, value in STATE.items())


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"relative_path": "../secret"}, "outside its folder"),
        ({"relative_path": "/etc/hostname"}, "outside its folder"),
        ({"relative_path": "pipe"}, "it names pipe"),
        ({"relative_path": "absent"}, "it names absent"),
    ],
    ids=str,
)
def test_a_changed_index_is_refused(folder, fields, message):
    (folder.parent / "secret").write_bytes(next(folder.glob("*.distcp")).read_bytes())
    os.mkfifo(folder / "pipe")
    change(folder, **fields)
    with pytest.raises(CheckpointError, match=message) as error:
        shard_entries(folder)
    assert str(folder) in str(error.value)


def test_code_in_an_index_is_not_run(folder):
    class Runs:
        def __reduce__(self):
            return os.system, (f"touch {folder}/ran",)

    (folder / ".metadata").write_bytes(pickle.dumps(Runs()))
    with pytest.raises(CheckpointError, match=r"it names posix.system"):
        shard_entries(folder)
    assert not (folder / "ran").exists()
