# SPDX-License-Identifier: Apache-2.0
"""`accelerate certify`, `accelerate launch --certify` and `assert_same_run`: arguments, exit codes, real runs."""

import functools
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from accelerate.certify.certificate import Certificate, Row
from accelerate.certify.runs import Script, installation
from accelerate.commands import certify, launch
from accelerate.launchers.spec import Program

TRAIN = """
import sys
import torch
from torch.utils.data import DataLoader, TensorDataset
from accelerate import Accelerator
from accelerate.utils import set_seed

def train(fault=False):
    set_seed(0)
    accelerator = Accelerator()
    data = TensorDataset(torch.randn(32, 4), torch.randn(32, 1))
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, 4))
    for x, y in loader:
        loss = torch.nn.functional.mse_loss(model(x), y)
        if fault:
            loss = loss * accelerator.num_processes
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()

if __name__ == "__main__":
    train("--fault" in sys.argv)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    (tmp_path / "train.py").write_text(TRAIN)
    return tmp_path


def run(*words, command=certify):
    with pytest.raises(SystemExit) as ended:
        command.main([str(word) for word in words])
    return ended.value.code


@pytest.mark.parametrize(
    "words",
    [
        "--layouts ddp:2 fsdp:2xtp:2 --steps 3 train.py --steps 9 x:1",
        "--steps 3 --layouts ddp:2 fsdp:2xtp:2 train.py --steps 9 x:1",
        "train.py --steps 9 x:1 --layouts ddp:2 fsdp:2xtp:2 --steps 3",
        "--steps 3 train.py --steps 9 x:1 --layouts ddp:2 fsdp:2xtp:2",
        "--steps=3 --layout ddp:2 fsdp:2xtp:2 -- train.py --steps 9 x:1",
    ],
)
def test_options_stand_before_or_after_the_script(words):
    args = certify.parser().parse_args(certify._arranged(words.split()))
    assert args.layouts == ["ddp:2", "fsdp:2xtp:2"]
    assert (args.steps, args.script) == (3, "train.py")
    assert args.arguments == ["--steps", "9", "x:1"]


def test_a_module_and_its_arguments():
    for words in (
        "-m tool.train --lr 1 --layouts tp:2",
        "--layouts tp:2 -m tool.train --lr 1",
        "--cpu -m tool.train --lr 1 --layouts tp:2",
    ):
        args = certify.parser().parse_args(certify._arranged(words.split()))
        assert (args.module, args.script, args.arguments) == (True, "tool.train", ["--lr", "1"])


@pytest.mark.parametrize(
    "words, fact",
    [
        ("train.py", "--layouts"),
        ("--layouts ddp:2", "script"),
        ("--layouts dpp:2 train.py", "dpp:2"),
        ("--layouts ddp2 train.py", "ddp2"),
        ("--layouts ddp:2 missing.py", "missing.py"),
        ("--layouts ddp:2 --steps 0 train.py", "--steps 0"),
        ("--layouts ddp:2 --steps x train.py", "--steps"),
        ("--layouts ddp:2 --stpes 4 train.py", "--steps"),
        ("--layouts ddp:2 --reference dd train.py", "--reference dd"),
        ("--layouts ddp:2 --against nothing train.py", "--against nothing"),
        ("--layouts ddp:2 --config_file missing.yaml train.py", "missing.yaml"),
        ("--layouts ddp:2 --output train.py/card train.py", "--output"),
        ("--layouts ddp:2 --folder . train.py", "--folder"),
        ("--check missing.yaml", "missing.yaml"),
        ("--check train.py", "train.py"),
    ],
)
def test_wrong_arguments_end_with_2_and_one_line(words, fact, capsys, monkeypatch):
    monkeypatch.setattr(Script, "record", lambda *args, **changes: pytest.fail("a run was started"))
    assert run(*words.split()) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if "logs in" not in line]
    assert len(errors) == 1 and fact in errors[0]


def test_a_certificate_is_checked_again(folder, capsys, monkeypatch):
    verdicts = {"ddp:2": "equal", "fsdp:2": "equal"}

    def made(self, path, report):
        self.rows = [Row(layout.text, verdicts[layout.text]) for layout in self.layouts]
        for row in self.rows:
            report(row)

    monkeypatch.setattr(Certificate, "run", made)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert run("--layouts", *verdicts, "train.py", "--lr", "1") == 0
    assert run("--check", "certificate.yaml") == 0
    verdicts["fsdp:2"] = "not comparable"
    capsys.readouterr()
    assert run("--check", "certificate.yaml", "--json") == 3
    output = capsys.readouterr()
    assert json.loads(output.out)["verdict"] == "not comparable"
    assert "fsdp:2: not comparable, but equal in certificate.yaml" in output.err
    # What it has recorded stays.
    assert yaml.safe_load((folder / "certificate.yaml").read_text())["verdict"] == "equal"
    for option, value in {"--steps": "8", "--layouts": "tp:2", "--dtype": "float64"}.items():
        assert run("--check", "certificate.yaml", option, value) == 2
        assert option[2:] in capsys.readouterr().err
    assert run("--check", "certificate.yaml", "train.py", "--lr", "2") == 2
    assert "command" in capsys.readouterr().err
    assert run("--check", "certificate.yaml", "--steps", "4", "train.py", "--lr", "1") == 3
    verdicts["ddp:2"] = "could not run"
    capsys.readouterr()
    assert run("train.py", "--dtype=float64", "--layouts", "ddp:2", "--output", "failed.yaml") == 2
    assert "train.py got its arguments --dtype." in capsys.readouterr().err


def test_a_real_run_is_certified_and_named_by_its_checkpoints(folder, capsys):
    """A run that is equal, one that is not, and what the files say of them."""
    assert run("train.py", "--layouts", "ddp:2", "--steps", "2", "--cpu", "--folder", "runs") == 0
    assert "ddp:2: equal" in capsys.readouterr().out
    data = yaml.safe_load((folder / "certificate.yaml").read_text())
    assert data["layouts"][0]["mesh"] == {"ddp": 2}
    assert {item["kind"] for item in data["layouts"][0]["items"]} >= {
        "batch",
        "output",
        "loss",
        "gradient",
        "parameter",
        "state",
    }
    assert (folder / "runs" / "0-ddp2" / "step_2.pt").exists()


def test_a_function_of_a_test_is_certified(folder, monkeypatch):
    from accelerate.test_utils import assert_same_run

    monkeypatch.syspath_prepend(folder)
    sys.modules.pop("train", None)
    from train import train

    with pytest.raises(AssertionError, match=r"(?s)ddp:2: different.*step 1, forward: loss 0"):
        assert_same_run(train, layouts=["ddp:2"], arguments=[True], steps=1)


def test_a_launch_is_certified_before_it_starts(folder, capsys, monkeypatch):
    seen = {}

    def made(self, path, report):
        seen["script"], seen["layout"] = self.script, self.layouts[0]
        self.rows = [Row(self.layouts[0].text, seen["verdict"])]
        report(self.rows[0])

    monkeypatch.setattr(Certificate, "run", made)
    monkeypatch.setattr(
        "accelerate.launchers.local.LocalLauncher.run", lambda self: seen.setdefault("started", 0)
    )
    published = {}
    monkeypatch.setattr("accelerate.core.env.publish", published.update)
    words = "--certify 2 --cpu --num_processes 4 --use_fsdp --fsdp_version 2 --parallelism_config_tp_size 2"
    words = [*words.split(), "--mixed_precision", "bf16", "train.py", "--lr", "1"]
    seen["verdict"] = "different"
    assert run(*words, command=launch) == 1
    assert "started" not in seen and not published
    seen["verdict"] = "equal"
    launch.main(words)
    assert "started" in seen
    assert published == {"ACCELERATE_CERTIFICATE": folder / "certificate.yaml"}
    assert seen["layout"].sizes == {"tp": 2, "fsdp": 2}
    script = seen["script"]
    assert script.program == Program("train.py", ("--lr", "1"))
    assert (script.settings.steps, script.cpu) == (2, True)
    assert script.base["mixed_precision"] == "bf16"
    assert script.base["fsdp_config"]["fsdp_version"] == "2"
    capsys.readouterr()
    for option in ("--use_deepspeed", "--num_machines=2 --main_process_ip=localhost"):
        assert run("--certify", "2", "--cpu", *option.split(), "train.py", command=launch) == 2
        assert "certify" in capsys.readouterr().err


def test_an_interrupt_ends_the_runs(folder):
    (folder / "sleep.py").write_text(
        "import os, time\nopen('pid', 'w').write(str(os.getpid()))\ntime.sleep(60)\n"
    )
    command = [
        sys.executable,
        "-m",
        "accelerate.commands.main",
        "certify",
        "--layouts",
        "ddp:2",
        "--cpu",
        "sleep.py",
    ]
    # A shell starts background jobs with SIGINT ignored, which children inherit.
    attend = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=attend)
    while not (folder / "pid").exists():
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 130
    assert "interrupted" in process.stderr.read()
    child = Path("/proc", (folder / "pid").read_text())
    deadline = time.monotonic() + 10
    while child.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not child.exists()


def test_a_revision_of_this_package(folder):
    revision = installation("HEAD", folder)
    assert revision.variables == {"PYTHONPATH": str(folder / "revision")}
    path = folder / "revision" / "accelerate"
    assert (path / "__init__.py").exists() and (path / "core" / "env.py").exists()
