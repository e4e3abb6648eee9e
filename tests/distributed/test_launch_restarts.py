# SPDX-License-Identifier: Apache-2.0
"""Restarts: a killed rank brings the whole group back, on one machine and on several. mpirun beside it."""

import shutil
import subprocess
import textwrap

import pytest
from machines import LAUNCH, Launch, clean_environment, free_port

COMMAND = [*LAUNCH, "--num_processes", "2"]
# The ranks meet through a socket at the main port, so that an attempt that reaches a dead one's peers would show.
SCRIPT = """
import os, signal, socket, time
attempt, rank, port = (int(os.environ[name]) for name in ("TORCHELASTIC_RESTART_COUNT", "RANK", "MASTER_PORT"))
token = str(attempt).encode()
if rank == 0:
    server = socket.socket()
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    server.bind(("0.0.0.0", port))
    server.listen()
    friend, _ = server.accept()
else:
    while True:
        try:
            friend = socket.create_connection((os.environ["MASTER_ADDR"], port))
            break
        except ConnectionRefusedError:
            time.sleep(0.02)
friend.sendall(token)
assert friend.recv(9) == token
if attempt < 2 and rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
if attempt < 2:
    time.sleep(60)
print("rank", rank, "attempt", attempt)
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def start(tmp_path, *arguments):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(
        [*COMMAND, *map(str, arguments)], env=clean_environment(tmp_path), text=True, **pipes
    )


def test_a_killed_rank_restarts_the_group(tmp_path, script):
    launch = start(tmp_path, "--max_restarts", 3, script)
    output, errors = launch.communicate(timeout=60)
    assert launch.returncode == 0, errors
    assert sorted(output.splitlines()) == ["rank 0 attempt 2", "rank 1 attempt 2"]
    assert "restart 1 of 3" in errors and "restart 2 of 3" in errors and "restart 3" not in errors


def test_restarts_are_used_up(tmp_path, script):
    launch = start(tmp_path, "--max_restarts", 1, script)
    _, errors = launch.communicate(timeout=60)
    assert (
        launch.returncode == 137
        and errors.count("SIGKILL") == 2
        and errors.count("restart 1 of 1") == 1
    )


def test_two_machines_restart_together(tmp_path, script):
    port = free_port()
    options = [
        "--num_machines",
        2,
        "--main_process_ip",
        "127.0.0.1",
        "--main_process_port",
        port,
        "--max_restarts",
        2,
    ]
    options += ["--num_processes", 2]
    launches = [Launch(tmp_path, *options, "--machine_rank", rank, script) for rank in (0, 1)]
    codes = [launch.end(60) for launch in launches]
    texts = [launch.text for launch in launches]
    assert codes == [0, 0], texts
    for rank, text in enumerate(texts):
        told = [line for line in text.splitlines() if line.startswith("rank ")]
        assert told == [f"rank {rank} attempt 2"], text


@pytest.mark.thorough  # tests/engines/test_mpi.py runs in CI, perhaps at the same time
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="mpirun is not installed")
def test_mpirun_starts_ranks_that_cooperate(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(
        textwrap.dedent(
            """
            import os, sys, torch
            from accelerate.state import PartialState
            state = PartialState()
            total = torch.tensor(float(state.process_index + 1))
            torch.distributed.all_reduce(total)
            told = (state.process_index, state.num_processes, total.item(), os.environ["ACCELERATE_MIXED_PRECISION"])
            # One write: mpirun mixes the ranks' writes, not their lines.
            sys.stdout.write(" ".join(map(str, told)) + "\\n")
            """
        )
    )
    launch = start(
        tmp_path,
        "--engine",
        "mpi",
        "--main_process_port",
        free_port(),
        "--mixed_precision",
        "bf16",
        path,
    )
    output, errors = launch.communicate(timeout=120)
    assert launch.returncode == 0, errors
    assert sorted(output.splitlines()) == ["0 2 3.0 bf16", "1 2 3.0 bf16"]
    path.write_text(
        "import os, time\nif os.environ['OMPI_COMM_WORLD_RANK'] == '1': raise SystemExit(3)\ntime.sleep(50)\n"
    )
    launch = start(tmp_path, "--engine", "mpi", "--main_process_port", free_port(), path)
    launch.communicate(timeout=60)
    assert launch.returncode == 3
