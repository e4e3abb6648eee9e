# SPDX-License-Identifier: Apache-2.0
"""A launch with restarts gets past damaged checkpoints, and past the lock of the processes that were killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from accelerate.checkpointing import verify

WORKER = Path(__file__).parent / "workers" / "damaged_restart.py"


@pytest.mark.timeout(240)
def test_a_restart_goes_on_after_damaged_checkpoints(tmp_path):
    launch = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--cpu",
        "--num_processes",
        "2",
        "--max_restarts",
        "1",
    ]
    done = subprocess.run(
        [*launch, str(WORKER), str(tmp_path)], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    found = sorted(entry.name for entry in (tmp_path / "checkpoints").iterdir())
    assert found == [
        "checkpoint_1.damaged",
        "checkpoint_2",
        "checkpoint_2.damaged",
        "checkpoint_3",
        "checkpoint_4",
    ]
    for number in (2, 3, 4):
        assert verify(tmp_path / "checkpoints" / f"checkpoint_{number}").world_size == 2
    for number in (1, 2):
        assert done.stderr.count(f"which is now checkpoint_{number}.damaged") == 1, done.stderr
