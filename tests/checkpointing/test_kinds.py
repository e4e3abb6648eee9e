# SPDX-License-Identifier: Apache-2.0
"""A kind of state that is added to the table, and to nothing else, is saved, checked, counted and loaded."""

from __future__ import annotations

import logging

import pytest
import torch

from accelerate import Accelerator
from accelerate.checkpointing import CheckpointMismatch, Options, kinds, load_run, save_run
from accelerate.checkpointing.kinds import StateKind, Written
from accelerate.checkpointing.layout import CorruptCheckpoint
from accelerate.core.errors import CheckpointError


class Average:
    """An average of weights that a model has."""

    def __init__(self) -> None:
        self.values = torch.zeros(50)

    def state_dict(self):
        return {"values": self.values, "decay": 0.5}

    def load_state_dict(self, state):
        if state["values"].shape != self.values.shape:
            raise CheckpointError("it has a different shape")
        self.values = state["values"].clone()


class AverageKind(StateKind):
    def objects(self, run):
        return [model.module.average for model in run.models]


@pytest.fixture
def add_kind(monkeypatch):
    def add(written, **fields):
        kind = AverageKind("traces", "weight trace", written, "average", **fields)
        monkeypatch.setattr(kinds, "KINDS", (*kinds.KINDS, kind))

    return add


def averaged(run, value=0.0):
    run.model.average = Average()
    run.model.average.values.fill_(value)
    return run


@pytest.mark.parametrize("written", [Written.FILE, Written.ONCE, Written.RANK])
def test_a_new_kind_is_saved_and_loaded_by_the_accelerator(tmp_path, add_kind, written):
    add_kind(written)

    def build(value):
        accelerator = Accelerator(cpu=True)
        model = torch.nn.Linear(2, 2)
        model.average = Average()
        model.average.values.fill_(value)
        return accelerator, accelerator.prepare(model)

    accelerator, _ = build(3.0)
    accelerator.save_state(tmp_path / "c")
    files = {path.name for path in (tmp_path / "c").iterdir()}
    assert ("average.safetensors" in files) == (written is Written.FILE)
    other, loaded = build(0.0)
    other.load_state(tmp_path / "c")
    assert torch.equal(loaded.average.values, torch.full((50,), 3.0))


@pytest.mark.parametrize("written", [Written.FILE, Written.ONCE, Written.RANK])
def test_a_new_kind_is_counted_and_its_damage_found(
    tmp_path, small_run, process, add_kind, written
):
    save_run(averaged(small_run()).bundle(), tmp_path / "before", process=process)
    add_kind(written)
    other = averaged(small_run(seed=1), 7.0)
    with pytest.raises(CheckpointMismatch, match="0 weight traces saved, 1 here"):
        load_run(other.bundle(), tmp_path / "before", process=process)
    save_run(other.bundle(), tmp_path / "c", process=process)
    other.model.average.values = torch.zeros(3)
    with pytest.raises(CheckpointError, match=r"/c: weight trace 0 \(Average\).*a different shape"):
        load_run(other.bundle(), tmp_path / "c", process=process)
    name = {Written.FILE: "average", Written.ONCE: "session", Written.RANK: "random_states_0"}[
        written
    ]
    (tmp_path / "c" / f"{name}.json").write_bytes(
        b" " * (tmp_path / "c" / f"{name}.json").stat().st_size
    )
    with pytest.raises(CorruptCheckpoint, match=f"{name}.json"):
        load_run(other.bundle(), tmp_path / "c", process=process)


def test_a_version_without_the_kind_reports_what_it_leaves_out(
    tmp_path, small_run, process, add_kind, monkeypatch
):
    with monkeypatch.context():
        add_kind(Written.ONCE)
        save_run(averaged(small_run()).bundle(), tmp_path / "c", process=process)
        monkeypatch.undo()
    report = load_run(small_run(seed=1).bundle(), tmp_path / "c", process=process)
    (note,) = report.notes
    assert note.startswith("traces: not loaded")


@pytest.mark.parametrize("written", [Written.FILE, Written.ONCE, Written.RANK])
def test_layout_compat_warns_of_a_kind_without_a_file(
    tmp_path, small_run, process, add_kind, written, caplog
):
    add_kind(written)
    with caplog.at_level(logging.WARNING):
        save_run(
            averaged(small_run()).bundle(),
            tmp_path / "c",
            process=process,
            options=Options("compat"),
        )
    assert "layout='compat'" in caplog.text and "weight trace, which is not saved" in caplog.text
    other = averaged(small_run(seed=1), 7.0)
    report = load_run(other.bundle(), tmp_path / "c", process=process)
    assert other.model.average.values[0] == 7
    assert written is Written.RANK or "weight trace" in report.notes[0]


def test_layout_compat_warns_of_unfinished_gradients(tmp_path, caplog):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = accelerator.prepare(torch.nn.Linear(2, 2))
    accelerator.save_state(tmp_path / "a", layout="compat")
    assert "cannot store" not in caplog.text
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.ones(1, 2)).sum())
    accelerator.save_state(tmp_path / "b", layout="compat")
    assert "layout='compat'" in caplog.text
    assert "unfinished gradients and random streams" in caplog.text


def test_a_damaged_file_of_a_hook_is_found(tmp_path, small_run, process):
    def write(models, weights, folder):
        with open(f"{folder}/adapter.json", "w") as file:
            file.write("{}")

    save_run(small_run().bundle(save_hooks=[write]), tmp_path / "c", process=process)
    (tmp_path / "c" / "adapter.json").write_text("[]")
    with pytest.raises(CorruptCheckpoint, match=r"adapter\.json"):
        load_run(small_run().bundle(), tmp_path / "c", process=process)
