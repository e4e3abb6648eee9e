# SPDX-License-Identifier: Apache-2.0
"""The Ray engine on a cluster of two machines (both this host): places, failures, ends, and what does not fit."""

import os
import re
import signal
import subprocess
import textwrap

import pytest
from cases import cases
from engines import LAUNCH, environment, wait_until_gone

WAITING = "import os, time\nprint('pid', os.getpid(), flush=True)\ntime.sleep(100)\n"


@pytest.fixture
def start(tmp_path, ray):
    """Start a launch of a script given as text."""
    script = tmp_path / "script.py"

    def run(source, *options, **extra):
        script.write_text(textwrap.dedent(source))
        command = [
            *map(
                str,
                [
                    *LAUNCH,
                    "-q",
                    "--engine",
                    "ray",
                    "--num_processes",
                    *options,
                    script,
                    "an argument",
                ],
            )
        ]
        env = environment(tmp_path / "home", **{**ray, **extra})
        # Two of the cluster's processors are pretended GPUs: what decides is the launch, not this variable.
        del env["ACCELERATE_USE_CPU"]
        return subprocess.Popen(
            command,
            cwd=tmp_path,
            env=env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    return run


def end(launch, timeout=60):
    output, errors = launch.communicate(timeout=timeout)
    return launch.returncode, output, errors


def test_every_process_knows_its_place(start, tmp_path):
    source = """
    import os, sys
    names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE CUDA_VISIBLE_DEVICES HF_OF_MINE"
    names += " HF_TOKEN WANDB_API_KEY"
    print(*(os.environ.get(name) for name in names.split()), sys.argv[1], os.path.basename(os.getcwd()))
    """
    launch = start(
        source,
        4,
        "--num_machines",
        2,
        "--tee",
        1,
        "--log_dir",
        "logs",
        "--env",
        "WANDB_API_KEY",
        HF_OF_MINE="yes",
        HF_TOKEN="a",
        WANDB_API_KEY="b",
    )
    code, output, errors = end(launch)
    assert code == 0, errors
    # A device of its own each, seen among all of its machine: that of its local rank.
    assert sorted(output.splitlines()) == [
        f"[rank{rank}]: {rank} 4 {rank % 2} 2 {rank // 2} 2 0,1 yes None b an argument {tmp_path.name}"
        for rank in range(4)
    ]
    (folder,) = (tmp_path / "logs").iterdir()
    assert (folder / "rank_3" / "stdout.log").read_text().startswith("3 4 1 2 1 2")


def test_a_failure_is_told_once_and_a_restart_goes_on(start, tmp_path):
    # No rank fails before both have printed.
    os.mkfifo(tmp_path / "printed")
    source = """
    import os, time
    print("attempt", os.environ["TORCHELASTIC_RESTART_COUNT"], flush=True)
    open("printed", "w" if os.environ["RANK"] == "0" else "r").close()
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "1":
        raise SystemExit(7 * int(os.environ["RANK"]))
    if os.environ["RANK"] == "1":
        raise KeyError("the cause")
    time.sleep(100)
    """
    code, output, errors = end(start(source, 2, "--cpu", "--max_restarts", 1))
    assert code == 7 and sorted(output.split()) == ["0", "0", "1", "1", *["attempt"] * 4], errors
    assert errors.count("Traceback") == 1 and "rank 1 failed: KeyError: 'the cause'" in errors
    assert "rank 0: stopped by the launcher" in errors and "restart 1 of 1" in errors
    assert re.search(r"rank 1 failed: .*exit code 7", errors)


@pytest.mark.parametrize(
    "number", cases([signal.SIGINT, signal.SIGTERM, signal.SIGKILL], thorough=[signal.SIGINT])
)
def test_nobody_is_left_behind(start, number):
    launch = start(WAITING, 2, "--cpu")
    pids = [int(launch.stdout.readline().split()[1]) for _ in range(2)]
    launch.send_signal(number)
    code, _, errors = end(launch, timeout=30)
    assert code == (-9 if number == signal.SIGKILL else 128 + number), errors
    for pid in pids:
        # Where the launcher is killed the cluster notices that it is gone; it takes a moment.
        wait_until_gone(pid)


def test_a_lost_worker_is_a_failure(start):
    launch = start(WAITING, 2, "--cpu")
    pid = int(launch.stdout.readline().split()[1])
    with open(f"/proc/{pid}/status") as status:
        worker = int(re.search(r"PPid:\s+(\d+)", status.read()).group(1))
    os.kill(worker, signal.SIGKILL)
    code, _, errors = end(launch)
    assert code == 137 and f"(pid {pid}) is lost" in errors and "stopped by the launcher" in errors


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (
            [5],
            r"5 processes with 1 CPU, 1 GPU each do not fit: .* has 2 CPU, 2 GPU on .*; 2 CPU, 2 GPU on",
        ),
        ([3, "--num_machines", 3, "--cpu"], "3 machines with 1 CPU each do not fit"),
        ([2, "--cpu", "--num_cpu_threads_per_process", 3], "with 3 CPU each do not fit"),
        ([2, "--ray_address", "127.0.0.1:9"], "Ray cluster does not answer at 127.0.0.1:9"),
        ([2, "--ray_address", "somewhere"], "is not the address of a Ray cluster: use host:port"),
    ],
)
def test_what_cannot_be_is_one_line(start, options, told):
    code, output, errors = end(start(WAITING, *options))
    assert code == 2 and not output and re.search(told, errors) and errors.count("\n") == 1, errors


@pytest.mark.thorough
def test_a_busy_cluster_is_waited_for(start):
    busy = start(WAITING, 4, "--cpu")
    for _ in range(4):
        busy.stdout.readline()
    code, _, errors = end(start("print('never')", 2, "--cpu", "--rdzv_conf", "join_timeout=4"))
    assert code == 1 and "waiting for resources: 2 x 1 CPU; free now:" in errors
    assert "did not have free resources within 4 s" in errors
    busy.terminate()
    assert end(busy)[0] == 143


def test_without_a_cluster_one_is_started(start):
    code, output, errors = end(start("print('here')", 1, "--cpu", "--ray_address", "local"))
    assert (code, output) == (0, "here\n"), errors
