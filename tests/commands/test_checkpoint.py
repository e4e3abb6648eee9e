# SPDX-License-Identifier: Apache-2.0
"""`accelerate checkpoint`: whole checkpoints pass, damaged ones are named."""

import hashlib
import json
import os
import time

import pytest
import torch
from s3_server import S3Server, Stored, Upload

from accelerate import Accelerator
from accelerate.checkpointing import copying
from accelerate.checkpointing.layout import list_checkpoints, read_manifest, set_aside
from accelerate.commands.checkpoint import main
from accelerate.core import buckets
from accelerate.core.buckets import Bucket
from accelerate.core.files import location
from accelerate.utils import ProjectConfiguration


@pytest.fixture
def project(tmp_path):
    accelerator = Accelerator(
        cpu=True,
        project_config=ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True),
    )
    accelerator.prepare(torch.nn.Linear(3, 3))
    for _ in range(2):
        accelerator.save_state()
    return tmp_path


def run(*arguments):
    with pytest.raises(SystemExit) as end:
        main([str(argument) for argument in arguments])
    return end.value.code


def test_whole_and_damaged(project, capsys):
    assert run("verify", project) == 0
    assert capsys.readouterr().out.count("ok ") == 2
    weights = project / "checkpoints" / "checkpoint_1" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert run("list", project) == 0
    capsys.readouterr()
    assert run("verify", project / "checkpoints") == 1
    told = capsys.readouterr().out
    assert told.count("ok ") == 1
    assert "model.safetensors" in told.split("BAD", 1)[1]
    assert run("verify", project / "checkpoints" / "checkpoint_0") == 0


def test_json(project, capsys):
    damaged = project / "checkpoints" / "checkpoint_1"
    (damaged / "model.safetensors").write_bytes(b"")
    for action in ("list", "verify"):
        assert run(action, project, "--json") == 1
        told = json.loads(capsys.readouterr().out)
        whole, bad = told["checkpoints"]
        assert whole["ok"] and whole["world_size"] == 1 and whole["problem"] is None
        assert whole["bytes"] > 0 and whole["step"] == 0
        assert not bad["ok"] and bad["path"] == str(damaged)
        assert "model.safetensors" in bad["problem"] and bad.keys() == whole.keys()
    set_aside(damaged)
    assert run("list", project, "--json") == 0
    (moved,) = json.loads(capsys.readouterr().out)["set_aside"]
    assert "checkpoint_1.damaged" in moved
    # Only what a killed save has left.
    leftover = project / "killed" / "checkpoints" / ".checkpoint_0.tmp-0123abcd"
    leftover.mkdir(parents=True)
    os.utime(leftover, (0, 0))
    assert run("list", project / "killed", "--json") == 1
    assert len(json.loads(capsys.readouterr().out)["unfinished"]) == 1
    assert run("list", project / "absent", "--json") == 1
    assert json.loads(capsys.readouterr().out)["checkpoints"] == []


@pytest.mark.parametrize(
    "files, what",
    [
        (["config.json", "model.safetensors"], "from_pretrained"),
        (["adapter_config.json"], "PeftModel"),
        (["random_states_0.pkl", "pytorch_model.bin"], "another library"),
        ([".metadata", "__0_0.distcp"], "torch.distributed.checkpoint"),
        (["model.safetensors"], "weights"),
        (["telemetry/rank_0"], "of a run"),
        (["notes.txt"], "notes.txt"),
        ([], "empty"),
        (["runs/best/checkpoint_manifest.json"], "/runs"),
    ],
)
def test_what_a_folder_without_a_checkpoint_is(files, what, tmp_path, capsys):
    for name in files:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    for action in ("list", "verify"):
        assert run(action, tmp_path) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert str(tmp_path) in line and what in line.partition(str(tmp_path))[2]


def test_checkpoints_that_were_set_aside_are_listed(project, capsys):
    folder = project / "checkpoints"
    moved = [set_aside(folder / "checkpoint_1"), set_aside(folder / "checkpoint_0")]
    assert run("list", project) == 0
    told = capsys.readouterr().out
    assert (
        told.index("checkpoint_0.damaged") < told.index("checkpoint_1.damaged")
        and "ok" not in told.split()
    )
    moved[0].rename(folder / "checkpoint_1")
    assert run("list", folder) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[0].startswith("ok ") and told[1].startswith(f"set aside {moved[1]}:")


def test_the_certificate_of_a_run_is_named(project, tmp_path, capsys, monkeypatch, caplog):
    card = tmp_path / "certificate.yaml"
    card.write_text("verdict: equal")
    monkeypatch.setenv("ACCELERATE_CERTIFICATE", str(card))
    accelerator = Accelerator(cpu=True)
    accelerator.save_state(tmp_path / "named")
    digest = hashlib.sha256(b"verdict: equal").hexdigest()
    assert read_manifest(tmp_path / "named").certificate == digest
    for action in ("list", "verify"):
        assert run(action, tmp_path / "named") == 0
        assert f"certificate {digest[:12]}" in capsys.readouterr().out
    # A card that is gone does not stop the run, and a checkpoint without one has no field for it.
    card.unlink()
    accelerator.save_state(tmp_path / "unnamed")
    assert str(card) in caplog.text
    assert "certificate" not in (tmp_path / "unnamed" / "checkpoint_manifest.json").read_text()


def check(location, capsys, *options):
    """The exit code of a check, and {promise: (kept, detail)}."""
    code = run("check", location, "--json", "--size", 20, *options)
    promises = json.loads(capsys.readouterr().out)["promises"]
    return code, {row["name"]: (row["kept"], row["detail"]) for row in promises}


def broken(promises):
    return {name for name, (kept, _) in promises.items() if not kept}


def test_a_store_that_keeps_its_promises(capsys):
    with S3Server() as server:
        server.objects["bucket", "run/theirs"] = Stored(b"of the user", "1", 0.0)
        code, promises = check("s3://bucket/run", capsys)
        assert code == 0 and broken(promises) == set() and len(promises) == 11
        # The large object went up in parts, and nothing is left.
        assert {"part", "complete"} <= {request.act for request in server.requests}
        assert server.keys() == ["run/theirs"] and server.uploads == {}
        assert all(key.startswith("run/") for key in {each.key for each in server.requests} - {""})
    assert run("check", "memory://promises/run", "--size", 1) == 0
    assert capsys.readouterr().out.count("ok ") == 11


@pytest.mark.parametrize(
    "store, expected",
    [
        # As those from before conditional writes: each of two runs would think that it has saved.
        ({"conditions": False}, {"create-only", "conditional replacement"}),
        ({"stale": 60.0}, {"list-after-write"}),
    ],
)
def test_a_store_that_breaks_a_promise(store, expected, capsys):
    with S3Server(**store) as server:
        code, promises = check("s3://bucket", capsys)
    assert code == 1 and broken(promises) == expected
    if "conditions" in store:
        assert "5 of 5" in promises["create-only"][1]
        assert server.keys() == []


@pytest.mark.parametrize(
    "act, right", [("put", "put"), ("list", "list"), ("delete_many", "delete"), ("get", "get")]
)
def test_a_right_that_is_missing_is_named(act, right, capsys):
    with S3Server(faults=lambda request: "403" if request.act == act else None):
        code, promises = check("s3://bucket/run", capsys)
    assert code == 1 and right in broken(promises)
    assert "AccessDenied" in promises[right][1]
    if right == "put":
        # Nothing else can be tried.
        assert list(promises) == ["put"]


def test_a_check_needs_a_bucket_that_is_there(tmp_path, capsys, monkeypatch):
    with S3Server():
        code, promises = check("s3://absent/run", capsys)
        assert code == 1 and "NoSuchBucket" in promises["put"][1]
    assert run("check", tmp_path) == 2
    assert str(tmp_path) in capsys.readouterr().err
    monkeypatch.setattr(buckets, "is_available", lambda name: name != "obstore")
    assert run("check", "s3://bucket/run") == 2
    assert "accelerate[buckets]" in capsys.readouterr().err


def test_unfinished_uploads(project, capsys, monkeypatch):
    pytest.importorskip("boto3")
    with S3Server() as server:
        assert run("copy", project, "s3://bucket/run") == 0
        for number, key in enumerate(("run/parts", "other/parts")):
            server.uploads[str(number)] = Upload("bucket", key, 0.0, {})
        capsys.readouterr()
        assert run("list", "s3://bucket/run", "--uploads") == 0
        told = capsys.readouterr().out
        assert "run/parts: begun 1970-01-01" in told and "other/parts" not in told
        server.faults = lambda request: "403"
        assert run("list", "s3://bucket/run", "--uploads") == 2
        assert "AccessDenied" in capsys.readouterr().err
    for path in (project, "memory://uploads/run"):
        assert run("list", path, "--uploads") == 2
        assert str(path) in capsys.readouterr().err


def test_nothing_there(tmp_path, capsys):
    for action in (["verify"], ["list"], ["prune"], ["copy", tmp_path / "copy"]):
        assert run(action[0], tmp_path / "none", *action[1:]) == 1
    assert "there is no checkpoint" in capsys.readouterr().err


# -- copies, and checkpoints in buckets


@pytest.fixture
def bucket(project, request):
    """The place of a copy of the project in a bucket."""
    place = f"memory://{request.node.name.partition('[')[0]}/run"
    assert run("copy", project, place) == 0
    return place


def contents(folder):
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and not path.name.endswith(".lock")
    }


def test_copies_between_folders_and_buckets(project, bucket, tmp_path_factory, capsys):
    other = bucket.replace("memory://", "memory://other-")
    assert run("copy", bucket, other) == 0
    back = tmp_path_factory.mktemp("copies") / "back"
    assert run("copy", other, back) == 0
    assert contents(back) == contents(project)
    # Again: the copies are there already. Another checkpoint is not replaced.
    assert run("copy", project, bucket) == 0
    one = f"{bucket}/checkpoints/checkpoint_1"
    capsys.readouterr()
    assert run("copy", project / "checkpoints/checkpoint_0", one) == 1
    assert one in capsys.readouterr().out
    for place in (bucket, f"{bucket}/checkpoints", other, back):
        assert run("verify", place) == 0
        assert run("list", place) == 0
    assert run("verify", one) == 0
    assert capsys.readouterr().out.count("ok ") == 17
    assert run("list", f"{bucket}/elsewhere") == 1


@pytest.mark.parametrize("kind", ["folder", "bucket"])
def test_freely_named_checkpoints(kind, tmp_path, capsys):
    place = tmp_path / "run"
    if kind == "bucket":
        place = location("memory://named/run", "place")
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(torch.nn.Linear(3, 3))
    for name in ("best", "step-2"):
        accelerator.save_state(place / name)
    (place / "other").mkdir(parents=True)
    (place / "other" / "notes.txt").write_text("of the user")
    for action in ("list", "verify"):
        assert run(action, place) == 0
        told = capsys.readouterr().out.splitlines()
        assert [line.split(": ")[0].split("/")[-1] for line in told] == ["best", "step-2"]
        assert all(line.startswith("ok ") for line in told)
    assert run("copy", place, tmp_path / "copy") == 0
    assert sorted(path.name for path in (tmp_path / "copy").iterdir()) == ["best", "step-2"]
    # What has no checkpoint in it is none.
    capsys.readouterr()
    assert run("list", place / "other") == 1
    assert "there is no checkpoint" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["folder", "bucket"])
def test_what_is_not_part_of_a_checkpoint_is_named(kind, project, request, capsys):
    place = project
    if kind == "bucket":
        place = location(request.getfixturevalue("bucket"), "place")
    theirs = place / "checkpoints" / "checkpoint_0" / "notes.txt"
    theirs.write_text("of the user")
    capsys.readouterr()
    assert run("verify", place, "--json") == 0
    rows = json.loads(capsys.readouterr().out)["checkpoints"]
    assert [row["foreign"] for row in rows] == [["notes.txt"], []]
    assert run("verify", place) == 0
    notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note ")]
    assert len(notes) == 1 and "checkpoint_0 " in notes[0] and notes[0].endswith(": notes.txt")
    assert run("prune", place, "--keep", 1) == 0
    assert [path.name for _, path in list_checkpoints(place / "checkpoints")] == ["checkpoint_1"]
    if kind == "bucket":
        # A folder goes as a whole; in a bucket what saves have written.
        assert [path.name for path in theirs.parent.rglob("*")] == ["notes.txt"]


def test_a_copy_of_many_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr("accelerate.checkpointing.files.BLOCK", 1 << 10)
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(torch.nn.Linear(100, 37))
    accelerator.save_state(tmp_path / "one")
    blocks = read_manifest(tmp_path / "one").files["model.safetensors"].crc32
    assert len(blocks) > 9
    assert run("copy", tmp_path / "one", "memory://blocks/one") == 0
    assert run("copy", "memory://blocks/one", tmp_path / "two") == 0
    assert contents(tmp_path / "two") == contents(tmp_path / "one")


def test_a_copy_of_damaged_files_is_no_checkpoint(project, capsys):
    weights = project / "checkpoints" / "checkpoint_1" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    target = project / "copy"
    for place in ("memory://damaged/run", target):
        assert run("copy", project, place) == 1
        told = capsys.readouterr().out
        assert told.count("ok ") == 1 and "model.safetensors" in told.split("BAD", 1)[1]
        assert run("list", place) == 0
        assert capsys.readouterr().out.count("ok ") == 1
    assert [path.name for path in (target / "checkpoints").iterdir()] == ["checkpoint_0"]
    assert len(list(Bucket.of("memory://damaged")[0].children("run/checkpoints")[0])) == 1


@pytest.mark.parametrize("act", ["put", "get"])
def test_a_copy_that_fails_leaves_nothing(project, act, capsys):
    with S3Server() as server:
        assert run("copy", project / "checkpoints/checkpoint_0", "s3://bucket/a") == 0
        keys = server.keys()
        server.faults = lambda request: (
            "403" if "model" in request.key and request.act == act else None
        )
        capsys.readouterr()
        assert run("copy", "s3://bucket/a", "s3://bucket/b") == 1
        assert "AccessDenied" in capsys.readouterr().out
        assert server.keys() == keys


def test_only_one_of_two_copies_to_one_place_counts(project, monkeypatch, capsys):
    """The other one has written its manifest while this one has copied files."""
    place = "memory://two/run"
    copy_files = copying.copy_files

    def slowly(source, target, *rest):
        monkeypatch.setattr(copying, "copy_files", copy_files)
        assert run("copy", project / "checkpoints/checkpoint_1", place) == 0
        copy_files(source, target, *rest)

    monkeypatch.setattr(copying, "copy_files", slowly)
    assert run("copy", project / "checkpoints/checkpoint_0", place) == 1
    assert run("verify", place) == 0
    assert len(Bucket.of(place)[0].children("run")[0]) == 1


@pytest.mark.parametrize("kind", ["folder", "bucket"])
def test_prune(kind, project, request, capsys, monkeypatch):
    accelerator = Accelerator(
        cpu=True,
        project_config=ProjectConfiguration(
            str(project), automatic_checkpoint_naming=True, iteration=2
        ),
    )
    accelerator.prepare(torch.nn.Linear(3, 3))
    accelerator.save_state()
    place = project
    leftover = project / "checkpoints" / ".checkpoint_7.tmp-0123abcd"
    if kind == "bucket":
        place = location(request.getfixturevalue("bucket"), "place")
        leftover = place / "checkpoints" / "checkpoint_7" / f"parts-{'0' * 32}"
        (leftover / "model.safetensors").write_text("of a killed save")
    else:
        leftover.mkdir()
    assert run("prune", place) == 0
    # It may be that of a save that is under way.
    assert leftover.is_dir()
    now = time.time()
    monkeypatch.setattr("accelerate.checkpointing.layout.time.time", lambda: now + 100_000)
    assert run("list", place) == 0
    assert f"unfinished {leftover}" in capsys.readouterr().out
    assert run("prune", place, "--keep", 2, "--dry_run") == 0
    told = capsys.readouterr().out
    assert f"{leftover}\n" in told and "checkpoint_0\n" in told and "checkpoint_1\n" not in told
    assert leftover.is_dir()
    assert run("prune", place, "--keep", 2) == 0
    assert not leftover.is_dir()
    assert [path.name for _, path in list_checkpoints(place / "checkpoints")] == [
        "checkpoint_1",
        "checkpoint_2",
    ]
    assert run("verify", place) == 0
    assert run("prune", place, "--keep", 2) == 0
    assert "nothing" in capsys.readouterr().out
