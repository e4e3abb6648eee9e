# SPDX-License-Identifier: Apache-2.0
"""Names, rotation, and the commit's promises under interrupted replacements."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from accelerate.checkpointing import (
    RunState,
    checkpoint_folder,
    list_checkpoints,
    newest_valid,
    rotate,
    save_run,
    verify,
)
from accelerate.checkpointing import commit as committing
from accelerate.checkpointing.layout import MANIFEST


def checkpoints(directory, *numbers):
    return [number for number, _ in list_checkpoints(directory)] == list(numbers)


def save(process, folder, step=0):
    return save_run(RunState(progress={"step": step}), folder, process=process)


def test_names_and_order(tmp_path, process):
    assert checkpoint_folder("run", 7) == Path("run/checkpoints/checkpoint_7")
    for number in (10, 2, 1):
        save(process, tmp_path / f"checkpoint_{number}")
    (tmp_path / "checkpoint_x").mkdir()
    (tmp_path / "checkpoint_3").write_text("a file")
    assert checkpoints(tmp_path, 1, 2, 3, 10) and newest_valid(tmp_path).name == "checkpoint_10"
    assert list_checkpoints(tmp_path / "none") == [] and newest_valid(tmp_path / "none") is None


def test_rotation_keeps_the_last_valid_one(tmp_path, process):
    for number in range(6):
        save(process, tmp_path / f"checkpoint_{number}")
    assert rotate(tmp_path, None) == [] and rotate(tmp_path, 9) == []
    assert [folder.name for folder in rotate(tmp_path, 4)] == ["checkpoint_0", "checkpoint_1"]
    for number in (3, 4, 5):
        (tmp_path / f"checkpoint_{number}" / "session.json").unlink()
    rotate(tmp_path, 1)
    assert checkpoints(tmp_path, 2, 5) and verify(tmp_path / "checkpoint_2")
    assert not [entry for entry in tmp_path.iterdir() if entry.name.startswith(".")]


def test_a_removal_that_was_cut_off_is_finished(tmp_path, process, monkeypatch):
    for number in range(3):
        save(process, tmp_path / f"checkpoint_{number}")
    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", lambda *_, **__: None)  # killed right after the rename
        rotate(tmp_path, 2)
    assert checkpoints(tmp_path, 1, 2) and any(
        entry.name.startswith(".") for entry in tmp_path.iterdir()
    )
    rotate(tmp_path, 2)
    assert not any(entry.name.startswith(".") for entry in tmp_path.iterdir())


class Killed(BaseException):
    pass


@pytest.mark.parametrize("atomic", [True, False])
@pytest.mark.parametrize("at", range(12))
def test_a_replacement_cut_off_at_each_step_loses_nothing(
    tmp_path, process, monkeypatch, at, atomic
):
    """Stop before the n-th change: the next save or load finds one whole checkpoint, and the user's file."""
    folder = tmp_path / "c"
    save(process, folder, step=1)
    (folder / "mine.txt").write_text("mine")
    steps = iter(range(100))

    def counted(function):
        def call(*args, **kwargs):
            if next(steps) == at:
                raise Killed
            return function(*args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(committing, "drop_temporary", lambda temporary: None)
        patch.setattr("accelerate.checkpointing.pending.drop_temporary", lambda temporary: None)
        patch.setattr(os, "rename", counted(os.rename))
        patch.setattr(committing.shutil, "rmtree", counted(committing.shutil.rmtree))
        patch.setattr(committing, "fsync_path", counted(committing.fsync_path))
        patch.setattr(
            committing,
            "_exchange",
            counted(committing._exchange) if atomic else lambda one, other: False,
        )
        try:
            save(process, folder, step=2)
        except Killed:
            pass
    committing.recover_interrupted_commit(folder)
    assert verify(folder).progress["step"] in (1, 2) and (folder / "mine.txt").read_text() == "mine"
    save(process, folder, step=3)
    assert verify(folder).progress == {"step": 3} and (folder / "mine.txt").read_text() == "mine"
    assert [entry.name for entry in tmp_path.iterdir()] == ["c"]
    assert MANIFEST in {entry.name for entry in folder.iterdir()}
