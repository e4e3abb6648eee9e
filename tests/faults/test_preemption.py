# SPDX-License-Identifier: Apache-2.0
"""Asked to stop at random moments, a run ends in time and continues to the parameters that it would have had.

SIGNALS sets how many signals there are on each number of ranks (default 30), SEED the moments at which they come.
"""

import collections
import os
import random
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import pytest
import torch
from kills import Launches, gone, rank_pids
from ranks import run_script

from accelerate.checkpointing.layout import read_manifest

WORKER = Path(__file__).parent / "stopped_worker.py"
SIGNALS = int(os.environ.get("SIGNALS", "30"))
SEED = int(os.environ.get("SEED", "0"))
# Seconds of one act of the run, and optimizer steps after the last signal.
PACE, LAST_STEPS = 0.02, 20
WITHIN = 12
LAUNCHES = Launches(WORKER)


@pytest.fixture
def folder(tmp_path):
    memory = Path("/dev/shm")
    parent = memory if os.access(memory, os.W_OK) else tmp_path
    with tempfile.TemporaryDirectory(dir=parent, prefix="accelerate-signals-") as name:
        yield Path(name)
        LAUNCHES.stop()


@pytest.mark.thorough  # tests/runtime/test_step_exchange.py has signals at chosen moments
@pytest.mark.timeout(600 + 30 * SIGNALS)
@pytest.mark.parametrize("world", [2, 4])
def test_stopped_at_random_moments(world, folder, ranks):
    whole, cut = folder / "whole", folder / "cut"
    whole.mkdir(), cut.mkdir()
    dice = random.Random(f"{world} {SEED}")
    counts = collections.Counter()
    ends = []
    for _ in range(SIGNALS):
        launcher = LAUNCHES.start(
            cut, 10**9, PACE, ranks=world, options=("--stop_within", str(WITHIN))
        )
        pids = rank_pids(cut, launcher, world)
        number = dice.choice([signal.SIGTERM, signal.SIGUSR1])
        target = dice.choice([launcher.pid, *pids])
        with pytest.raises(subprocess.TimeoutExpired):
            launcher.wait(timeout=dice.uniform(0.0, 3.0))
        place = (cut / "phase").read_text()
        begin = time.monotonic()
        os.kill(target, number)
        _, told = launcher.communicate(timeout=300)
        seconds = time.monotonic() - begin
        ends.append((round(seconds, 1), place))
        assert seconds < WITHIN + 3, (place, told)
        assert launcher.returncode == 128 + number, (place, told)
        assert gone(pids)
        result = "ended with nothing to save"
        if "): saved " in told:
            result = "saved"
        elif "stop requested" in told and "before the first step" not in told:
            result = "not saved"
        elif "stop requested" not in told:
            # Rank 0 may be in a collective when another rank ends before the first step.
            assert place in ("warm-up", "compile"), (place, told)
        counts[f"{place}: {result}"] += 1
    print(f"\n{world} ranks, seconds to the end {sorted(ends)}: {dict(counts)}")
    steps = [read_manifest(path).progress["step"] for path in (cut / "checkpoints").iterdir()]
    total = max(steps) + LAST_STEPS
    launcher = LAUNCHES.start(cut, total, 0.0, ranks=world)
    _, told = launcher.communicate(timeout=300)
    assert launcher.returncode == 0, told
    cpu = {"ACCELERATE_USE_CPU": "true"}
    ranks(world).run(run_script, WORKER, whole, total, 0.0, env=cpu, timeout=300)
    expected, found = (torch.load(run / "end.pt") for run in (whole, cut))
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
    for rank in range(world):
        expected, found = (torch.load(run / f"read{rank}.pt") for run in (whole, cut))
        assert found == expected
