# SPDX-License-Identifier: Apache-2.0
"""What is on the console of a launch whose ranks fail, and take long to end."""

import sys

import pytest

from accelerate.launchers import streams, supervisor
from accelerate.launchers.spec import LaunchSpec, ProcessSpec, Program
from accelerate.launchers.supervisor import supervise

# The first rank to end has the others stopped, so they wait until all have written.
SAME = """
import os, sys, time
sys.stderr.write("Traceback (most recent call last):\\n  File x\\nRuntimeError: GPU {rank} is full\\n")
sys.stderr.flush()
open(os.path.join("{folder}", "{rank}"), "w").close()
while len(os.listdir("{folder}")) < {ranks}:
    time.sleep(0.01)
time.sleep(1.0)
sys.exit(1)
"""
LOST = SAME.replace("GPU {rank} is full", "Connection closed by peer")


@pytest.fixture
def launched(capfd, monkeypatch, tmp_path):
    monkeypatch.setattr(streams, "DELAY", 0.2)

    def run(*scripts):
        spec = LaunchSpec(Program("x"), num_processes=len(scripts), progress_interval=0)
        processes = []
        for rank, script in enumerate(scripts):
            text = script.replace("{rank}", str(rank)).replace("{folder}", str(tmp_path))
            text = text.replace("{ranks}", str(len(scripts)))
            processes.append(ProcessSpec(rank, rank, (sys.executable, "-S", "-c", text), {}))
        code = supervise(spec, processes).code
        return code, capfd.readouterr().err

    return run


def test_the_same_error_of_ranks_that_end_slowly_is_shown_once(launched):
    code, text = launched(SAME, SAME, SAME)
    assert code == 1 and text.count("Traceback") == 1
    (line,) = [line for line in text.splitlines() if "the same error as rank" in line]
    assert "ranks" in line


def test_a_lost_connection_waits_for_the_rank_that_failed(launched):
    """Its traceback comes first, and lasts longer."""
    code, text = launched(LOST, "import time; time.sleep(0.5)\n" + SAME)
    assert code == 1 and text.count("Traceback") == 1 and "GPU 1 is full" in text
    assert "rank 0: lost the connection" in text


def test_a_rank_that_a_signal_has_stopped_is_named(launched, monkeypatch):
    monkeypatch.setattr(supervisor, "PAUSE", 0.2)
    stops = "import os, signal, subprocess\n" + (
        "subprocess.Popen(['sh', '-c', f'sleep 1.5; kill -CONT {os.getpid()}'])\n"
        "os.kill(os.getpid(), signal.SIGSTOP)\n"
    )
    code, text = launched(stops, "import time; time.sleep(1.5)")
    assert code == 0 and text.count("kill -CONT") == 1 and "rank 0 (pid" in text
