# SPDX-License-Identifier: Apache-2.0
"""The Slurm engine on a real Slurm of two nodes, both on this host."""

import os
import signal
import subprocess
import textwrap
import time

import pytest
from cases import cases
from engines import LAUNCH, ROOT, environment


def start(tmp_path, slurm, *arguments):
    return subprocess.Popen(
        [*map(str, [*LAUNCH, "-q", "--engine", "slurm", "--cpu", *arguments])], cwd=tmp_path,
        env=environment(tmp_path / "home", **slurm), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def test_ranks_on_two_nodes_cooperate(slurm, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent(
            """
            import os, sys, torch
            from accelerate.state import PartialState
            state = PartialState()
            total = torch.tensor(float(state.process_index + 1))
            torch.distributed.all_reduce(total)
            node, precision = os.environ["SLURMD_NODENAME"], os.environ["ACCELERATE_MIXED_PRECISION"]
            told = (state.process_index, state.num_processes, total.item(), node, precision)
            sys.stdout.write(" ".join(map(str, told)) + "\\n")
            """
        )
    )
    options = ["--mixed_precision", "bf16", "--num_cpu_threads_per_process", 1]
    launch = start(tmp_path, slurm, "--num_machines", 2, "--num_processes", 2, *options, script)
    output, errors = launch.communicate(timeout=100)
    assert launch.returncode == 0, output + errors
    assert sorted(output.splitlines()) == ["0: 0 2 3.0 n1 bf16", "1: 1 2 3.0 n2 bf16"]
    assert (
        (tmp_path / "train.sbatch")
        .read_text()
        .startswith("#!/bin/bash\n#SBATCH --job-name=train\n")
    )


def test_a_failing_rank_s_code_is_the_launcher_s_after_a_restart(slurm, tmp_path):
    script = tmp_path / "fail.py"
    script.write_text(
        "import os, time\n"
        "attempt = int(os.environ['TORCHELASTIC_RESTART_COUNT'])\n"
        "if os.environ['SLURM_PROCID'] == '1': raise SystemExit(3 + attempt)\n"
        "time.sleep(60)\n"
    )
    launch = start(
        tmp_path, slurm, "--num_machines", 2, "--num_processes", 2, "--max_restarts", 1, script
    )
    output, errors = launch.communicate(timeout=60)
    assert launch.returncode == 4 and "restart 1 of 1" in output, output + errors


def test_inside_an_allocation_the_failing_rank_is_named(slurm, tmp_path):
    script = tmp_path / "fail.py"
    script.write_text(
        "import os, time\nif os.environ['SLURM_PROCID'] == '1': raise KeyError('x')\ntime.sleep(60)\n"
    )
    inner = [
        *LAUNCH,
        "-q",
        "--engine",
        "slurm",
        "--cpu",
        "--num_machines",
        2,
        "--num_processes",
        2,
        script,
    ]
    command = ["salloc", "-Q", "-N", "2", "-n", "2", *map(str, inner)]
    env = environment(tmp_path / "home", **slurm)
    done = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1 and done.stderr.count("Traceback") == 1, done.stderr
    assert "rank 1 failed: KeyError: 'x'" in done.stderr and "srun (pid" in done.stderr


def test_an_interrupt_cancels_the_job(slurm, tmp_path):
    script = tmp_path / "wait.py"
    script.write_text("import time\nprint('up', flush=True)\ntime.sleep(100)\n")
    launch = start(tmp_path, slurm, "--num_processes", 1, script)
    assert launch.stdout.readline().strip() == "0: up"
    launch.send_signal(signal.SIGINT)
    launch.communicate(timeout=30)
    assert launch.returncode == 130
    deadline = time.monotonic() + 20
    while subprocess.run(
        ["squeue", "-h"], env={**os.environ, **slurm}, capture_output=True, text=True
    ).stdout.strip():
        assert time.monotonic() < deadline, "the job goes on"
        time.sleep(0.2)


def submit(tmp_path, slurm, name, *options, arguments=()):
    """A ready batch file, on two nodes without GPUs and with one rank each. Returns the job and its log."""
    path = f"{os.path.dirname(LAUNCH[0])}{os.pathsep}{os.environ['PATH']}"
    variables = {
        "SCRIPT": f"{ROOT}/examples/clusters/train.py",
        "OUTPUT": str(tmp_path / "run"),
        "PROCESSES": "1",
    }
    env = environment(tmp_path / "home", **slurm, **variables, PATH=path)
    small = [
        "--ntasks-per-node=1",
        "--gpus-per-node=0",
        "--cpus-per-task=1",
        f"--output={tmp_path}/job.log",
    ]
    command = [
        "sbatch",
        "--parsable",
        *small,
        *options,
        f"{ROOT}/examples/clusters/{name}.sbatch",
        *arguments,
    ]
    done = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), tmp_path / "job.log", env


def wait_for(condition, log, seconds=90):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, log.read_text() if log.exists() else "no log"
        time.sleep(0.1)


@pytest.mark.parametrize("name", cases(["launch", "torchrun"], thorough=["torchrun"]))
def test_the_batch_files_of_the_examples_train(slurm, tmp_path, name):
    _, log, _ = submit(tmp_path, slurm, name, arguments=["--epochs", "2"])
    wait_for(lambda: log.exists() and "checkpoint_1: epoch 2" in log.read_text(), log)
    assert log.read_text().count("epoch 1: accuracy") == 2  # on each node


def test_a_batch_file_goes_back_to_the_queue_and_resumes(slurm, tmp_path):
    job, log, env = submit(tmp_path, slurm, "launch", arguments=["--epochs", "100000"])
    wait_for(lambda: (tmp_path / "run/checkpoints/checkpoint_1").exists(), log)
    subprocess.run(["scancel", "--batch", "--signal=USR1", job], env=env, check=True, timeout=20)
    try:
        wait_for(lambda: "accelerate: resumed" in log.read_text(), log)
    finally:
        subprocess.run(["scancel", job], env=env, timeout=20)
