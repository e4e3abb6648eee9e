# SPDX-License-Identifier: Apache-2.0
"""What DeepSpeed's starter is given: its command line, and the file of variables that it carries to other machines."""

import json
import os
import subprocess
import sys

import pytest

RECORDER = f"""#!{sys.executable}
import json, sys
json.dump(sys.argv[1:], open("argv.json", "w"))
sys.exit(3 if "fail" in sys.argv else 0)
"""


@pytest.fixture
def launch(tmp_path):
    """Launch through a recording `deepspeed`; what it was given."""
    (tmp_path / "deepspeed").write_text(RECORDER)
    (tmp_path / "deepspeed").chmod(0o755)
    (tmp_path / "hosts").write_text("h1 slots=2\nh2 slots=2\n")
    (tmp_path / "train.py").write_text("")

    def run(*options, args=()):
        command = [
            sys.executable,
            "-m",
            "accelerate.commands.main",
            "launch",
            "-q",
            "--use_deepspeed",
            "--cpu",
        ]
        command += [
            "--num_machines",
            "2",
            "--num_processes",
            "4",
            "--deepspeed_hostfile",
            "hosts",
            *options,
        ]
        env = {
            name: text
            for name, text in os.environ.items()
            if not name.startswith(("ACCELERATE_", "OMP_"))
        }
        env.update(
            PATH=f"{tmp_path}{os.pathsep}{env['PATH']}",
            HF_HOME=str(tmp_path / "home"),
            PYTHONPATH="/here",
        )
        done = subprocess.run(
            [*command, "train.py", *args],
            cwd=tmp_path,
            env=env,
            capture_output=True,
            text=True,
            timeout=60,
        )
        return done, json.loads((tmp_path / "argv.json").read_text()) if (
            tmp_path / "argv.json"
        ).exists() else None

    return run


def test_the_command_line_and_the_variables(launch, tmp_path):
    done, argv = launch(
        "--zero_stage", "2", "--main_process_ip", "10.0.0.1", "--main_process_port", "1234",
        "--num_cpu_threads_per_process", "3", args=("--name", "a b"),
    )  # fmt: skip
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert argv == [
        "--hostfile", "hosts", "--no_local_rank", "--launcher", "pdsh", "--num_gpus", "2", "--master_addr", "10.0.0.1",
        "--master_port", "1234", "train.py", "--name", "a b",
    ]  # fmt: skip
    lines = dict(
        line.split("=", 1) for line in (tmp_path / ".deepspeed_env").read_text().splitlines()
    )
    assert (
        lines["ACCELERATE_USE_DEEPSPEED"] == "true"
        and lines["ACCELERATE_DEEPSPEED_ZERO_STAGE"] == "2"
    )
    assert lines["OMP_NUM_THREADS"] == "3" and lines["PYTHONPATH"] == f"/here{os.pathsep}{tmp_path}"


def test_filters_other_launchers_and_failures(launch):
    _, argv = launch(
        "--deepspeed_exclusion_filter", "h2:0", "--deepspeed_multinode_launcher", "openmpi"
    )
    assert argv[:7] == [
        "--hostfile",
        "hosts",
        "--no_local_rank",
        "--launcher",
        "openmpi",
        "--exclude",
        "h2:0",
    ]
    _, argv = launch("--deepspeed_inclusion_filter", "h1")
    assert argv[5:7] == ["--include", "h1"]
    done, _ = launch(args=("fail",))
    assert done.returncode == 3 and "deepspeed (pid" in done.stderr


@pytest.mark.parametrize("word", ["it's", "$HOME", "a;b", "a $b", "", "%h"])
def test_what_a_remote_shell_would_read_otherwise_is_refused(launch, word):
    done, argv = launch(args=("--name", word))
    assert (
        done.returncode == 2
        and argv is None
        and repr(word) in done.stderr
        and "standard" in done.stderr
    )
    assert launch("--deepspeed_multinode_launcher", "openmpi", args=("--name", word))[1][-1] == word


def test_a_missing_host_file_is_named(launch):
    done, argv = launch("--engine", "deepspeed", "--deepspeed_hostfile", "nosuch")
    assert done.returncode == 2 and argv is None and "'nosuch' does not exist" in done.stderr
