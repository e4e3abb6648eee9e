# SPDX-License-Identifier: Apache-2.0
"""TPU cores and pods: the calls of torch_xla and of gcloud, recorded by stand-ins for them."""

import json
import os
import shlex
import sys

import pytest

from accelerate.commands.launch import launch_command, launch_command_parser
from accelerate.core.errors import ConfigurationError
from accelerate.launchers import tpu

XLA = """
CALLS = []


def launch(function, args=(), start_method="spawn", debug_single_process=False):
    CALLS.append((args, start_method, debug_single_process))
    for index in range(1 if debug_single_process else 4):
        function(index, *args)
"""
SCRIPT = """
import os, sys
RAN = []


def train():
    RAN.append((sys.argv, os.environ.get("XLA_DOWNCAST_BF16"), os.environ["ACCELERATE_MIXED_PRECISION"]))
"""
GCLOUD = f"""#!{sys.executable}
import json, sys
json.dump(sys.argv[1:], open(sys.argv[5] + ".json", "w"))
sys.exit(7 if sys.argv[5] == "failing" else 0)
"""
FILE = "compute_environment: LOCAL_MACHINE\ndistributed_type: XLA\nmain_training_function: train\n"


@pytest.fixture(autouse=True)
def _place(tmp_path, monkeypatch):
    """A folder with a script of a name of its own; environment, arguments and path are put back."""
    saved, argv = dict(os.environ), list(sys.argv)
    for name in saved:
        if name.startswith(("ACCELERATE_", "XLA_", "OMP_")):
            del os.environ[name]
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script_of_cores.py").write_text(SCRIPT)
    yield
    os.environ.clear()
    os.environ.update(saved)
    sys.argv[:] = argv
    for name in ("torch_xla", "torch_xla.runtime", "script_of_cores"):
        sys.modules.pop(name, None)


@pytest.fixture
def xla(tmp_path, monkeypatch):
    package = tmp_path / "packages" / "torch_xla"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(XLA)
    (package / "runtime.py").write_text("def world_size():\n    return 4\n")
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.setattr(tpu, "is_available", lambda name: name == "torch_xla")
    import torch_xla

    return torch_xla


def launch(*words, file=FILE):
    with open("config.yaml", "w") as target:
        target.write(file)
    launch_command(
        launch_command_parser().parse_args(["--quiet", "--config_file", "config.yaml", *words])
    )


def test_each_core_runs_the_function(xla):
    launch("--mixed_precision", "bf16", "--downcast_bf16", "script_of_cores.py", "--lr", "0.1")
    assert xla.CALLS == [((), "spawn", False)]
    import script_of_cores

    assert script_of_cores.RAN == [(["script_of_cores.py", "--lr", "0.1"], "1", "bf16")] * 4
    launch("--num_processes", "4", "-m", "script_of_cores")
    assert len(script_of_cores.RAN) == 8
    launch("--num_processes", "1", "script_of_cores.py")
    assert (
        xla.CALLS[1:] == [((), "spawn", False), ((), "spawn", True)]
        and len(script_of_cores.RAN) == 9
    )
    with pytest.raises(ConfigurationError, match="num_processes=8: this TPU has 4 cores"):
        launch("--num_processes", "8", "script_of_cores.py")
    with pytest.raises(ConfigurationError, match="not have a function 'other'"):
        launch("--main_training_function", "other", "script_of_cores.py")
    assert len(script_of_cores.RAN) == 9


def test_what_cannot_run_on_cores(xla, monkeypatch, capsys):
    with pytest.raises(ConfigurationError, match="--no_python cannot be used with it"):
        launch("--no_python", "true")
    launch("--dry_run", "script_of_cores.py")
    assert (
        "torch_xla.launch(train, debug_single_process=False)" in capsys.readouterr().out
        and xla.CALLS == []
    )
    monkeypatch.setattr(tpu, "is_available", lambda name: False)
    with pytest.raises(ConfigurationError, match=r"pip install torch_xla\[tpu\]"):
        launch("script_of_cores.py")


@pytest.fixture
def gcloud(tmp_path, monkeypatch):
    """A program of this name that writes its arguments into the folder, by the TPU that it was called for."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "gcloud").write_text(GCLOUD)
    (tmp_path / "bin" / "gcloud").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")


POD = FILE + "tpu_use_cluster: true\ntpu_name: pod\ntpu_zone: eu-1\n"


def test_a_pod(gcloud, tmp_path):
    launch(
        "--mixed_precision",
        "bf16",
        "--downcast_bf16",
        "--env",
        "A=b c",
        "script_of_cores.py",
        "--x",
        "1 2",
        file=POD,
    )
    argv = json.loads((tmp_path / "pod.json").read_text())
    where = ["compute", "tpus", "tpu-vm", "ssh", "pod", "--zone", "eu-1", "--command"]
    assert argv[:8] == where and argv[9:] == ["--worker", "all"]
    words = shlex.split(argv[8])
    assert words[:4] == ["cd", str(tmp_path), "&&", "env"]
    python = words.index("python3")
    assert {"ACCELERATE_MIXED_PRECISION=bf16", "XLA_DOWNCAST_BF16=1", "A=b c"} <= set(
        words[4:python]
    )
    assert words[python + 1 :] == [
        "-m", "accelerate.commands.launch", "--tpu", "--no_tpu_cluster", "--main_training_function=train",
        "script_of_cores.py", "--x", "1 2",
    ]  # fmt: skip
    # What the workers get is a launch on their own cores, whatever their own configuration file says.
    args = launch_command_parser().parse_args(words[python + 3 :])
    assert (
        args.tpu and args.tpu_use_cluster is False and args.training_script_args == ["--x", "1 2"]
    )


def test_several_pods_one_of_which_fails(gcloud, tmp_path, capfd):
    with pytest.raises(SystemExit) as ended:
        pods = ["--vm", "fine", "--vm", "failing"]
        launch("--tpu_use_sudo", "--num_processes", "8", *pods, "-m", "script_of_cores", file=POD)
    assert ended.value.code == 7 and not (tmp_path / "pod.json").exists()
    words = shlex.split(json.loads((tmp_path / "failing.json").read_text())[8])
    assert words[3:5] == ["sudo", "env"] and words[-4:-2] == [
        "--num_processes=8",
        "--main_training_function=train",
    ]


def test_what_a_pod_lacks(gcloud, tmp_path, monkeypatch):
    for file, words, told in (
        (POD.replace("tpu_name: pod\n", ""), [], "add --vm, or set tpu_name"),
        (POD.replace("tpu_zone: eu-1\n", ""), [], "set tpu_zone"),
        (POD, ["--env", "A"], "--env A: use NAME=VALUE"),
        (POD, ["--no_python"], "--no_python cannot|is not on the PATH"),
    ):
        with pytest.raises(ConfigurationError, match=told):
            launch(*words, "script_of_cores.py", file=file)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigurationError, match="install the Google Cloud CLI"):
        launch("script_of_cores.py", file=POD)
    assert not list(tmp_path.glob("*.json"))
