# SPDX-License-Identifier: Apache-2.0
"""Killed at random moments - a rank, all ranks, the launcher - a run ends at the parameters it would have had.

KILLS sets how many (default 2); `make test-faults` takes 100.
"""

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
from ranks import run_script

from accelerate.checkpointing import list_checkpoints, verify
from accelerate.checkpointing.layout import unfit

WORKER = Path(__file__).parent / "worker.py"
KILLS = int(os.environ.get("KILLS", "2"))
STEPS_A_KILL = 25
LIMIT = 180.0
ON_CPU = {"ACCELERATE_USE_CPU": "true"}


STARTED: list[subprocess.Popen] = []


def launch(folder: Path, total: int, *options: str) -> subprocess.Popen:
    for note in folder.glob("rank*.pid"):
        note.unlink()
    command = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2", *options]
    STARTED[:] = [
        subprocess.Popen(
            [*command, str(WORKER), str(folder), str(total)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
    ]
    return STARTED[0]


def rank_pids(folder: Path, launcher: subprocess.Popen) -> list[int]:
    """The ranks' process ids, once both train."""
    deadline = time.monotonic() + LIMIT
    while time.monotonic() < deadline and launcher.poll() is None:
        notes = [folder / f"rank{rank}.pid" for rank in range(2)]
        if all(note.exists() and note.read_text() for note in notes):
            return [int(note.read_text()) for note in notes]
        time.sleep(0.01)
    raise AssertionError(f"the ranks did not start: {launcher.communicate(timeout=LIMIT)[1]}")


def strike(target: str, pids: list[int], launcher: subprocess.Popen) -> None:
    victims = {"rank": pids[-1:], "ranks": pids, "launcher": [launcher.pid]}[target]
    for pid in victims:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            # It had come to its end by itself.
            pass


def gone(pids: list[int]) -> bool:
    """Whether none of the processes is left, within seconds."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if not any(Path(f"/proc/{pid}").exists() for pid in pids):
            return True
        time.sleep(0.01)
    return False


def check_all(folder: Path) -> None:
    """What is listed as a valid checkpoint holds what its checksums say."""
    for _, checkpoint in list_checkpoints(folder / "checkpoints"):
        if unfit(checkpoint) is None:
            verify(checkpoint)


def same_end(whole: Path, cut: Path) -> bool:
    """Whether two runs have ended at the same parameters, bit for bit."""
    expected, found = (torch.load(run / "end.pt", weights_only=True) for run in (whole, cut))
    return all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.fixture
def folder(tmp_path):
    """In memory where that is possible: hundreds of saves, and a killed process (unlike a power cut) loses no page."""
    memory = Path("/dev/shm")
    place = memory if os.access(memory, os.W_OK) else tmp_path
    with tempfile.TemporaryDirectory(dir=place, prefix="accelerate-kills-") as name:
        yield Path(name)
        for launcher in STARTED:
            launcher.kill()  # where the test has failed; its ranks go with it
            launcher.wait()


@pytest.mark.slow
@pytest.mark.timeout(300 + 60 * KILLS)
def test_killed_at_random_moments(folder, ranks):
    total = STEPS_A_KILL * KILLS + 40
    whole, cut = folder / "whole", folder / "cut"
    whole.mkdir(), cut.mkdir()
    ranks(2).run(run_script, WORKER, whole, total, env=ON_CPU, timeout=120 + KILLS * 10)
    dice = random.Random(KILLS)
    struck = 0
    while not (cut / "end.pt").exists():
        launcher = launch(cut, total)
        pids = rank_pids(cut, launcher)
        if struck < KILLS:
            try:
                launcher.wait(timeout=dice.uniform(0.0, 0.4))
            except subprocess.TimeoutExpired:
                strike(dice.choice(["rank", "ranks", "launcher"]), pids, launcher)
                struck += 1
        _, told = launcher.communicate(timeout=120 + KILLS * 10)
        assert gone(pids), "a rank outlives its launcher"
        check_all(cut)
        assert launcher.returncode == 0 or struck, told
    assert same_end(whole, cut)
    assert struck == KILLS, f"the run was over after {struck} kills"


@pytest.mark.thorough  # tests/distributed/test_damaged_restart.py restarts a smaller run
@pytest.mark.timeout(600)
def test_with_restarts_of_the_launcher_a_killed_run_goes_on_alone(folder, ranks):
    whole, cut = folder / "whole", folder / "cut"
    whole.mkdir(), cut.mkdir()
    ranks(2).run(run_script, WORKER, whole, 120, env=ON_CPU)
    launcher = launch(cut, 120, "--max_restarts", "2")
    strike("rank", rank_pids(cut, launcher), launcher)
    _, told = launcher.communicate(timeout=LIMIT)
    assert launcher.returncode == 0, told
    assert "restart 1 of 2" in told
    assert same_end(whole, cut)
