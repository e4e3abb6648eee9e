# SPDX-License-Identifier: Apache-2.0
"""Killed at random moments - a rank, all ranks, the launcher - a run ends at the parameters it would have had.

KILLS sets how many (default 2); `make test-faults` takes 100.
"""

import os
import random
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch
from kills import LIMIT, Launches, gone, rank_pids, strike
from ranks import run_script

from accelerate.checkpointing import list_checkpoints, verify
from accelerate.checkpointing.layout import unfit

WORKER = Path(__file__).parent / "worker.py"
KILLS = int(os.environ.get("KILLS", "2"))
STEPS_A_KILL = 25
ON_CPU = {"ACCELERATE_USE_CPU": "true"}


LAUNCHES = Launches(WORKER)


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
        LAUNCHES.stop()


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
        launcher = LAUNCHES.start(cut, total)
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
    # On a busy machine a run comes further before this process kills it.
    assert struck >= max(1, KILLS // 2), f"the run was over after {struck} kills"


@pytest.mark.thorough  # tests/distributed/test_damaged_restart.py restarts a smaller run
@pytest.mark.timeout(600)
def test_with_restarts_of_the_launcher_a_killed_run_goes_on_alone(folder, ranks):
    whole, cut = folder / "whole", folder / "cut"
    whole.mkdir(), cut.mkdir()
    ranks(2).run(run_script, WORKER, whole, 120, env=ON_CPU)
    launcher = LAUNCHES.start(cut, 120, options=("--max_restarts", "2"))
    strike("rank", rank_pids(cut, launcher), launcher)
    _, told = launcher.communicate(timeout=LIMIT)
    assert launcher.returncode == 0, told
    assert "restart 1 of 2" in told
    assert same_end(whole, cut)
