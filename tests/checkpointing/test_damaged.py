# SPDX-License-Identifier: Apache-2.0
"""A run that has skipped damaged checkpoints goes on with their numbers; these are renamed, never removed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch

from accelerate import Accelerator
from accelerate.checkpointing import CorruptCheckpoint, list_checkpoints, verify
from accelerate.core.errors import CheckpointError, ConfigurationError
from accelerate.utils import ProjectConfiguration


def names(folder):
    return sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith("."))


def new_run(root, **more):
    config = ProjectConfiguration(root, automatic_checkpoint_naming=True, **more)
    accelerator = Accelerator(project_config=config)
    model = accelerator.prepare(torch.nn.Linear(2, 2))
    return accelerator, model


@pytest.fixture
def root(tmp_path):
    """Checkpoints 0 to 3, in whose weights their number is."""
    accelerator, model = new_run(tmp_path)
    for number in range(4):
        with torch.no_grad():
            model.weight.fill_(number)
        accelerator.save_state()
    accelerator.end_training()
    return tmp_path / "checkpoints"


def cut(root, *numbers):
    for number in numbers:
        path = root / f"checkpoint_{number}" / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-1])


def flip(root, *numbers):
    """Damage that only the checksum shows."""
    for number in numbers:
        path = root / f"checkpoint_{number}" / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-1] + b"\xee")


def lose_rank_file(root, *numbers):
    for number in numbers:
        (root / f"checkpoint_{number}" / "random_states_0.json").unlink()


def file_in_its_place(root, *numbers):
    for number in numbers:
        shutil.rmtree(root / f"checkpoint_{number}")
        (root / f"checkpoint_{number}").touch()


def link_to_a_missing_disk(root, *numbers):
    for number in numbers:
        shutil.rmtree(root / f"checkpoint_{number}")
        (root / f"checkpoint_{number}").symlink_to(root / "no disk" / "checkpoint")


@pytest.mark.parametrize("way", ["resume", "load_state", "auto"])
@pytest.mark.parametrize(
    "damage", [cut, flip, lose_rank_file, file_in_its_place, link_to_a_missing_disk]
)
def test_the_next_save_takes_the_number(root, caplog, way, damage):
    damage(root, 3)
    if way == "auto":
        config = ProjectConfiguration(root.parent, automatic_checkpoint_naming=True)
        accelerator = Accelerator(project_config=config, resume="auto")
        model = accelerator.prepare(torch.nn.Linear(2, 2))
        assert accelerator.resumed.folder.name == "checkpoint_2"
    else:
        accelerator, model = new_run(root.parent)
        report = accelerator.resume(signals=()) if way == "resume" else accelerator.load_state()
        assert report.folder.name == "checkpoint_2" and [
            path.name for path, _ in report.skipped
        ] == ["checkpoint_3"]
    assert model.weight[0, 0] == 2
    assert names(root) == [f"checkpoint_{number}" for number in range(4)]  # a load moves nothing
    assert Path(accelerator.save_state(blocking=way != "resume")).name == "checkpoint_3"
    assert Path(accelerator.save_state()).name == "checkpoint_4"
    assert "checkpoint_3.damaged" in names(root) and verify(root / "checkpoint_3")
    moved = [
        record.getMessage()
        for record in caplog.records
        if "checkpoint_3.damaged" in record.getMessage()
    ]
    assert len(moved) == 1 and ("is damaged" in moved[0] or "is a " in moved[0])
    with pytest.raises(CheckpointError):
        verify(root / "checkpoint_3.damaged")
    accelerator.end_training()


def test_several_in_a_row_names_that_are_taken_and_the_limit(root):
    for _ in range(2):
        cut(root, 2)
        flip(root, 3)
        accelerator, _ = new_run(root.parent, total_limit=3)
        accelerator.resume(signals=())
        for _ in range(2):
            accelerator.save_state()
        accelerator.end_training()
    left = ["checkpoint_1", "checkpoint_2", "checkpoint_2.damaged", "checkpoint_2.damaged-2"]
    assert names(root) == [*left, "checkpoint_3", "checkpoint_3.damaged", "checkpoint_3.damaged-2"]
    for number, folder in list_checkpoints(root):
        assert verify(folder).progress["iteration"] == number


def test_where_all_are_damaged_nothing_moves(root):
    flip(root, 0, 1)
    cut(root, 2, 3)
    for call in (lambda run: run.resume(signals=()), lambda run: run.load_state()):
        accelerator, model = new_run(root.parent)
        before = model.weight.clone()
        with pytest.raises(
            CheckpointError, match=r"does not contain a valid checkpoint.*move them away"
        ):
            call(accelerator)
        assert torch.equal(model.weight, before)
        with pytest.raises(ConfigurationError, match="already exists"):
            accelerator.save_state()
        accelerator.end_training()
    assert names(root) == [f"checkpoint_{number}" for number in range(4)]


def test_an_explicit_path_is_refused_and_stays(root):
    flip(root, 3)
    accelerator, _ = new_run(root.parent)
    with pytest.raises(CorruptCheckpoint, match=r"model\.safetensors"):
        accelerator.load_state(root / "checkpoint_3")
    accelerator.load_state(root / "checkpoint_2")
    with pytest.raises(ConfigurationError, match="already exists"):
        accelerator.save_state()
    assert names(root) == [f"checkpoint_{number}" for number in range(4)]


def test_one_that_another_run_has_saved_since_is_not_moved(root):
    flip(root, 3)
    accelerator, _ = new_run(root.parent)
    accelerator.load_state()
    shutil.rmtree(root / "checkpoint_3")
    shutil.copytree(root / "checkpoint_1", root / "checkpoint_3")
    with pytest.raises(CheckpointError, match="by another run"):
        accelerator.save_state()
    assert names(root) == [f"checkpoint_{number}" for number in range(4)]
    accelerator.end_training()


def test_a_link_to_a_damaged_checkpoint_is_renamed_alone(root, tmp_path):
    target = tmp_path / "elsewhere"
    os.rename(root / "checkpoint_3", target)
    (root / "checkpoint_3").symlink_to(target)
    (target / "session.json").unlink()
    accelerator, _ = new_run(root.parent)
    accelerator.resume(signals=())
    accelerator.save_state()
    accelerator.end_training()
    assert (root / "checkpoint_3.damaged").is_symlink() and target.is_dir()
    assert not (root / "checkpoint_3").is_symlink() and verify(root / "checkpoint_3")


def test_a_save_in_the_background_is_waited_for(root):
    accelerator, model = new_run(root.parent)
    accelerator.resume(signals=())
    with torch.no_grad():
        model.weight.fill_(4)
    accelerator.save_state(blocking=False)
    assert accelerator.load_state().skipped == []
    assert model.weight[0, 0] == 4
    accelerator.save_state(blocking=False)
    accelerator.end_training()
    assert names(root) == [f"checkpoint_{number}" for number in range(6)]
