# SPDX-License-Identifier: Apache-2.0
"""The GPT example killed as by hand: a rank, then the launcher, then one alone; told to stop; it ends on three."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file

from accelerate.checkpointing import list_checkpoints, newest_valid, verify

SCRIPT = Path(__file__).parents[2] / "examples" / "train_gpt.py"
TINY = "--width 32 --layers 1 --heads 2 --eval_samples 6 --cpu --batch_size 2"
EVERY = "--save_every 2 --eval_every 1000000 --log_every 1000000"
LIMIT = 120.0


def start(folder, processes, steps):
    command = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--cpu",
        "--num_processes",
        str(processes),
    ]
    options = [
        *TINY.split(),
        *EVERY.split(),
        "--max_steps",
        str(steps),
        "--output_dir",
        str(folder),
        "--resume",
    ]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen([*command, str(SCRIPT), *options], text=True, **pipes)


def newest(folder):
    return max((number for number, _ in list_checkpoints(folder / "checkpoints")), default=-1)


def told(run):
    """What it printed, and the step that it went on from."""
    output = run.communicate(timeout=LIMIT)[0]
    found = re.search(r"resumed .*step (\d+)", output)
    return output, int(found[1]) if found else 0


def kill_amid(folder, run, victims, number=signal.SIGKILL):
    """Kill these processes once the run has saved anew; the step of the newest checkpoint that is left."""
    before, deadline = newest(folder), time.monotonic() + LIMIT
    while newest(folder) < before + 2:
        assert run.poll() is None and time.monotonic() < deadline, run.communicate(timeout=10)[0]
        time.sleep(0.01)
    ranks = psutil.Process(run.pid).children(recursive=True)
    for process in victims(run, ranks):
        os.kill(process.pid, number)
    output, began = told(run)
    psutil.wait_procs(ranks, timeout=30)
    left = newest_valid(folder / "checkpoints")
    return output, began, verify(left).progress["step"]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.thorough  # test_kills.py kills a smaller script
def test_the_example_survives_kills_and_goes_on_with_other_numbers_of_processes(tmp_path):
    folder, last = tmp_path / "gpt", 0
    for processes, victims in (
        (2, lambda run, ranks: ranks[-1:]),
        (2, lambda run, ranks: [run]),
        (1, lambda run, ranks: [run, *ranks]),
    ):
        output, began, step = kill_amid(folder, start(folder, processes, 100_000), victims)
        assert began == last, output
        assert step >= began + 2
        last = step
    stopped = start(folder, 2, 100_000)
    output, began, step = kill_amid(folder, stopped, lambda run, ranks: [run], signal.SIGTERM)
    assert (stopped.returncode, began) == (143, last), output
    assert "stop requested" in output
    last = step
    run = start(folder, 3, last + 4)
    output, began = told(run)
    assert run.returncode == 0, output
    assert began == last
    assert verify(newest_valid(folder / "checkpoints")).progress["step"] == last + 4
    assert load_file(folder / "model" / "model.safetensors")["embed.weight"].shape == (128, 32)
