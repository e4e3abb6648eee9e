# SPDX-License-Identifier: Apache-2.0
"""`accelerate init`: the projects that it writes run, resume, pass their own test, and replace nothing."""

import builtins
import importlib.util
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packages import package

from accelerate.commands import init
from accelerate.config import launch_file
from accelerate.core import system
from accelerate.test_utils import assert_same_run

FILES = {
    "README.md",
    "accelerate.yaml",
    "job.sbatch",
    "pyproject.toml",
    "test_train.py",
    "train.py",
}


@pytest.fixture(autouse=True)
def _cpu(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(system, "accelerators", lambda: system.Accelerators("cpu", 0))


def launched(folder, *arguments):
    done = subprocess.run(
        [
            sys.executable, "-m", "accelerate.commands.main", "launch", "--config_file", "accelerate.yaml", "train.py",
            *arguments,
        ],
        cwd=folder, capture_output=True, text=True, timeout=150,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.parametrize(
    "task, result",
    [
        ("loop", None),
        pytest.param("causal-lm", "model/model.safetensors", marks=pytest.mark.thorough),
        pytest.param("lora", "adapter/adapter_model.safetensors", marks=pytest.mark.thorough),
        pytest.param(
            "diffusion",
            "pipeline/unet/diffusion_pytorch_model.safetensors",
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_a_project_runs_and_passes_its_test(task, result, tmp_path):
    for requirement in init.TASKS[task].packages:
        package(requirement.partition(">")[0])
    init.main([f"My {task}", "--task", task])
    folder = tmp_path / f"My {task}"
    assert {path.name for path in folder.iterdir()} == FILES
    done = launched(folder, "--epochs", "2")
    losses = [float(line.split()[-1]) for line in done.stdout.splitlines()]
    assert len(losses) == 2 and losses[1] < losses[0]
    # peft calls what transformers has deprecated.
    lines = [line for line in done.stderr.splitlines() if "is_gradient_checkpointing" not in line]
    assert not any("Warning" in line for line in lines), done.stderr
    assert result is None or (folder / "run" / result).is_file()
    if task != "loop":
        # Started again, it goes on after the last epoch.
        assert launched(folder, "--epochs", "3").stdout.startswith("epoch 2:")
    spec = importlib.util.spec_from_file_location("project_test", folder / "test_train.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.test_two_processes(tmp_path / "output")


@pytest.mark.thorough
def test_the_test_of_a_project_finds_a_fault(tmp_path):
    init.main(["broken", "--task", "loop"])
    script = tmp_path / "broken" / "train.py"
    text = script.read_text()
    wrong = text.replace("backward(loss)", "backward(loss * accelerator.num_processes)")
    assert wrong != text
    script.write_text(wrong)
    with pytest.raises(AssertionError, match="different"):
        assert_same_run(script, arguments=["--output", tmp_path / "output"])


@pytest.mark.parametrize("task", init.TASKS)
def test_the_files_are_complete(task, tmp_path, capsys):
    init.main([f"My {task}!", "--task", task])
    folder = tmp_path / f"My {task}!"
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    assert project["name"] == f"my-{task}"
    names = [text.split(">")[0].split(" ")[0] for text in project["dependencies"]]
    assert (
        names[0] == "accelerate" and Path(project["dependencies"][0].split("file://")[1]).is_dir()
    )
    script = (folder / "train.py").read_text()
    assert all(f"from {name} import" in script for name in names[1:])
    assert len((folder / "README.md").read_text().splitlines()) == 10
    assert launch_file.read(folder / "accelerate.yaml").data["use_cpu"] is True
    for name in ("PROJECT", "TITLE", "REQUIREMENTS"):
        assert all(name not in path.read_text() for path in folder.iterdir())
    assert subprocess.run(["bash", "-n", folder / "job.sbatch"], check=False).returncode == 0
    printed = capsys.readouterr().out
    assert "accelerate launch --config_file accelerate.yaml train.py" in printed
    assert f"cd 'My {task}!'" in printed


def test_nothing_is_overwritten(tmp_path, capsys):
    (tmp_path / "train.py").write_text("mine")
    with pytest.raises(SystemExit) as end:
        init.main(["--task", "loop"])
    assert end.value.code == 2 and "train.py" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


def test_it_asks_as_config_does(tmp_path, monkeypatch):
    # The task, then machines, processes, precision, compilation, and whether to write.
    answers = iter(["?", "2", "<", "1", "", "<", "", "2", "", "", "1", "", ""])
    monkeypatch.setattr(builtins, "input", lambda *prompt: next(answers))
    init.main(["asked"])
    data = launch_file.read(tmp_path / "asked" / "accelerate.yaml").data
    assert data["num_processes"] == 2 and data["mixed_precision"] == "bf16"
    assert "AutoModelForCausalLM" in (tmp_path / "asked" / "train.py").read_text()
