# SPDX-License-Identifier: Apache-2.0
"""`accelerate launch` on this machine: real processes, failures, signals, ports."""

import ast
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from machines import clean_environment, is_running, until
from ranks import run_ranks

COMMAND = [sys.executable, "-m", "accelerate.commands.main", "launch"]


@pytest.fixture
def launch(tmp_path):
    """Launch a script given as text; everything about its end."""

    def run(source, *options, args=(), timeout=60, **extra):
        script = tmp_path / "script.py"
        script.write_text(textwrap.dedent(source))
        command = [*COMMAND, *options, str(script), *args]
        return subprocess.run(
            command,
            env=clean_environment(tmp_path, **extra),
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    return run


def test_one_process_is_the_script_itself(launch):
    done = launch(
        """
        import os, sys
        import json
        assert __name__ == "__main__" and sys.modules["__main__"].__file__ == __file__ == sys.argv[0]
        assert sys.path[0] == os.path.dirname(os.path.realpath(__file__))
        import multiprocessing, pickle
        class Here: pass
        pickle.loads(pickle.dumps(Here()))
        precision = os.environ["ACCELERATE_MIXED_PRECISION"]
        print(json.dumps([sys.argv[1:], "torch" in sys.modules, "RANK" in os.environ, precision]))
        """,
        "--mixed_precision", "bf16", args=("--a", "b"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [["--a", "b"], False, False, "bf16"]
    assert done.stderr.count("\n") == 1 and "mixed precision bf16" in done.stderr


def test_the_tracebacks_of_a_lone_script_are_its_own(launch):
    done = launch("def f():\n    raise ValueError('boom')\nf()\n")
    assert done.returncode == 1
    assert "boom" in done.stderr and done.stderr.count("Traceback") == 1
    assert "accelerate/" not in done.stderr and "importlib" not in done.stderr
    assert launch("import sys; sys.exit(7)").returncode == 7
    # An error of ours that the script lets pass is the script's error too.
    own = launch(
        "from accelerate.core.errors import ConfigurationError\nraise ConfigurationError('mine')\n"
    )
    assert own.returncode == 1 and "Traceback" in own.stderr


def test_modules_run_like_python_dash_m(launch, tmp_path):
    package = tmp_path / "package_x"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "train.py").write_text(
        "from . import other\nprint(other.A, __package__, __spec__.name)\n"
    )
    (package / "other.py").write_text("A = 3\n")
    done = subprocess.run(
        [*COMMAND, "-q", "-m", "package_x.train"],
        cwd=tmp_path,
        env=clean_environment(tmp_path),
        capture_output=True,
        text=True,
    )
    assert done.stdout == "3 package_x package_x.train\n", done.stderr


def test_processes_cooperate_and_share_the_threads(launch):
    done = launch(
        """
        import torch, torch.distributed as dist, os
        dist.init_process_group("gloo")
        total = torch.tensor(1.0)
        dist.all_reduce(total)
        print(f"{dist.get_rank()} of {dist.get_world_size()}: {total.item()} on {os.environ['OMP_NUM_THREADS']}")
        dist.barrier()
        dist.destroy_process_group()
        """,
        "--cpu", "--num_processes", "2", "--num_cpu_threads_per_process", "1", timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["0 of 2: 2.0 on 1", "1 of 2: 2.0 on 1"]


def test_the_first_failing_rank_is_shown_once(launch, tmp_path):
    done = launch(
        """
        import atexit, os, sys, time
        from pathlib import Path
        rank, folder = int(os.environ["RANK"]), Path(sys.argv[1])

        def wait_for(name):
            while not (folder / name).exists():
                time.sleep(0.01)

        print("hello from", rank)
        if rank == 1:
            # Its traceback is the first one, its end the last.
            atexit.register(wait_for, "victim")
            atexit.register((folder / "cause").touch)
            raise KeyError("the cause")
        wait_for("cause")
        if rank == 0:
            atexit.register((folder / "victim").touch)
            raise RuntimeError("[gloo] Connection closed by peer")
        time.sleep(60)
        """,
        "--cpu", "--num_processes", "3", "--log_dir", str(tmp_path / "logs"), "--tee", "1",
        "--error_file", str(tmp_path / "error.json"), args=(str(tmp_path),),
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1
    assert "rank 1 failed: KeyError: 'the cause'" in done.stderr
    assert re.search("  other ranks: rank 0: lost .*; rank 2: stopped", done.stderr)
    assert "[rank2]: hello from 2" in done.stdout
    told = json.loads((tmp_path / "error.json").read_text())
    assert told["rank"] == 1 and told["exit_code"] == 1 and "the cause" in told["traceback"]
    with open(told["log"]) as log:
        assert "the cause" in log.read()


def test_signals_and_codes_are_told_in_words(launch):
    for number, words in ((signal.SIGKILL, "SIGKILL"), (signal.SIGSEGV, "invalid memory access")):
        done = launch(
            f"import os, time\nif os.environ['RANK'] == '1': os.kill(os.getpid(), {int(number)})\ntime.sleep(60)\n",
            "--cpu", "--num_processes", "2",
        )  # fmt: skip
        assert done.returncode == 128 + number
        assert words in done.stderr and "rank 1 failed" in done.stderr


def test_ranks_that_stop_on_request_have_not_failed(launch):
    """As after a save on `request_stop()`: each rank ends by itself, with 128 plus the number of the signal."""
    done = launch(
        """
        import os, sys, time
        rank = int(os.environ["RANK"])
        time.sleep(rank)
        print("rank", rank, "is done", file=sys.stderr)
        sys.exit(143)
        """,
        "--cpu", "--num_processes", "2",
    )  # fmt: skip
    assert done.returncode == 143
    assert "rank 1 is done" in done.stderr
    assert "SIGTERM" in done.stderr and "failed" not in done.stderr
    done = launch(
        "import os, sys, time\nif os.environ['RANK'] == '1': sys.exit(138)\ntime.sleep(60)\n",
        "--cpu", "--num_processes", "2",
    )  # fmt: skip
    assert done.returncode == 138 and "rank 1 failed" in done.stderr


STUBBORN = """
import os, signal, subprocess, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGINT, signal.SIG_IGN)
child = subprocess.Popen(["sleep", "60"]).pid
print("pid", os.getpid(), child, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nobody_is_left_behind(tmp_path, number):
    script = tmp_path / "stubborn.py"
    script.write_text(STUBBORN)
    launcher = subprocess.Popen(
        [*COMMAND, "--cpu", "--num_processes", "2", "--stop_timeout", "0.5", str(script)],
        env=clean_environment(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    words = [launcher.stdout.readline().split() for _ in range(2)]
    pids = [int(pid) for _, *both in words for pid in both]
    launcher.send_signal(number)
    launcher.wait(timeout=40)
    assert launcher.returncode == (-9 if number == signal.SIGKILL else 128 + number)
    until(lambda: not any(map(is_running, pids)), timeout=30)


def test_what_a_failed_rank_started_is_killed_with_it(launch):
    done = launch(
        """
        import os, subprocess, sys, time
        if os.environ["RANK"] == "0":
            print("pid", subprocess.Popen(["sleep", "60"]).pid, flush=True)
            sys.exit(3)
        time.sleep(60)
        """,
        "--cpu", "--num_processes", "2",
    )  # fmt: skip
    assert done.returncode == 3
    until(lambda: not is_running(int(done.stdout.split()[1])), timeout=30)


def test_a_script_that_cannot_be_compiled_is_one_message(launch):
    for count in ("1", "2"):
        done = launch("x = (\nprint(x)\n", "--cpu", "--num_processes", count)
        assert done.returncode == 2 and "Traceback" not in done.stderr
        assert done.stderr.count("SyntaxError: ") == done.stderr.count('script.py", line ') == 1, (
            done.stderr
        )


def test_a_script_file_after_dash_m_is_named(launch):
    done = launch("raise SystemExit('started')", "--cpu", "--num_processes", "2", "-m")
    assert done.returncode == 2 and "is a script file: remove -m" in done.stderr, done.stderr


def test_a_reader_that_ends_early_causes_no_traceback(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("")
    ours, theirs = os.pipe()
    os.close(ours)
    command = [*COMMAND, "-q", "--cpu", "--num_processes", "2", "--dry_run", str(script)]
    done = subprocess.run(
        command, env=clean_environment(tmp_path), stdout=theirs, stderr=subprocess.PIPE, timeout=60
    )
    os.close(theirs)
    assert done.returncode == 141 and not done.stderr


def test_twenty_launches_at_once(tmp_path):
    script = tmp_path / "meet.py"
    script.write_text(
        textwrap.dedent(
            """
            import os, socket, time
            port = int(os.environ["MASTER_PORT"])
            if os.environ["RANK"] == "0":
                server = socket.socket()
                server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                server.bind(("0.0.0.0", port))
                server.listen()
                friend, _ = server.accept()
                assert friend.recv(9) == os.environ["TOKEN"].encode()
            else:
                while True:
                    try:
                        friend = socket.create_connection(("127.0.0.1", port))
                        break
                    except ConnectionRefusedError:
                        time.sleep(0.02)
                friend.sendall(os.environ["TOKEN"].encode())
            """
        )
    )
    command = [*COMMAND, "-q", "--cpu", "--num_processes", "2", str(script)]
    launches = [
        subprocess.Popen(command, env=clean_environment(tmp_path, TOKEN=str(n))) for n in range(20)
    ]
    assert [launch.wait(timeout=60) for launch in launches] == [0] * 20


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--num_proceses", "2"], "did you mean --num_processes"),
        (["--num_processes", "0"], "is out of range: use 1"),
        (["--num_processes", "-1"], "--num_processes=-1 is out of range"),
        (["--num_processes", "two"], "not an integer"),
        (["--stop_within", "0.5"], "--stop_within=0.5 is out of range"),
        (["--mixed_precision", "bf61"], "did you mean bf16"),
        (["--cpu", "--multi_gpu"], "contradict"),
        (["--config_file", "/no/such/file.yaml"], "does not exist"),
    ],
)
def test_bad_input_is_one_line_and_code_two(launch, options, told):
    done = launch("raise SystemExit('started')", *options)
    assert done.returncode == 2
    assert told in done.stderr and "Traceback" not in done.stderr and "started" not in done.stderr


def test_a_port_in_use_is_refused(launch):
    import socket

    with socket.socket() as busy:
        busy.bind(("0.0.0.0", 0))
        busy.listen()
        done = launch(
            "", "--cpu", "--num_processes", "2", "--main_process_port", str(busy.getsockname()[1])
        )
    assert done.returncode == 2 and "in use" in done.stderr


def test_one_requested_process_is_no_rank_of_an_mpirun_that_started_the_shell(launch, monkeypatch):
    for name, value in {"RANK": 1, "SIZE": 2, "LOCAL_RANK": 1, "LOCAL_SIZE": 2}.items():
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", str(value))
    script = "import os; print('rank', os.environ.get('OMPI_COMM_WORLD_RANK'))"
    assert "rank 1" in launch(script, "--cpu").stdout
    done = launch(script, "--cpu", "--num_processes", "1")
    assert "rank None" in done.stdout
    assert re.search("OMPI_COMM_WORLD_SIZE is set, .*one process", done.stderr)


def test_a_launch_inside_of_a_rank_is_another_run(launch):
    source = """
        import os, subprocess, sys
        settings = ("ACCELERATE_USE_FSDP", "ACCELERATE_MIXED", "FSDP")
        prefixes = (*settings, "MASTER", "TORCHEL", "RANK", "WORLD_SIZE")
        if sys.argv[1:]:
            print("inner", {name: text for name, text in os.environ.items() if name.startswith(prefixes)})
        elif os.environ["RANK"] == "1":
            command = [sys.executable, "-m", "accelerate.commands.main", "launch", "--cpu"]
            for options in ((), ("--num_processes", "2", "--mixed_precision", "bf16")):
                subprocess.run([*command, *options, __file__, "again"], check=True)
    """
    options = (
        "--cpu",
        "--num_processes",
        "2",
        "--use_fsdp",
        "--mixed_precision",
        "fp16",
        "--max_restarts",
        "1",
    )
    done = launch(source, *options, timeout=120)
    assert done.returncode == 0, done.stderr
    alone, *pair = [
        ast.literal_eval(line.removeprefix("inner ")) for line in done.stdout.splitlines()
    ]
    assert alone == {"ACCELERATE_MIXED_PRECISION": "no"}
    assert {"MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"} < pair[0].keys()
    for variables in pair:
        assert not any(
            name.startswith(("ACCELERATE_USE_FSDP", "FSDP", "TORCHEL")) for name in variables
        )
        assert variables["ACCELERATE_MIXED_PRECISION"] == "bf16" and variables["WORLD_SIZE"] == "2"


@pytest.mark.parametrize("processes", [1, 2])
def test_an_option_of_the_launch_after_the_script_is_named_if_the_script_refuses_it(
    launch, processes
):
    source = """
        import argparse, sys
        parser = argparse.ArgumentParser()
        parser.add_argument("--mixed_precision")
        parser.parse_args()
    """
    options = ("--cpu", "--num_processes", str(processes))
    done = launch(source, *options, args=("--mixed_precision", "bf16", "--num_machines=2"))
    assert done.returncode == 2
    assert done.stderr.count("got --mixed_precision, --num_machines=2: launch options") == 1, (
        done.stderr
    )
    done = launch(source, *options, args=("--mixed_precision", "bf16"))
    assert done.returncode == 0 and len(done.stderr.splitlines()) == 1, done.stderr


def test_an_attribute_of_the_model_inside_of_ddp_has_its_remedy():
    source = """
        import torch
        from accelerate import Accelerator
        model = Accelerator(cpu=True).prepare(torch.nn.Linear(2, 2))
        model.weight
    """
    for done in run_ranks(source, 2, check=False):
        assert done.returncode == 1
        assert "unwrap_model(model).weight" in done.stderr, done.stderr


def test_dry_run_starts_nothing(launch):
    done = launch("raise SystemExit('started')", "--cpu", "--num_processes", "2", "--dry_run")
    assert done.returncode == 0
    assert "export RANK=1" in done.stdout and "export ACCELERATE_USE_CPU=true" in done.stdout


def test_output_to_a_full_disk_is_an_error(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("print('figures')\n")
    for command in (
        [*COMMAND, "-q", "--cpu", "--num_processes", "2", str(script)],
        [*COMMAND[:-1], "config", "-h"],
    ):
        with open("/dev/full", "w") as full:
            done = subprocess.run(
                command,
                env=clean_environment(tmp_path),
                stdout=full,
                stderr=subprocess.PIPE,
                text=True,
            )
        assert done.returncode == 1 and done.stderr.count("No space left") == 1, done.stderr
        assert len(done.stderr.splitlines()) == 1, done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="makes a network namespace")
def test_a_machine_without_its_own_address_is_an_error(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("raise SystemExit('started')\n")
    command = ["unshare", "-n", *COMMAND, "-q", "--cpu", "--num_processes", "2", str(script)]
    done = subprocess.run(
        command, env=clean_environment(tmp_path), capture_output=True, text=True, timeout=100
    )
    if done.stderr.startswith("unshare"):
        pytest.skip("no namespaces here")
    assert done.returncode == 2, done.stderr
    assert re.search("127.0.0.1 is not .*this machine", done.stderr), done.stderr


def test_the_folder_of_a_killed_launcher_is_removed_by_the_next_launch(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, time\nprint(os.environ['ACCELERATE_STATUS_DIR'], flush=True)\ntime.sleep(60)\n"
    )
    folders = []
    for number in (signal.SIGKILL, signal.SIGTERM):
        launcher = subprocess.Popen(
            [*COMMAND, "--cpu", "--num_processes", "2", "--stop_within", "9", str(script)],
            env=clean_environment(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        folders.append(Path(launcher.stdout.readline().strip()))
        assert folders[-1].is_dir() and (len(folders) == 1 or not folders[0].exists())
        launcher.send_signal(number)
        _, stderr = launcher.communicate(timeout=40)
    assert not folders[1].exists()
    # The script saves nothing on SIGTERM: it does not call `resume`, or did not reach it.
    (hint,) = [line for line in stderr.splitlines() if "nothing was saved" in line]
    assert "before it called accelerator.resume()" in hint and "does not call it" in hint
