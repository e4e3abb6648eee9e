# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in buckets: their layout, and whole runs saved, loaded, resumed and rotated there."""

from __future__ import annotations

import collections
import json
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from s3_server import Request, S3Server
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from accelerate import Accelerator
from accelerate.checkpointing import (
    Options,
    PreparedModel,
    PreparedOptimizer,
    RunState,
    Writer,
    bucket_shards,
    layout,
    load_run,
    save_run,
)
from accelerate.checkpointing.files import BlockIO, read_tensors, segments, upload
from accelerate.checkpointing.layout import INDEX, MANIFEST, CorruptCheckpoint, Manifest
from accelerate.core.bucket_path import BucketPath
from accelerate.core.errors import CheckpointError, ConfigurationError, MissingCheckpointError
from accelerate.core.files import location, read_range, user_path
from accelerate.runtime.agreement import OneProcess
from accelerate.utils import ProjectConfiguration

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
    assert read_range(bucket / "a/b/c.json", 2, 5) == b"b/c.j"


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


# --- runs ----------------------------------------------------------------------------------------------------------


def a_run(seed: int = 0, steps: int = 0) -> RunState:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return RunState(
        models=[PreparedModel(model)],
        optimizers=[PreparedOptimizer(optimizer)],
        progress={"step": steps},
    )


def tensors_of(run: RunState) -> list[torch.Tensor]:
    optimizer = run.optimizers[0].inner
    moments = [value for state in optimizer.state.values() for value in state.values()]
    return [*run.models[0].module.parameters(), *moments]


def assert_same(run: RunState, other: RunState) -> None:
    for tensor, expected in zip(tensors_of(run), tensors_of(other), strict=True):
        torch.testing.assert_close(tensor, expected, rtol=0, atol=0)


def objects_below(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


@pytest.mark.parametrize(
    "options",
    [Options(), Options(safe_serialization=False), Options(layout="compat")],
    ids=["native", "pickled", "compat"],
)
def test_a_run_is_loaded_as_from_a_folder(
    bucket: BucketPath, tmp_path: Path, options: Options
) -> None:
    run = a_run(steps=2)
    for folder in (bucket / "a", tmp_path / "a"):
        save_run(run, folder, process=OneProcess(), options=options)
    assert layout.verify(bucket / "a").files == layout.verify(tmp_path / "a").files
    for folder in (str(bucket / "a"), tmp_path / "a"):
        loaded = a_run(seed=1)
        load_run(loaded, folder, process=OneProcess())
        assert_same(loaded, run)


def test_a_save_replaces_what_it_has_seen(bucket: BucketPath) -> None:
    """Of two writers that began on the same checkpoint one wins, and the other one's files are deleted."""
    folder = bucket / "a"
    for steps in (1, 2):
        save_run(a_run(steps=steps), folder, process=OneProcess())
    files = objects_below(folder)
    assert len({name.partition("/")[0] for name in files}) == 2  # the manifest, one folder

    class SavesMeanwhile:
        def state_dict(self) -> dict[str, int]:
            save_run(a_run(steps=3), folder, process=OneProcess())
            return {}

        def load_state_dict(self, state: object) -> None: ...

    loser = a_run(steps=4)
    loser.custom = [SavesMeanwhile()]
    with pytest.raises(CheckpointError, match=r"another run saved"):
        save_run(loser, folder, process=OneProcess())
    winner = a_run(seed=1)
    assert load_run(winner, folder, process=OneProcess()).step == 3
    assert_same(winner, a_run(steps=3))
    assert len(objects_below(folder)) == len(files)


def test_requests_of_a_save() -> None:
    """One for each file, and a few for the commit, which looks at no file by itself."""
    with S3Server() as server:
        for steps in (1, 2):
            server.requests.clear()
            save_run(a_run(steps=steps), "s3://bucket/run/a", process=OneProcess())
            acts = collections.Counter(request.act for request in server.requests)
            heads = [request for request in server.requests if request.method == "HEAD"]
            files = layout.verify("s3://bucket/run/a").files
            assert acts["put"] == len(files) + 1 and acts["list"] == 1 and len(heads) == 1
            assert acts["get"] == 2 and acts["delete_many"] == steps - 1


def test_a_lost_answer_to_the_commit() -> None:
    """The store has written the manifest, and the client has seen an error: the save is known to be committed."""
    with S3Server() as server:
        for steps in (1, 2):
            names = iter(["500-after"])

            def plan(request: Request, names: object = names) -> str | None:
                if request.method == "PUT" and request.key.endswith(MANIFEST):
                    return next(names, None)  # type: ignore[call-overload]
                return None

            server.faults = plan
            save_run(a_run(steps=steps), "s3://bucket/run/a", process=OneProcess())
            assert load_run(a_run(), "s3://bucket/run/a", process=OneProcess()).step == steps
        assert server.injected["500-after"] == 2
        assert len({key.split("/")[2] for key in sorted(server.keys())}) == 2


def test_hooks_read_and_write_local_folders(bucket: BucketPath) -> None:
    folders: list[str] = []

    def write(models: object, weights: list[dict[str, torch.Tensor]], folder: str) -> None:
        folders.append(folder)
        Path(folder, "inner").mkdir()
        Path(folder, "inner", "extra.txt").write_text("what a hook has")
        Path(folder, "empty").touch()
        weights[0].pop("0.weight")

    def read(models: list[torch.nn.Module], folder: str) -> None:
        folders.append(folder)
        assert Path(folder, "inner", "extra.txt").read_text() == "what a hook has"
        models.pop()

    run = a_run(steps=1)
    run.save_hooks = [write]
    save_run(run, bucket / "a", process=OneProcess())
    assert {"inner/extra.txt", "empty"} <= layout.verify(bucket / "a").files.keys()
    loaded = a_run()
    loaded.load_hooks = [read]
    load_run(loaded, bucket / "a", process=OneProcess())
    assert len(loaded.optimizers[0].inner.state) == 4
    assert not any(Path(folder).exists() for folder in folders)


def test_a_background_save_waits_for_the_copy_only(
    bucket: BucketPath, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("accelerate.checkpointing.writer._UNNOTICED", 0.0)
    with S3Server(faults=lambda request: "slow", slow=0.2) as server:
        run = a_run(steps=1)
        writer = Writer()
        begin = time.perf_counter()
        save_run(run, "s3://bucket/run/a", process=OneProcess(), writer=writer)
        took = time.perf_counter() - begin
        assert not writer.is_done
        with torch.no_grad():
            next(run.models[0].module.parameters()).zero_()
        save_run(run, "s3://bucket/run/b", process=OneProcess(), writer=writer)
        assert "s3://bucket/run/a" in caplog.text and "interval" in caplog.text
        writer.wait()
        assert took < time.perf_counter() - begin - took
        server.faults = None
        loaded = a_run(seed=1)
        load_run(loaded, "s3://bucket/run/a", process=OneProcess())
        assert_same(loaded, a_run(steps=1))


def accelerator(bucket: BucketPath) -> tuple[Accelerator, torch.nn.Module, Any]:
    project = ProjectConfiguration(
        project_dir=str(bucket), automatic_checkpoint_naming=True, total_limit=3
    )
    made = Accelerator(cpu=True, project_config=project)
    run = a_run()
    model, optimizer = made.prepare(run.models[0].module, run.optimizers[0].inner)
    return made, model, optimizer


def test_a_run_resumes_with_the_newest_whole_checkpoint(bucket: BucketPath) -> None:
    made, model, _ = accelerator(bucket)
    assert made.resume() is None
    for value in range(5):
        with torch.no_grad():
            next(model.parameters()).fill_(value)
        path = made.save_state(blocking=bool(value % 2))
        assert path == f"{bucket}/checkpoints/checkpoint_{value}"
    made.end_training()
    directory = bucket / "checkpoints"
    assert [number for number, _ in layout.list_checkpoints(directory)] == [2, 3, 4]

    # A save was killed, and a byte of the newest checkpoint has changed.
    (directory / "checkpoint_5" / layout.new_token() / "model.safetensors").write_text("half")
    damaged = layout.read_manifest(directory / "checkpoint_4").files_in(directory / "checkpoint_4")
    weights = damaged / "model.safetensors"
    weights.bucket.write(weights.key, [weights.read_bytes()[:-1] + b"!"])
    made, model, _ = accelerator(bucket)
    report = made.resume()
    assert report is not None and str(report.folder) == f"{directory}/checkpoint_3"
    assert [str(folder) for folder, _ in report.skipped] == [f"{directory}/checkpoint_4"]
    assert next(model.parameters()).eq(3).all()
    # Nothing can be renamed: the number of the damaged one is left out.
    assert made.save_state() == f"{directory}/checkpoint_5"
    made.end_training()
    assert [number for number, _ in layout.list_checkpoints(directory)] == [3, 4, 5]

    # Another run has begun meanwhile.
    made, _, _ = accelerator(bucket)
    with pytest.raises(ConfigurationError, match="checkpoint_3"):
        made.project_configuration.iteration = 3
        made.save_state()


def test_places_that_nothing_is_saved_in(caplog: pytest.LogCaptureFixture) -> None:
    with S3Server() as server:
        with pytest.raises(CheckpointError, match=r"bucket does not exist") as caught:
            save_run(a_run(), "s3://absent/run/a", process=OneProcess())
        assert "a-secret" not in str(caught.value)
        assert caplog.messages == []
        with pytest.raises(CheckpointError, match=r"s3://bucket is an entire bucket"):
            save_run(a_run(), "s3://bucket", process=OneProcess())
        assert server.keys() == []


def test_a_bucket_that_may_only_be_read() -> None:
    """A program that loads is not refused; one that trains is, when its optimizer is prepared."""
    with S3Server() as server:
        project = ProjectConfiguration("s3://bucket/run", automatic_checkpoint_naming=True)
        trained = torch.nn.Linear(2, 2)
        made = Accelerator(cpu=True, project_config=project)
        made.prepare(trained)
        made.save_state()
        made.end_training()
        server.faults = lambda request: "403" if request.method in ("PUT", "DELETE") else None
        made = Accelerator(
            cpu=True,
            project_config=ProjectConfiguration(
                "s3://bucket/run", automatic_checkpoint_naming=True
            ),
        )
        model = made.prepare(torch.nn.Linear(2, 2))
        made.load_state(models_only=True)
        assert torch.equal(model.weight, trained.weight)
        with pytest.raises(MissingCheckpointError, match=r"checkpoint at s3://bucket/run$"):
            made.load_state("s3://bucket/run")
        with pytest.raises(CheckpointError, match=r"bucket does not exist"):
            made.load_state("s3://absent/run")
        with pytest.raises(CheckpointError, match=r"cannot write s3://bucket/run.*AccessDenied"):
            made.prepare(torch.optim.SGD(model.parameters()))


def test_a_part_of_a_tensor_is_read_by_its_blocks(
    bucket: BucketPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saved whole, and read as ranks with other shards read it: the blocks that have these rows, once."""
    monkeypatch.setattr(bucket_shards, "_BLOCK", 1024)
    tensors = {
        "rows": torch.arange(4096.0).reshape(64, 64),
        "scalar": torch.tensor(7.0),
        "none": torch.empty(0, 3),
        "halves": torch.arange(24, dtype=torch.bfloat16).reshape(2, 3, 4),
    }
    writer = bucket_shards.ShardWriter(bucket)
    dcp.save(dict(tensors), storage_writer=writer, no_dist=True)
    reads: list[int] = []
    read_at = BucketPath.read_at

    def counted(path: BucketPath, offset: int, target: memoryview) -> None:
        reads.append(len(target))
        read_at(path, offset, target)

    folder = bucket.with_objects(writer.records)
    reader = bucket_shards.ShardReader(folder)
    metadata = reader.read_metadata()
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    monkeypatch.setattr(BucketPath, "read_at", counted)

    def read(name: str, *slices: slice) -> torch.Tensor:
        whole = tensors[name]
        offsets = torch.Size(part.start for part in slices)
        lengths = torch.Size(part.stop - part.start for part in slices)
        index = MetadataIndex(name, torch.Size([0] * whole.ndim))
        zeros = torch.Size([0] * whole.ndim)
        item = ReadItem(LoadItemType.TENSOR, index, zeros, index, offsets, lengths)
        target = torch.empty(lengths, dtype=whole.dtype)

        class Planner(dcp.DefaultLoadPlanner):
            def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
                return target

        reader.read_data(LoadPlan([item]), Planner()).wait()
        assert torch.equal(target, whole[slices] if slices else whole)
        return target

    read("rows", slice(20, 24), slice(0, 64))  # 1024 bytes, in two blocks
    assert reads == [1024, 1024]
    read("rows", slice(20, 24), slice(16, 48))
    assert reads == [1024, 1024]
    read("halves", slice(1, 2), slice(0, 3), slice(1, 3))
    read("scalar")
    read("none", slice(0, 0), slice(0, 3))

    # A block that has changed is found when it is read.
    path = next(folder.glob("*.safetensors"))
    content = bytearray(path.read_bytes())
    content[-2000] ^= 1
    path.bucket.write(path.key, [content])
    folder.cache.clear()
    read("rows", slice(0, 2), slice(0, 64))
    with pytest.raises(CorruptCheckpoint, match=path.name):
        read("rows", slice(0, 64), slice(0, 64))


@pytest.mark.parametrize("has_index", [True, False], ids=["index", "headers"])
def test_requests_of_one_of_a_thousand_ranks(has_index: bool) -> None:
    """It reads the index and its own block. Shards that were copied from a local folder have no index."""
    ranks = 1000
    whole = torch.arange(4.0 * ranks).reshape(ranks, 4)
    row_shape = torch.Size([1, 4])

    def write_item(rank: int) -> WriteItem:
        first = torch.Size([rank, 0])
        chunk = ChunkStorageMetadata(first, row_shape)
        data = TensorWriteData(chunk, TensorProperties(whole.dtype), whole.shape)
        return WriteItem(MetadataIndex("rows", first), WriteItemType.SHARD, tensor_data=data)

    class Rows(dcp.DefaultSavePlanner):
        def resolve_data(self, item: WriteItem) -> torch.Tensor:
            assert item.index.offset is not None
            return whole[item.index.offset[0]].unsqueeze(0)

    with S3Server() as server:
        folder = location("s3://bucket/run", "folder")
        assert isinstance(folder, BucketPath)
        writer = bucket_shards.ShardWriter(folder)
        plans = writer.prepare_global_plan([SavePlan([write_item(rank)]) for rank in range(ranks)])
        with ThreadPoolExecutor(8) as pool:
            results = list(pool.map(lambda plan: writer.write_data(plan, Rows()).wait(), plans))
        writer.finish(Metadata({}), results)
        if has_index:
            content = json.dumps(writer.index).encode()
            writer.records[INDEX] = upload(folder / INDEX, [content])

        server.requests.clear()
        reader = bucket_shards.ShardReader(folder.with_objects(writer.records))
        metadata = reader.read_metadata()
        assert metadata.state_dict_metadata["rows"].size == whole.shape  # type: ignore[union-attr]
        reader.set_up_storage_reader(metadata, is_coordinator=False)
        target = torch.empty(row_shape)

        class Planner(dcp.DefaultLoadPlanner):
            def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
                return target

        index = MetadataIndex("rows", torch.Size([7, 0]))
        zeros = torch.Size([0, 0])
        item = ReadItem(LoadItemType.TENSOR, index, zeros, index, zeros, row_shape)
        reader.read_data(LoadPlan([item]), Planner()).wait()
        assert torch.equal(target, whole[7:8])
        assert len(server.requests) == (2 if has_index else ranks + 1)
        if has_index:
            # It has changed since the save.
            stored = server.objects["bucket", f"run/{INDEX}"]
            stored.data = stored.data.replace(b"F32", b"I32", 1)
            with pytest.raises(CorruptCheckpoint, match=INDEX):
                bucket_shards.ShardReader(folder.with_objects(writer.records)).read_metadata()
