# SPDX-License-Identifier: Apache-2.0
"""Two runs and one folder: the second is refused by name, nothing of either is lost, and no dead run is in the way."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from ranks import Script

from accelerate import Accelerator
from accelerate.checkpointing import RunState, list_checkpoints, run_lock, save_run, verify
from accelerate.checkpointing.run_lock import FolderInUse, RunLocks, lock_path
from accelerate.core.errors import CheckpointError
from accelerate.utils import ProjectConfiguration

SCRIPT = """
import sys, torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
folder, mode = sys.argv[1:3]
naming = {"automatic_checkpoint_naming": True, "total_limit": 2} if mode == "numbered" else {}
accelerator = Accelerator(cpu=True, project_config=ProjectConfiguration(folder, **naming))
model = accelerator.prepare(torch.nn.Linear(64, 64))
resumed = False
for number, line in enumerate(sys.stdin):
    if line.strip() == "end":
        break
    try:
        if naming and not resumed:
            accelerator.resume(signals=())
            resumed = True
        place = None if naming else folder + "/same"
        print("saved", accelerator.save_state(place, blocking=number % 2 == 0), flush=True)
    except Exception as error:
        print(type(error).__name__, error, flush=True)
"""


class Other:
    """A run in another process, which saves when it is told to."""

    def __init__(self, tmp_path, folder, mode="named"):
        script = tmp_path / "other.py"
        if not script.exists():  # another one may be reading it
            script.write_text(SCRIPT)
        self.process = Script(script, folder, mode, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

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

    def start(folder, mode="named"):
        started.append(Other(tmp_path, folder, mode))
        return started[-1]

    yield start
    for run in started:
        run.process.end()


def names(folder):
    return sorted(entry.name for entry in folder.iterdir())


def save(process, folder, step=0):
    return save_run(RunState(progress={"step": step}), folder, process=process)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("mode", [pytest.param("named", marks=pytest.mark.thorough), "numbered"])
def test_the_second_of_two_live_runs_is_refused(tmp_path, other, mode):
    root = tmp_path / "root"
    first, second, third = (other(root, mode) for _ in range(3))
    assert first.save().startswith("saved")
    for _ in range(2):
        told = second.save()
        assert "is in use: another run" in told and f"pid {first.process.pid}" in told and "other.py" in told
        assert first.save().startswith("saved")
    first.kill()
    place = root if mode == "named" else root / "checkpoints"
    assert any(name.endswith(".lock") for name in names(place))
    assert third.save().startswith("saved")  # at once, although the dead run has left its lock
    third.end()
    kept = ["same"] if mode == "named" else [folder.name for _, folder in list_checkpoints(place)]
    assert names(place) == kept
    for name in kept:
        verify(place / name)


@pytest.mark.timeout(120)
def test_runs_that_save_under_other_names_do_not_meet(tmp_path, other, process):
    run = other(tmp_path / "root")
    assert run.save().startswith("saved")
    save(process, tmp_path / "root" / "mine")
    with pytest.raises(CheckpointError, match=f"same is in use.*pid {run.process.pid}"):
        save(process, tmp_path / "root" / "same")
    run.end()
    save(process, tmp_path / "root" / "same")
    assert names(tmp_path / "root") == ["mine", "same"]


def test_a_resume_is_refused_before_anything_is_loaded(tmp_path, other):
    config = ProjectConfiguration(tmp_path / "root", automatic_checkpoint_naming=True)
    run = other(tmp_path / "root", "numbered")
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
    assert names(tmp_path) == [".two.lock", "one", "two"]
    again = Accelerator()  # another run of this process shares the lock
    again.save_state(tmp_path / "two", blocking=False)
    again._checkpoints._writer.wait()
    accelerator.end_training()
    assert names(tmp_path) == [".two.lock", "one", "two"]
    again.end_training()
    assert names(tmp_path) == ["one", "two"]


def test_a_run_under_ever_new_names_keeps_few_locks(tmp_path):
    locks = RunLocks()
    for number in range(30):
        locks.acquire(tmp_path / f"step{number}")
    assert len(names(tmp_path)) == 8
    locks.release()
    assert names(tmp_path) == []


def test_a_process_takes_the_place_of_the_one_that_started_it(tmp_path, process):
    """A notebook that saves and then waits for a script; and back again."""
    locks = RunLocks()
    locks.acquire(tmp_path / "c")
    code = (
        "import sys; from pathlib import Path; from accelerate.checkpointing.run_lock import RunLocks; "
        "RunLocks().acquire(Path(sys.argv[1])); print('taken')"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "c")]
    assert subprocess.run(command, capture_output=True, text=True, timeout=120).stdout.strip() == "taken"
    save(process, tmp_path / "c")
    locks.release()
    assert names(tmp_path) == ["c"]


def test_a_forked_child_holds_nothing_of_its_parent(tmp_path):
    locks = RunLocks()
    lock = locks.acquire(tmp_path / "c")
    child = os.fork()
    if child == 0:
        locks.release()
        run_lock._release_all()
        os._exit(int(lock.is_ours() or bool(run_lock._LOCKS)))
    assert os.waitpid(child, 0)[1] == 0 and lock.is_ours()
    locks.release()


def foreign(path, **changes):
    """A lock of a run on another machine."""
    holder = dataclasses.replace(run_lock._this_process(), host="node7", machine="node7 boot", **changes)
    path.write_text(json.dumps(dataclasses.asdict(holder)))


@pytest.mark.parametrize("content", ["foreign", "not understood"])
def test_a_run_on_another_machine_is_watched(tmp_path, process, monkeypatch, content):
    monkeypatch.setattr(run_lock, "SILENCE", 1.0)
    path = lock_path(tmp_path / "c")
    foreign(path) if content == "foreign" else path.write_text("{")
    stop = threading.Event()

    def beat():
        while not stop.wait(0.1):
            os.utime(path)

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with pytest.raises(CheckpointError, match=r"(host node7|does not name).*saves into it.*delete .*\.c\.lock"):
            save(process, tmp_path / "c")
    finally:
        stop.set()
        thread.join()
    save(process, tmp_path / "c")  # silent now
    foreign(path) if content == "foreign" else path.write_text("{")
    os.utime(path, (time.time() - 1000,) * 2)
    monkeypatch.setattr(run_lock, "SILENCE", 1e9)
    save(process, tmp_path / "c")  # silent for so long that nothing is waited for
    assert names(tmp_path) == ["c"]


def test_the_heartbeat_updates_the_lock(tmp_path, monkeypatch):
    locks = RunLocks()
    lock = locks.acquire(tmp_path / "c")
    os.utime(lock.path, (0, 0))
    lock.touch()
    assert lock.path.stat().st_mtime > 0
    foreign(lock.path)
    os.utime(lock.path, (0, 0))
    lock.touch()
    assert lock.path.stat().st_mtime == 0  # another's
    locks.release()
    assert lock.path.exists()
    assert any(thread.name == "checkpoint-lock" for thread in threading.enumerate())


def test_a_lock_that_was_lost_stops_the_commit(tmp_path, process, monkeypatch):
    """Taken over by a run that held this one for dead: what that run saves is not replaced."""
    save(process, tmp_path / "c", step=1)

    def lose(models, weights, folder):
        foreign(lock_path(tmp_path / "c"))
        monkeypatch.setattr(run_lock, "_shows_life", lambda *_: True)

    with pytest.raises(CheckpointError, match="host node7"):
        save_run(RunState(progress={"step": 2}, save_hooks=[lose]), tmp_path / "c", process=process)
    assert verify(tmp_path / "c").progress == {"step": 1}
    assert names(tmp_path) == [".c.lock", "c"]


def test_a_lock_file_that_was_deleted_is_made_again(tmp_path):
    accelerator = Accelerator()
    for _ in range(2):
        accelerator.save_state(tmp_path / "c")
        lock_path(tmp_path / "c").unlink()
    accelerator.end_training()
    assert names(tmp_path) == ["c"]


@pytest.mark.parametrize("links", [True, False])
def test_of_many_at_once_one_takes_a_stale_lock(tmp_path, monkeypatch, links):
    """Contenders in one process, each with a lock of its own; `is_ours` says who has it in the end."""
    if not links:

        def refuse(*_):
            raise OSError(95, "no hard links here")

        monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(run_lock, "_is_alive", lambda holder: holder.started != 0)
    for _ in range(5):
        path = tmp_path / ".c.lock"
        dead = dataclasses.replace(run_lock._this_process(), started=0)
        path.write_text(json.dumps(dataclasses.asdict(dead)))
        contenders = [run_lock.FolderLock(path) for _ in range(8)]
        start = threading.Barrier(8)
        taken = []

        def contend(lock, start=start, taken=taken):
            start.wait()
            try:
                lock.take()
                taken.append(lock)
            except FolderInUse:
                pass

        threads = [threading.Thread(target=contend, args=(lock,)) for lock in contenders]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sum(lock.is_ours() for lock in taken) == 1
        path.unlink()


def test_a_read_only_folder_is_loaded_from(tmp_path, process, small_run, monkeypatch):
    run = small_run()
    run.step()
    save_run(run.bundle(), tmp_path / "root" / "checkpoints" / "checkpoint_0", process=process)

    def refuse(*_, **__):
        raise OSError(30, "Read-only file system")

    for name in ("rename", "link", "unlink", "mkdir"):
        monkeypatch.setattr(os, name, refuse)
    monkeypatch.setattr(run_lock, "_write", refuse)
    accelerator = Accelerator(project_dir=tmp_path / "root")
    fresh = small_run(seed=5)
    accelerator.prepare(fresh.model, fresh.optimizer, fresh.scheduler)
    accelerator.register_for_checkpointing(fresh.registered)
    assert accelerator.resume(signals=()).folder.name == "checkpoint_0"
