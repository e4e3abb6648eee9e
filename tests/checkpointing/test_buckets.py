# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in buckets: their layout, and whole runs saved, loaded, resumed and rotated there."""

from __future__ import annotations

import time
import uuid
from pathlib import Path

import pytest
import torch

from accelerate.checkpointing import layout
from accelerate.checkpointing.files import BlockIO, read_tensors, segments
from accelerate.checkpointing.layout import MANIFEST, CorruptCheckpoint, Manifest
from accelerate.core.bucket_path import BucketPath
from accelerate.core.errors import ConfigurationError
from accelerate.core.files import location, user_path

pytest.importorskip("obstore")


@pytest.fixture
def bucket() -> BucketPath:
    place = location(f"memory://{uuid.uuid4().hex}/run", "place")
    assert isinstance(place, BucketPath)
    return place


def write_checkpoint(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """A checkpoint with two files; the folder of its files."""
    token = layout.new_token()
    files = [
        (folder / token / "model.safetensors", segments(tensors)),
        (folder / token / "inner/extra.bin", [b"123"]),
    ]
    with BlockIO() as io:
        model, extra = io.write_all(files)
    manifest = Manifest(
        "native", 1, {}, [], [], {"model.safetensors": model, "inner/extra.bin": extra}, token=token
    )
    (folder / MANIFEST).write_text(manifest.to_bytes().decode())
    return folder / token


def test_a_path_in_a_bucket_is_no_local_path(bucket: BucketPath) -> None:
    path = bucket / "a" / "b.json"
    assert location(str(path), "path") == path
    # A path object has one slash less.
    assert location(Path(str(path)), "path") == path
    assert (path.name, path.suffix, path.parent) == ("b.json", ".json", bucket / "a")
    assert path.relative_to(bucket).as_posix() == "a/b.json"
    with pytest.raises(TypeError):
        Path(path)
    with pytest.raises(ConfigurationError, match=str(path)):
        user_path(path, "save_model")


def test_what_is_below_a_folder(bucket: BucketPath) -> None:
    for name in ("a/b/c.json", "a/d.bin", "ab.bin"):
        (bucket / name).write_text(name)
    known = bucket.with_objects({"a/d.bin": next(iter((bucket / "ab.bin").bucket.objects("run")))})
    assert [path.name for path in bucket.iterdir()] == ["a", "ab.bin"]
    assert [path.name for path in bucket.glob("*.bin")] == ["ab.bin"]
    below = {path.relative_to(bucket).as_posix() for path in bucket.rglob("*")}
    assert below == {"a/b/c.json", "a/d.bin", "ab.bin"}
    assert (bucket / "a").is_dir() and not (bucket / "a").is_file()
    # Nothing is looked up where the objects are known.
    assert [path.name for path in known.iterdir()] == ["a"]
    assert not (known / "ab.bin").exists()
    with (bucket / "a/b/c.json").open() as file:
        file.seek(2)
        assert file.read() == b"b/c.json"


def test_a_checkpoint_is_read_by_its_manifest(bucket: BucketPath) -> None:
    tensors = {f"t{index}": torch.randn(3, index) for index in range(5)}
    parts = write_checkpoint(bucket / "checkpoint_0", tensors)
    manifest = layout.verify(bucket / "checkpoint_0")
    with BlockIO() as io:
        saved = read_tensors(io, manifest.files_in(bucket / "checkpoint_0") / "model.safetensors")
    assert saved.keys() == tensors.keys()
    for name, tensor in tensors.items():
        torch.testing.assert_close(saved[name], tensor, rtol=0, atol=0)
    assert layout.candidates(bucket) == ([bucket / "checkpoint_0"], [])

    (parts / "inner/extra.bin").write_text("1x3")
    with pytest.raises(CorruptCheckpoint, match=r"inner/extra.bin"):
        layout.verify(bucket / "checkpoint_0")
    (parts / "inner/extra.bin").unlink()
    good, damaged = layout.candidates(bucket)
    assert good == [] and "inner/extra.bin" in damaged[0][1]


def test_what_killed_saves_leave_is_no_checkpoint(bucket: BucketPath) -> None:
    write_checkpoint(bucket / "checkpoint_0", {})
    leftover = bucket / "checkpoint_1" / layout.new_token()
    (leftover / "model.safetensors").write_text("half of it")
    assert layout.list_checkpoints(bucket) == [(0, bucket / "checkpoint_0")]
    # A save may be under way.
    assert layout.unfinished(bucket) == []
    layout.rotate(bucket, 1)
    assert leftover.is_dir()
    assert layout.unfinished(bucket, now=time.time() + 100_000) == [leftover]
    assert layout.unfinished(bucket, age=-1.0) == [leftover]


def test_rotation_deletes_the_oldest(bucket: BucketPath) -> None:
    for number in range(3):
        write_checkpoint(bucket / f"checkpoint_{number}", {})
    assert layout.rotate(bucket, 2) == [bucket / "checkpoint_0"]
    assert not (bucket / "checkpoint_0").exists()
    assert [number for number, _ in layout.list_checkpoints(bucket)] == [1, 2]
