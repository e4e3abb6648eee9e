# SPDX-License-Identifier: Apache-2.0
"""Which folder a path leads to: symbolic links, paths that name no folder, files of the user's that must stay."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from accelerate import Accelerator
from accelerate.checkpointing import RunState, list_checkpoints, rotate, save_run, verify
from accelerate.checkpointing.merging import merge
from accelerate.core.errors import CheckpointError, ConfigurationError
from accelerate.core.files import atomic_write
from accelerate.utils import ProjectConfiguration


def save(process, folder, step=0, **more):
    return save_run(RunState(progress={"step": step}, **more), folder, process=process)


def names(folder):
    return sorted(entry.name for entry in folder.iterdir())


# --- links ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["checkpoint", "other files", "empty", "absent"])
@pytest.mark.parametrize("kind", ["absolute", "relative", "chain"])
def test_a_save_through_a_link_writes_the_target(tmp_path, process, state, kind):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    real = scratch / "real"
    if state == "checkpoint":
        save(process, real, step=1)
        (real / "mine.txt").write_text("mine")
    elif state != "absent":
        real.mkdir()
        if state == "other files":
            (real / "mine.txt").write_text("mine")
    link = tmp_path / "latest"
    if kind == "chain":
        (tmp_path / "between").symlink_to(real)
        link.symlink_to("between")
    else:
        link.symlink_to(real if kind == "absolute" else Path("scratch/real"))
    save(process, link, step=2)
    assert link.is_symlink() and verify(real).progress == verify(link).progress == {"step": 2}
    if state in ("checkpoint", "other files"):
        assert (real / "mine.txt").read_text() == "mine"
    assert names(scratch) == ["real"]
    assert names(tmp_path) == sorted(
        {"latest", "scratch"} | ({"between"} if kind == "chain" else set())
    )


def test_links_that_lead_nowhere_are_refused(tmp_path, process):
    (tmp_path / "one").symlink_to("two")
    (tmp_path / "two").symlink_to("one")
    (tmp_path / "unmounted").symlink_to(tmp_path / "no disk" / "real")
    for path in ("one", "one/below"):
        with pytest.raises(CheckpointError, match=r"link .*to itself"):
            save(process, tmp_path / path)
    for path in ("unmounted", "unmounted/below"):
        with pytest.raises(CheckpointError, match=r"link to .*no disk"):
            save(process, tmp_path / path)
    assert names(tmp_path) == ["one", "two", "unmounted"]


def test_retention_leaves_links_and_what_they_lead_to(tmp_path, process):
    root, elsewhere = tmp_path / "root", tmp_path / "elsewhere"
    save(process, elsewhere, step=1)
    for number in (1, 2, 3, 4):
        save(process, root / f"checkpoint_{number}")
    (root / "checkpoint_0").symlink_to(elsewhere)
    (root / ".checkpoint_1.trash-mine").mkdir()  # not a name that a removal gives
    (root / ".checkpoint_1.trash-0123abcd").symlink_to(elsewhere)
    rotate(root, 2)
    assert [number for number, _ in list_checkpoints(root)] == [0, 3, 4]
    assert (
        verify(elsewhere).progress == {"step": 1} and (root / ".checkpoint_1.trash-mine").is_dir()
    )
    assert names(root / "checkpoint_0") == names(elsewhere)


def test_a_file_written_through_a_link(tmp_path):
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to("real")
    with atomic_write(tmp_path / "link", "w") as file:
        file.write("new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real").read_text() == "new"


# --- paths that name no folder to save into ------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["", "  ", b"", 3])
def test_what_names_no_folder_is_refused(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    accelerator = Accelerator()
    model = accelerator.prepare(torch.nn.Linear(2, 2))
    calls = [
        accelerator.save_state,
        accelerator.load_state,
        lambda folder: accelerator.save_model(model, folder),
    ]
    if path not in (3, b""):
        calls += [
            lambda folder: ProjectConfiguration(project_dir=folder),
            lambda folder: ProjectConfiguration(logging_dir=folder),
            lambda folder: Accelerator(project_dir=folder),
        ]
    for call in calls:
        with pytest.raises(ConfigurationError, match=r"does not name a folder|not int"):
            call(path)
    assert names(tmp_path) == []


def test_folders_that_a_save_must_not_replace(tmp_path, monkeypatch, process):
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("text")
    cases = dict.fromkeys([".", Path(""), "/", "~", "/proc"], "separate folder")
    for path, reason in {**cases, "file": "is a file", "file/below": "is a file"}.items():
        with pytest.raises(CheckpointError, match=reason):
            save(process, path)
    with pytest.raises(ConfigurationError, match="needs a folder"):
        Accelerator().save_state(None)
    with pytest.raises(CheckpointError, match="is a file"):
        Accelerator().load_state(tmp_path / "file")
    assert (
        names(tmp_path) == ["file", "home"]
        and names(home) == []
        and (tmp_path / "file").read_text() == "text"
    )


# --- files of the user's -------------------------------------------------------------------------------------------


def hook(models, weights, folder):
    (Path(folder) / "adapter").mkdir()
    (Path(folder) / "adapter" / "weights.txt").write_text("of the run")


def test_files_in_subfolders_stay(tmp_path, process):
    folder = tmp_path / "c"
    (folder / "adapter").mkdir(parents=True)
    (folder / "adapter" / "before.txt").write_text("mine")
    save(process, folder, step=1, save_hooks=[hook])
    (folder / "adapter" / "after.txt").write_text("mine too")
    for step in (2, 3):
        save(process, folder, step=step, save_hooks=[hook])
        assert names(folder / "adapter") == ["after.txt", "before.txt", "weights.txt"]
    assert verify(folder).progress == {"step": 3} and names(tmp_path) == ["c"]


def test_an_entry_of_another_kind_is_named_and_nothing_moves(tmp_path, process):
    folder = tmp_path / "c"
    folder.mkdir()
    (folder / "adapter").write_text("a file")
    with pytest.raises(CheckpointError, match=r"adapter is a file, "):
        save(process, folder, save_hooks=[hook])
    assert names(folder) == ["adapter"] and names(tmp_path) == ["c"]


def test_a_merge_does_not_remove_its_own_output(tmp_path, monkeypatch):
    shards = tmp_path / "run" / "pytorch_model_fsdp_0"
    shards.mkdir(parents=True)
    monkeypatch.setattr("accelerate.checkpointing.merging.find_models", lambda folder: {0: shards})
    for output in (shards, tmp_path / "run" / "merged", tmp_path / "run"):
        with pytest.raises(ConfigurationError, match="remove the merged weights"):
            merge(shards if output == shards else tmp_path / "run", output, remove=True)
    (tmp_path / "link").symlink_to(shards)
    with pytest.raises(ConfigurationError, match="is a link"):
        merge(tmp_path / "link", tmp_path / "out", remove=True)
