# SPDX-License-Identifier: Apache-2.0
"""The MPI engine under Open MPI and MPICH: whose failure it was, restarts, and nobody left behind."""

import re
import signal
import subprocess
import textwrap

import pytest
from engines import LAUNCH, environment, mpi_programs, wait_until_gone

from accelerate.launchers.mpi import implementation as implementation_of

RANK = "rank = int(os.environ.get('OMPI_COMM_WORLD_RANK') or os.environ['PMI_RANK'])"


@pytest.fixture(params=["openmpi", "mpich"])
def start(request, tmp_path):
    """Start a launch of a script given as text on two ranks; `start.name` is the implementation."""
    path = mpi_programs(tmp_path / "bin", request.param)
    assert implementation_of(str(tmp_path / "bin" / "mpirun")) == request.param
    script = tmp_path / "script.py"

    def run(source, *options):
        script.write_text(textwrap.dedent(source))
        command = [
            *LAUNCH,
            "-q",
            "--cpu",
            "--engine",
            "mpi",
            "--num_processes",
            "2",
            *options,
            str(script),
        ]
        env = environment(tmp_path / "home", PATH=path)
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(command, cwd=tmp_path, env=env, text=True, **pipes)

    return run


def test_the_failing_rank_is_named_and_a_restart_goes_on(start):
    source = f"""
    import os, time
    {RANK}
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    os.write(1, f"attempt {{attempt}}\\n".encode())
    if rank == 1 and attempt == "0":
        raise KeyError("the cause")
    if rank == 0 and attempt == "1":
        os._exit(7)
    time.sleep(100)
    """
    launch = start(source, "--max_restarts", "1")
    output, errors = launch.communicate(timeout=60)
    assert launch.returncode == 7, errors
    assert "attempt 0" in output and "attempt 1" in output
    assert errors.count("Traceback") == 1 and "rank 1 failed: KeyError: 'the cause'" in errors
    assert re.search(r"rank 0 failed: .*exit code 7", errors) and "mpirun (pid" in errors


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_nobody_is_left_behind(start, number):
    launch = start("import os, time\nos.write(1, b'pid %d\\n' % os.getpid())\ntime.sleep(100)\n")
    pids = [int(launch.stdout.readline().split()[1]) for _ in range(2)]
    launch.send_signal(number)
    launch.communicate(timeout=30)
    assert launch.returncode == (-9 if number == signal.SIGKILL else 128 + number)
    for pid in pids:
        wait_until_gone(pid)


def test_hosts_and_variables_reach_mpirun(monkeypatch):
    """The command of each implementation, without starting it."""
    from accelerate.launchers import mpi

    monkeypatch.setattr(mpi, "find_mpirun", lambda: "mpirun")
    given = {"A": "1", "no-name": "2", "absent": None}
    for name, words in {
        "openmpi": ["--hostfile", "hosts", "-x", "A=1"],
        "mpich": ["-f", "hosts", "-ppn", "2", "-genv", "A", "1"],
        "intel": ["-f", "hosts", "-ppn", "2", "-genv", "A", "1"],
    }.items():
        monkeypatch.setattr(mpi, "implementation", lambda path, name=name: name)
        command = mpi.mpirun_command(4, "hosts", given, per_host=2)
        assert command[:3] == ["mpirun", "-n", "4"] and command[-len(words) :] == words
