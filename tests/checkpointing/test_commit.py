# SPDX-License-Identifier: Apache-2.0
"""Two runs and one folder: the second is refused by name, nothing of either is lost, and no dead run is in the way."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from unittest import mock

import pytest
import torch
from ranks import Script

from accelerate import Accelerator
from accelerate.checkpointing import (
    RunState,
    commit,
    list_checkpoints,
    load_run,
    rotate,
    save_run,
    verify,
)
from accelerate.checkpointing.commit import FolderInUse, RunLocks, lock_path
from accelerate.core.errors import CheckpointError
from accelerate.utils import ProjectConfiguration

SCRIPT = """
import sys, torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
naming = {"automatic_checkpoint_naming": True, "total_limit": 2}
accelerator = Accelerator(cpu=True, project_config=ProjectConfiguration(sys.argv[1], **naming))
model = accelerator.prepare(torch.nn.Linear(64, 64))
resumed = False
for number, line in enumerate(sys.stdin):
    if line.strip() == "end":
        break
    try:
        if not resumed:
            accelerator.resume(signals=())
            resumed = True
        print("saved", accelerator.save_state(blocking=number % 2 == 0), flush=True)
    except Exception as error:
        print(type(error).__name__, error, flush=True)
"""


class Other:
    """A run in another process, which saves when it is told to."""

    def __init__(self, tmp_path, folder):
        script = tmp_path / "other.py"
        if not script.exists():  # another one may be reading it
            script.write_text(SCRIPT)
        self.process = Script(script, folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def save(self):
        self.process.stdin.write("save\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def end(self):
        self.process.stdin.write("end\n")
        self.process.stdin.flush()
        self.process.wait(timeout=60)

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


@pytest.fixture
def other(tmp_path):
    started = []

    def start(folder):
        started.append(Other(tmp_path, folder))
        return started[-1]

    yield start
    for run in started:
        run.process.end()


def names(folder):
    return sorted(entry.name for entry in folder.iterdir())


def save(process, folder, step=0):
    return save_run(RunState(progress={"step": step}), folder, process=process)


@pytest.mark.timeout(180)
def test_the_second_of_two_live_runs_is_refused(tmp_path, other):
    root = tmp_path / "root"
    first, second, third = (other(root) for _ in range(3))
    assert first.save().startswith("saved")
    for _ in range(2):
        told = second.save()
        assert (
            "is in use: another run" in told
            and f"pid {first.process.pid}" in told
            and "other.py" in told
        )
        assert first.save().startswith("saved")
    first.kill()
    place = root / "checkpoints"
    assert names(root) == ["checkpoints"]
    assert third.save().startswith("saved")  # at once, although the dead run has left its lock
    third.end()
    kept = [folder.name for _, folder in list_checkpoints(place)]
    assert names(place) == kept
    for name in kept:
        verify(place / name)


def test_a_resume_is_refused_before_anything_is_loaded(tmp_path, other):
    config = ProjectConfiguration(tmp_path / "root", automatic_checkpoint_naming=True)
    run = other(tmp_path / "root")
    assert run.save().startswith("saved")
    accelerator = Accelerator(project_config=config)
    model = accelerator.prepare(torch.nn.Linear(64, 64))
    before = model.weight.clone()
    with pytest.raises(FolderInUse, match=r"nothing was resumed.*is in use"):
        accelerator.resume(signals=())
    assert torch.equal(model.weight, before)
    accelerator.load_state()  # reading needs no lock
    assert not torch.equal(model.weight, before)


def test_a_script_that_saves_once_leaves_nothing(tmp_path, process):
    save(process, tmp_path / "one")
    accelerator = Accelerator()
    accelerator.save_state(tmp_path / "two")
    assert names(tmp_path) == ["one", "two"]
    runs = [
        Accelerator(
            project_config=ProjectConfiguration(
                tmp_path, automatic_checkpoint_naming=True, iteration=number
            )
        )
        for number in range(2)
    ]
    for run in runs:  # two runs of this process share a lock
        run.save_state(blocking=False)
        run._checkpoints._writer.wait()
        assert max(names(tmp_path / "checkpoints")) == f"checkpoint_{runs.index(run)}"
        assert names(tmp_path) == ["checkpoints", "one", "two"]
    for run in runs:
        run.end_training()
    assert names(tmp_path / "checkpoints") == ["checkpoint_0", "checkpoint_1"]


def test_a_process_takes_the_place_of_the_one_that_started_it(tmp_path, process):
    """A notebook that saves and then waits for a script; and back again."""
    locks = RunLocks()
    locks.acquire(tmp_path / "c")
    code = (
        "import sys; from pathlib import Path; from accelerate.checkpointing.commit import RunLocks; "
        "RunLocks().acquire(Path(sys.argv[1])); print('taken')"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "c")]
    assert (
        subprocess.run(command, capture_output=True, text=True, timeout=120).stdout.strip()
        == "taken"
    )
    save(process, tmp_path / "c")
    locks.release()
    assert names(tmp_path) == ["c"]


def test_a_forked_child_holds_nothing_of_its_parent(tmp_path):
    locks = RunLocks()
    locks.acquire(tmp_path / "c")
    child = os.fork()
    if child == 0:
        locks.release()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0 and names(tmp_path) == [".c.lock"]
    locks.release()
    assert names(tmp_path) == []


def foreign(path):
    """The lock file has the content of a run on another machine, where the file system has no locks."""
    row = {"host": "node7", "pid": 1, "since": 0.0, "command": "train.py"}
    path.write_text(json.dumps(row))


def test_a_run_that_is_freed_leaves_no_open_file(tmp_path):
    """Also without `end_training`: another process may save into its folder then."""
    for number in range(2):
        accelerator = Accelerator(
            project_config=ProjectConfiguration(
                tmp_path / str(number), automatic_checkpoint_naming=True
            )
        )
        accelerator.save_state()
        assert len(commit._FILES) == 1
        del accelerator
        assert not commit._FILES


def test_a_lock_that_was_lost_stops_the_commit(tmp_path, process):
    """Taken by another run on a file system without locks: what that run saves is not replaced."""
    save(process, tmp_path / "c", step=1)

    def lose(models, weights, folder):
        foreign(lock_path(tmp_path / "c"))

    with pytest.raises(CheckpointError, match="host node7"):
        save_run(RunState(progress={"step": 2}, save_hooks=[lose]), tmp_path / "c", process=process)
    assert verify(tmp_path / "c").progress == {"step": 1}
    assert names(tmp_path) == [".c.lock", "c"]


def link(path, notes):
    path.symlink_to(notes)


def hard_link(path, notes):
    path.hardlink_to(notes)


def pipe(path, notes):
    os.mkfifo(path)


def folder(path, notes):
    path.mkdir()


@pytest.mark.parametrize("make", [link, hard_link, pipe, folder])
def test_what_is_no_lock_file_is_left_alone(tmp_path, process, make):
    notes = tmp_path / "notes.txt"
    notes.write_text("a month of work")
    lock = lock_path(tmp_path / "c")
    make(lock, notes)
    with pytest.raises(CheckpointError, match=r"link|pipe|lock|directory|folder"):
        save(process, tmp_path / "c")
    assert notes.read_text() == "a month of work"
    assert names(tmp_path) == [".c.lock", "notes.txt"]
    (shutil.rmtree if lock.is_dir() and not lock.is_symlink() else os.unlink)(lock)
    save(process, tmp_path / "c")
    assert names(tmp_path) == ["c", "notes.txt"]


CONTEND = """
import sys, time
from pathlib import Path
from accelerate.checkpointing.commit import FolderInUse, RunLocks
print("ready", flush=True)
time.sleep(float(sys.stdin.readline()) - time.time())
try:
    locks = RunLocks()
    locks.acquire(Path(sys.argv[1]))
    print("taken", flush=True)
except FolderInUse:
    print("in use", flush=True)
sys.stdin.readline()
"""


@pytest.mark.timeout(120)
def test_of_several_at_once_one_takes_a_stale_lock(tmp_path, tmp_path_factory):
    foreign(lock_path(tmp_path / "c"))  # its process has ended
    script = tmp_path_factory.mktemp("script") / "contend.py"
    script.write_text(CONTEND)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    runs = [Script(script, tmp_path / "c", **pipes) for _ in range(4)]
    assert [run.stdout.readline() for run in runs] == ["ready\n"] * 4
    start = time.time() + 0.5
    for run in runs:
        run.stdin.write(f"{start}\n")
        run.stdin.flush()
    told = sorted(run.stdout.readline().strip() for run in runs)
    for run in runs:
        run.stdin.write("end\n")
        run.stdin.flush()
        assert run.wait(60) == 0
        run.end()
    assert told == ["in use"] * 3 + ["taken"] and names(tmp_path) == []


def test_a_read_only_folder_is_loaded_from(tmp_path, process, small_run, monkeypatch):
    run = small_run()
    run.step()
    save_run(run.bundle(), tmp_path / "root" / "checkpoints" / "checkpoint_0", process=process)

    def refuse(*_, **__):
        raise OSError(30, "Read-only file system")

    for name in ("rename", "link", "unlink", "mkdir"):
        monkeypatch.setattr(os, name, refuse)
    write = os.open
    monkeypatch.setattr(
        os, "open", lambda path, flags, *_: refuse() if flags & os.O_CREAT else write(path, flags)
    )
    accelerator = Accelerator(project_dir=tmp_path / "root")
    fresh = small_run(seed=5)
    accelerator.prepare(fresh.model, fresh.optimizer, fresh.scheduler)
    accelerator.register_for_checkpointing(fresh.registered)
    assert accelerator.resume(signals=()).folder.name == "checkpoint_0"


class Killed(BaseException):
    """In place of a kill."""


@contextlib.contextmanager
def killed_at(step):
    """Files and folders are renamed and removed `step` times, and then no more."""
    calls = itertools.count()

    def counted(function):
        def call(*args, **options):
            if next(calls) >= step:
                raise Killed
            return function(*args, **options)

        return call

    with contextlib.ExitStack() as stack:
        for name in ("rename", "replace", "unlink", "rmdir"):
            stack.enter_context(mock.patch.object(os, name, counted(getattr(os, name))))
        yield


@pytest.mark.parametrize("reason", ["overlay", "a folder of the user"])
def test_a_checkpoint_whose_folder_is_not_renamed(tmp_path, process, monkeypatch, reason):
    """It is replaced by its files. Killed at any step, a load finds one of both entirely, and the user's files."""
    folder, rename = tmp_path / "c", os.rename
    save(process, folder, step=0)
    if reason == "overlay":
        monkeypatch.setattr(commit, "_exchange", lambda one, other: False)
        inode = folder.stat().st_ino

        def refused(source, target, **_):
            if os.stat(source).st_ino == inode:
                raise OSError(errno.EXDEV, "Invalid cross-device link", str(source))
            rename(source, target)

        monkeypatch.setattr(os, "rename", refused)
    else:
        (folder / "runs").mkdir()
        (folder / "runs" / "events").write_text("of the user")
        inode = (folder / "runs").stat().st_ino
    steps = []
    for kill in itertools.count():
        with contextlib.suppress(Killed), killed_at(kill):
            save(process, folder, step=kill + 1)
            steps.append("saved")
        report = load_run(RunState(), folder, process=process)
        steps.append(report.progress["step"])
        verify(folder)
        if reason != "overlay":
            assert (folder / "runs").stat().st_ino == inode
            assert (folder / "runs" / "events").read_text() == "of the user"
        if "saved" in steps:
            break
    assert len(set(steps)) > 2 and steps[-1] == kill + 1, steps
    save(process, folder, step=-1)
    assert names(tmp_path) == ["c"] and verify(folder).progress == {"step": -1}


def test_a_checkpoint_is_read_while_its_files_are_replaced(tmp_path, process, monkeypatch):
    folder = tmp_path / "c"
    save(process, folder, step=0)
    (folder / "notes").touch()
    replace, readers = os.replace, []

    def slow(source, target):
        if not readers:
            readers.append(threading.Thread(target=lambda: readers.append(verify(folder))))
            readers[0].start()
            time.sleep(0.2)
        replace(source, target)

    monkeypatch.setattr(os, "replace", slow)
    save(process, folder, step=1)
    readers[0].join()
    assert readers[1].progress == {"step": 1}


def test_rotation_of_what_cannot_be_renamed(tmp_path, process, monkeypatch):
    for number in range(3):
        save(process, tmp_path / f"checkpoint_{number}", step=number)

    def refused(*_):
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "rename", refused)
    rotate(tmp_path, 1)
    assert names(tmp_path) == ["checkpoint_2"]
