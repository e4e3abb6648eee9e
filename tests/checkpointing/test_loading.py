# SPDX-License-Identifier: Apache-2.0
"""A run saved and loaded, and everything that can go wrong on the way."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import textwrap
import time

import numpy as np
import pytest
import torch
from ranks import Script

from accelerate import Accelerator
from accelerate.checkpointing import (
    CheckpointMismatch,
    CorruptCheckpoint,
    Options,
    PreparedModel,
    PreparedOptimizer,
    RunState,
    commit,
    load_newest,
    load_run,
    loading,
    newest_valid,
    resume,
    save_run,
    verify,
)
from accelerate.checkpointing.files import BlockIO
from accelerate.checkpointing.layout import MANIFEST, candidates
from accelerate.core.errors import CheckpointError, ConfigurationError


def saved(small_run, process, folder, steps=2, **options):
    run = small_run(
        custom={"seen": [1, (2, 3)], "window": torch.arange(100.0), "best": float("nan")}
    )
    for _ in range(steps):
        run.step()
    save_run(
        run.bundle(progress={"step": steps}), folder, process=process, options=Options(**options)
    )
    return run


@pytest.mark.parametrize(
    "options", [{}, {"safe_serialization": False}, {"layout": "compat"}], ids=str
)
def test_a_loaded_run_is_the_one_that_was_saved(
    tmp_path, small_run, process, same_tensors, options
):
    run = saved(small_run, process, tmp_path / "c", **options)
    drawn = random.random(), np.random.rand(), torch.rand(3).tolist()
    run.step()
    other = small_run(seed=9)
    places = {name: tensor.data_ptr() for name, tensor in other.model.state_dict().items()}
    report = load_run(other.bundle(), tmp_path / "c", process=process)
    assert report.progress == {"step": 2} and report.world_size == 1 and report.notes == []
    assert (random.random(), np.random.rand(), torch.rand(3).tolist()) == drawn
    other.step()
    assert same_tensors(run.weights(), other.weights())
    assert run.scheduler.state_dict() == other.scheduler.state_dict()
    assert other.model.first.weight is other.model.second.weight
    assert {name: tensor.data_ptr() for name, tensor in other.model.state_dict().items()} == places
    state = other.registered.state
    assert (
        state["seen"] == [1, (2, 3)]
        and torch.equal(state["window"], torch.arange(100.0))
        and state["best"] != 0
    )
    names = {entry.name for entry in (tmp_path / "c").iterdir()}
    pickles = {name for name in names if name.endswith((".bin", ".pkl", ".pt"))}
    assert pickles == (
        {"pytorch_model.bin"}
        if options == {"safe_serialization": False}
        else pickles
        if options
        else set()
    )


def test_optimizer_counters_are_not_shared_after_a_load(tmp_path, small_run, process):
    run = saved(small_run, process, tmp_path / "c")
    other = small_run(seed=3)
    load_run(other.bundle(), tmp_path / "c", process=process)
    steps = [state["step"] for state in other.optimizer.state.values()]
    assert len({step.data_ptr() for step in steps}) == len(steps)
    assert all(step == 2 for step in steps) and len(run.optimizer.state) == len(steps)
    # A state that is there already is read into its own memory.
    wide, fresh = small_run(width=8), small_run(width=8, seed=2)
    wide.step()
    save_run(wide.bundle(), tmp_path / "w", process=process)
    expected = wide.optimizer.state[wide.model.first.weight]["exp_avg"].clone()
    wide.step()
    place = wide.optimizer.state[wide.model.first.weight]["exp_avg"].data_ptr()
    for loaded in (wide, fresh):
        load_run(loaded.bundle(), tmp_path / "w", process=process)
        state = loaded.optimizer.state[loaded.model.first.weight]
        assert torch.equal(state["exp_avg"], expected) and state["step"] == 1
    assert wide.optimizer.state[wide.model.first.weight]["exp_avg"].data_ptr() == place


def test_every_damaged_file_is_refused_by_name_and_nothing_changes(
    tmp_path, small_run, process, same_tensors
):
    saved(small_run, process, tmp_path / "c")
    other = small_run(seed=5)
    before = other.weights()
    for path in sorted((tmp_path / "c").iterdir()):
        content = path.read_bytes()
        damages = [content[: len(content) // 2], None]
        damages += [
            content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]
            for at in (0, len(content) // 2, -2)
        ]
        for damaged in damages:
            path.unlink() if damaged is None else path.write_bytes(damaged)
            with pytest.raises(CorruptCheckpoint, match=path.name.replace(".", r"\.")):
                load_run(other.bundle(), tmp_path / "c", process=process)
            with pytest.raises(CorruptCheckpoint, match=path.name.replace(".", r"\.")):
                verify(tmp_path / "c")
        path.write_bytes(content)
    assert same_tensors(before, other.weights()) and not other.optimizer.state
    verify(tmp_path / "c")


def test_the_newest_valid_one_is_taken_and_the_skipped_are_told(tmp_path, small_run, process):
    for number in (0, 1, 2, 10):
        saved(small_run, process, tmp_path / f"checkpoint_{number}", steps=number)
    (tmp_path / "checkpoint_10" / MANIFEST).unlink()
    weights = tmp_path / "checkpoint_2" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\xee")
    assert newest_valid(tmp_path).name == "checkpoint_2"  # by sizes
    report = load_newest(small_run(seed=5).bundle(), tmp_path, process=process)
    assert report.folder.name == "checkpoint_1" and report.progress == {"step": 1}
    told = {path.name: why for path, why in report.skipped}
    assert set(told) == {"checkpoint_10", "checkpoint_2"}
    assert MANIFEST in told["checkpoint_10"] and "model.safetensors" in told["checkpoint_2"]
    assert resume(small_run().bundle(), tmp_path, process=process).folder.name == "checkpoint_1"
    for number in (0, 1):
        (tmp_path / f"checkpoint_{number}" / "session.json").unlink()
    with pytest.raises(
        CheckpointError, match=r"does not contain a valid checkpoint.*session\.json"
    ):
        resume(small_run().bundle(), tmp_path, process=process)
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        load_newest(small_run().bundle(), tmp_path / "none", process=process)


def test_a_directory_whose_checkpoints_are_rotated_while_it_is_read(
    tmp_path, small_run, process, monkeypatch
):
    """The only one was removed after it was listed, and a newer one is there."""
    saved(small_run, process, tmp_path / "checkpoint_0")

    def rotated(directory):
        listing = candidates(directory)
        if (tmp_path / "checkpoint_0").exists():
            (tmp_path / "checkpoint_0").rename(tmp_path / "checkpoint_1")
        return listing

    monkeypatch.setattr(loading, "candidates", rotated)
    report = load_newest(small_run(seed=5).bundle(), tmp_path, process=process)
    assert report.folder.name == "checkpoint_1" and not report.skipped


def test_where_files_are_read_to(tmp_path):
    """The states are on the devices of their objects with each value of the API's, and another one is refused."""
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(2, 2)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    accelerator.save_state(tmp_path / "c")
    average = optimizer.state[model.weight]["exp_avg"].clone()
    for map_location in (None, "cpu", "on_device"):
        optimizer.state[model.weight]["exp_avg"].zero_()
        accelerator.load_state(tmp_path / "c", map_location=map_location)
        assert torch.equal(optimizer.state[model.weight]["exp_avg"], average)
    with pytest.raises(ConfigurationError, match="map_location='cuda'"):
        accelerator.load_state(tmp_path / "c", map_location="cuda")


def test_a_foreign_file_is_refused_by_name(tmp_path, small_run, process, same_tensors):
    """One that the manifest does not list but a load could take for its own, and one of another checkpoint."""
    for number in (0, 1, 2):
        saved(
            small_run,
            process,
            tmp_path / f"checkpoint_{number}",
            steps=number + 1,
            safe_serialization=number != 2,
        )
    foreign = tmp_path / "checkpoint_2" / "model.safetensors"
    shutil.copy(tmp_path / "checkpoint_0" / "model.safetensors", foreign)
    shutil.copy(tmp_path / "checkpoint_0" / "model.safetensors", tmp_path / "checkpoint_1")
    other = small_run(seed=5)
    before = other.weights()
    for number, why in (
        (2, r"model\.safetensors is not one of its files"),
        (1, r"model\.safetensors: .*checksum"),
    ):
        with pytest.raises(CorruptCheckpoint, match=why):
            verify(tmp_path / f"checkpoint_{number}")
        with pytest.raises(CorruptCheckpoint, match=why):
            load_run(other.bundle(), tmp_path / f"checkpoint_{number}", process=process)
    assert same_tensors(before, other.weights())
    assert load_newest(other.bundle(), tmp_path, process=process).folder.name == "checkpoint_0"


def test_another_model_is_listed_and_not_loaded(tmp_path, small_run, process, same_tensors):
    saved(small_run, process, tmp_path / "c")
    other = small_run(seed=5)
    other.model.extra = torch.nn.Linear(2, 2)
    other.model.norm = torch.nn.BatchNorm1d(6)
    del other.model.second
    bundle = other.bundle(
        optimizers=[PreparedOptimizer(torch.optim.AdamW(other.model.parameters()))]
    )
    before = other.weights()
    with pytest.raises(CheckpointMismatch) as caught:
        load_run(bundle, tmp_path / "c", process=process)
    text = str(caught.value)
    assert "missing in the checkpoint: extra.weight, extra.bias" in text
    assert (
        "not in the model: second.bias, second.weight" in text
        or "not in the model: second.weight" in text
    )
    assert "norm.weight (saved [4], here [6])" in text
    assert same_tensors(before, other.weights())
    report = load_run(bundle, tmp_path / "c", process=process, strict=False, models_only=True)
    assert "extra.weight" in report.notes[0]
    first = small_run(seed=0)
    load_run(first.bundle(), tmp_path / "c", process=process)
    assert torch.equal(other.model.first.weight, first.model.first.weight)
    assert torch.equal(other.model.extra.weight, before[-2])


def test_another_optimizer_and_other_numbers_of_objects(tmp_path, small_run, process, same_tensors):
    saved(small_run, process, tmp_path / "c")
    other = small_run(seed=5)
    before = other.weights()
    parameters = list(other.model.parameters())
    groups = torch.optim.AdamW([{"params": parameters[:2]}, {"params": parameters[2:]}])
    fewer = torch.optim.AdamW(parameters[1:])
    for optimizer, needle in (
        (torch.optim.SGD(parameters, lr=0.1), "saved by AdamW, which does not have dampening"),
        (groups, "1 parameter groups saved, 2 here"),
        (fewer, "parameters saved"),
        (torch.optim.AdamW(parameters[::-1]), r"parameter 0: shape \[4, 4\] saved, \[4\] here"),
    ):
        with pytest.raises(CheckpointMismatch, match=f"{needle}.*models_only=True"):
            load_run(
                other.bundle(optimizers=[PreparedOptimizer(optimizer)]),
                tmp_path / "c",
                process=process,
            )
    with pytest.raises(
        CheckpointMismatch, match=r"1 schedulers .*0 here; 1 registered objects .*2 here"
    ):
        load_run(
            other.bundle(schedulers=[], custom=[other.registered] * 2),
            tmp_path / "c",
            process=process,
        )
    assert same_tensors(before, other.weights())
    bundle = other.bundle(optimizers=[PreparedOptimizer(fewer)], schedulers=[], custom=[])
    load_run(bundle, tmp_path / "c", process=process, models_only=True)
    assert not fewer.state
    assert same_tensors(other.weights(), saved(small_run, process, tmp_path / "again").weights())


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EIO])
@pytest.mark.parametrize("call", ["pwritev", "fsync", "mkdir", "rename"])
def test_an_error_of_the_disk_leaves_run_and_older_checkpoint(
    tmp_path, small_run, process, same_tensors, monkeypatch, code, call
):
    run = saved(small_run, process, tmp_path / "c")
    manifest = verify(tmp_path / "c")
    run.step()
    before = run.weights()

    def failing(*_, **__):
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, failing)
        with pytest.raises(CheckpointError, match=os.strerror(code)):
            save_run(run.bundle(), tmp_path / "c", process=process)
    assert verify(tmp_path / "c") == manifest and same_tensors(before, run.weights())
    assert [entry.name for entry in tmp_path.iterdir()] == ["c"]
    save_run(run.bundle(), tmp_path / "c", process=process)
    assert verify(tmp_path / "c") != manifest


def test_an_object_that_cannot_be_saved_is_named(tmp_path, small_run, process):
    run = small_run(custom={"rows": [1, object()]})
    with pytest.raises(
        CheckpointError, match=r"session\.custom\[0\]\.rows\[1\]: a builtins\.object"
    ):
        save_run(run.bundle(), tmp_path / "c", process=process)
    assert not any(tmp_path.iterdir())
    with pytest.raises(ConfigurationError, match="layout"):
        Options(layout="zip")


def test_files_of_the_user_in_the_folder_stay(tmp_path, small_run, process):
    (tmp_path / "c" / "logs").mkdir(parents=True)
    (tmp_path / "c" / "logs" / "events").write_text("x")
    run = saved(small_run, process, tmp_path / "c")  # a folder that was no checkpoint before
    (tmp_path / "c" / "tokenizer.json").write_text("y")
    (tmp_path / "c" / "session.safetensors.bak").write_text("z")
    save_run(run.bundle(custom=[]), tmp_path / "c", process=process)
    names = {entry.name for entry in (tmp_path / "c").iterdir()}
    assert {
        "logs",
        "tokenizer.json",
        "session.safetensors.bak",
    } <= names and "session.safetensors" not in names
    assert (tmp_path / "c" / "logs" / "events").read_text() == "x"
    assert [entry.name for entry in tmp_path.iterdir()] == ["c"]
    verify(tmp_path / "c")


def test_hooks_write_into_the_checkpoint_and_take_weights_away(
    tmp_path, small_run, process, same_tensors
):
    run = small_run()
    run.step()
    calls = []

    def save_hook(models, weights, folder):
        assert models == [run.model] and len(weights) == 1
        torch.save(weights.pop()["norm.bias"], os.path.join(folder, "mine.bin"))

    def load_hook(models, folder):
        calls.append(torch.load(os.path.join(folder, "mine.bin")))
        models.pop()

    save_run(run.bundle(save_hooks=[save_hook]), tmp_path / "c", process=process)
    assert (
        "mine.bin" in verify(tmp_path / "c").files
        and not (tmp_path / "c" / "model.safetensors").exists()
    )
    other = small_run(seed=4)
    before = other.weights()
    load_run(other.bundle(load_hooks=[load_hook]), tmp_path / "c", process=process)
    assert torch.equal(calls[0], run.model.norm.bias) and same_tensors(before, other.weights())
    mine = tmp_path / "c" / "mine.bin"
    mine.write_bytes(mine.read_bytes()[:-1] + b"\x07")
    with pytest.raises(CorruptCheckpoint, match=r"mine\.bin"):
        load_run(other.bundle(load_hooks=[load_hook]), tmp_path / "c", process=process)


def test_models_that_load_in_their_own_way(tmp_path, process):
    class Extra(torch.nn.Module):
        def __init__(self, note):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.rand(3))
            self.note = note

        def get_extra_state(self):
            return {"note": self.note}

        def set_extra_state(self, state):
            self.note = state["note"]

    one, other = Extra("a"), Extra("b")
    save_run(RunState(models=[PreparedModel(one)]), tmp_path / "c", process=process)
    load_run(RunState(models=[PreparedModel(other)]), tmp_path / "c", process=process)
    assert other.note == "a" and torch.equal(one.weight, other.weight)
    half = torch.nn.Linear(30, 20).to(torch.bfloat16)
    wide = torch.nn.Linear(30, 20)
    save_run(
        RunState(models=[PreparedModel(half), PreparedModel(one)]), tmp_path / "c", process=process
    )
    load_run(
        RunState(models=[PreparedModel(wide), PreparedModel(other)]),
        tmp_path / "c",
        process=process,
    )
    assert (
        torch.equal(wide.weight, half.weight.float())
        and (tmp_path / "c" / "model_1.safetensors").exists()
    )


def test_a_manifest_of_the_future_and_one_that_points_outside(tmp_path, small_run, process):
    saved(small_run, process, tmp_path / "c")
    path = tmp_path / "c" / MANIFEST
    data = json.loads(path.read_text())
    data["manifest"]["version"] = 99
    path.write_text(json.dumps(data))
    with pytest.raises(CheckpointError, match="Update accelerate"):
        verify(tmp_path / "c")
    import zlib

    data["manifest"]["version"] = 1
    data["manifest"]["files"]["../../etc/passwd"] = {"size": 1, "block": 1, "crc32": ["00000000"]}
    text = json.dumps(data["manifest"], sort_keys=True, separators=(",", ":"))
    data["crc32"] = f"{zlib.crc32(text.encode()):08x}"
    path.write_text(json.dumps(data))
    with pytest.raises(CorruptCheckpoint, match="outside"):
        verify(tmp_path / "c")


KILLED = """
import sys, torch
from pathlib import Path
from accelerate.checkpointing import PreparedModel, Options, PreparedOptimizer, RunState, Writer, save_run
from accelerate.state import PartialState

root, background = Path(sys.argv[1]), sys.argv[2] == "background"
model = torch.nn.Linear(1000, 1000)
optimizer = torch.optim.AdamW(model.parameters())
state = PartialState(cpu=True)
writer = Writer() if background else None
for number in range(10_000):
    # The whole state is the number, so that a mix of two saves is seen.
    with torch.no_grad():
        model.weight.fill_(number); model.bias.fill_(number)
    parts = dict(models=[PreparedModel(model)], optimizers=[PreparedOptimizer(optimizer)])
    run = RunState(**parts, progress={"number": number})
    save_run(run, root / "same", process=state, writer=writer)
    save_run(run, root / f"checkpoint_{number}", process=state, writer=writer,
             options=Options(checkpoints=root, total_limit=2))
    print(number, flush=True)
"""


@pytest.mark.parametrize("mode", ["blocking", "background"])
def test_killed_anywhere_what_is_listed_as_valid_is_whole(tmp_path, process, mode):
    """SIGKILL at random moments, in one folder that is saved over and over: no mix, no half checkpoint, no loss."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(KILLED))
    chance = random.Random(5)
    last = -1
    for _ in range(3):
        root = tmp_path / "root"
        started = Script(script, root, mode, stdout=subprocess.PIPE)
        for _ in range(chance.randint(2, 5)):
            done = int(started.stdout.readline())
        time.sleep(chance.random() * 0.05)
        started.send_signal(signal.SIGKILL)
        started.wait()
        model = torch.nn.Linear(1000, 1000)
        bundle = RunState(
            models=[PreparedModel(model)],
            optimizers=[PreparedOptimizer(torch.optim.AdamW(model.parameters()))],
        )
        for load, place in ((load_newest, root), (load_run, root / "same")):
            report = load(bundle, place, process=process)
            number = report.progress["number"]
            assert number >= done - (mode == "background") and report.skipped == []
            assert torch.equal(model.weight, torch.full((1000, 1000), float(number)))
            assert torch.equal(model.bias, torch.full((1000,), float(number)))
        for entry in root.iterdir():
            if not entry.name.startswith("."):
                verify(entry)
        last = max(last, done)
    assert last >= 1


class SavesOver:
    """A data loader whose state, while it is compared, another save replaces. Each save has one number everywhere."""

    def __init__(self, folder, process):
        self.folder, self.process, self.number, self.others = folder, process, 0, []

    def run(self, number):
        self.number = number
        model, custom = torch.nn.Linear(3, 3), torch.nn.Linear(2, 2)
        for parameter in (*model.parameters(), *custom.parameters()):
            torch.nn.init.constant_(parameter, number)
        progress = {"number": number}
        return RunState(
            models=[PreparedModel(model)], custom=[custom], dataloaders=[self], progress=progress
        )

    def state_dict(self):
        return {"format": 1, "number": self.number}

    def check_state_dict(self, state):
        if self.others:
            save_run(self.others.pop(), self.folder, process=self.process)

    def load_state_dict(self, state):
        self.number = state["number"]


@pytest.mark.parametrize("layout", ["native", "compat"])
def test_a_folder_that_is_saved_over_while_it_is_read(tmp_path, process, monkeypatch, layout):
    loader = SavesOver(tmp_path / "c", process)
    first = loader.run(1)
    save_run(first, tmp_path / "c", process=process, options=Options(layout=layout))
    loader.others = [loader.run(3), loader.run(2)]
    run = loader.run(0)
    report = load_run(run, tmp_path / "c", process=process)
    values = [*run.models[0].module.parameters(), *run.custom[0].parameters()]
    assert all((value == 3).all() for value in values) and report.progress["number"] == 3
    assert not loader.others, "two saves were mixed"

    plain_check = BlockIO.check

    def check(io, path, record):
        if later:
            save_run(later.pop(), tmp_path / "c", process=process)
        plain_check(io, path, record)

    monkeypatch.setattr(BlockIO, "check", check)
    later = [loader.run(4)]
    assert verify(tmp_path / "c").progress["number"] == 4


def test_what_is_made_anew_while_a_folder_is_replaced_stays(
    tmp_path, small_run, process, monkeypatch
):
    """The user writes just before and just after that."""
    folder = tmp_path / "c"
    run = saved(small_run, process, folder)
    swapped = commit._swapped

    def user_writes(swap, folder):
        (folder / "runs").mkdir()
        (folder / "runs" / "events").write_text("before")
        (folder / "runs" / "log").write_text("before")
        older = swapped(swap, folder)
        (folder / "runs").mkdir()
        (folder / "runs" / "log").write_text("anew")
        return older

    monkeypatch.setattr(commit, "_swapped", user_writes)
    save_run(run.bundle(), folder, process=process)
    texts = {entry.name: entry.read_text() for entry in (folder / "runs").iterdir()}
    assert texts == {"events": "before", "log": "anew", "log.earlier": "before"}
    assert [entry.name for entry in tmp_path.iterdir()] == ["c"]
    verify(folder)
