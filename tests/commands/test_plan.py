# SPDX-License-Identifier: Apache-2.0
"""`accelerate plan`: its table and JSON, the files of a run, and what it says of wrong input."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from accelerate.commands import plan
from accelerate.config import launch_file

NET = """
import torch

class Net(torch.nn.Module):
    def __init__(self, branches=False):
        super().__init__()
        self.branches = branches
        self.layers = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)])

    def forward(self, x):
        if self.branches and x.sum().item() > 0:
            x = x + 1
        return self.layers(x)

def make(): return Net()
def branches(): return Net(True)
def broken(): raise RuntimeError("no such thing")
def number(): return 3
def mixture():
    model = Net()
    model.ep_plan = {"layers": "grouped_gemm"}
    return model
"""

# Modules that cannot be imported.
BROKEN = {"lacks": "import no_such_package", "wrong": "def", "ends": "raise SystemExit(3)"}

SCRIPT = f"""
import sys
import torch
sys.path.append({str(Path(__file__).parents[1] / "helpers")!r})
import without_compiler
from accelerate import Accelerator
from plan_net import make

accelerator = Accelerator()
model, optimizer = accelerator.prepare(*(lambda m: (m, torch.optim.AdamW(m.parameters())))(make()))
for _ in range(8):
    accelerator.backward(model(torch.ones(2, 64)).mean())
    optimizer.step()
    optimizer.zero_grad()
accelerator.end_training()
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    (tmp_path / "plan_net.py").write_text(NET)
    for name, line in BROKEN.items():
        (tmp_path / f"{name}.py").write_text(line)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "plan_net", raising=False)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def run(*arguments):
    with pytest.raises(SystemExit) as ended:
        plan.main([str(one) for one in arguments])
    return ended.value.code


def test_a_written_plan_launches_and_calibrates(folder, capsys, monkeypatch):
    """The machine is a stand-in of two CPU ranks, so that only the launch is real."""
    from accelerate.planning import machine

    links = dict.fromkeys(machine._COLLECTIVES, (1e-5, 1e9))
    here = machine.Machine(
        2, 1 << 30, "cpu", flops=1e10, bandwidth=1e10, overhead=1e-5, links=links
    )
    monkeypatch.setattr(machine, "found", lambda ranks: here)
    wanted = ("plan_net:make", "--batch", "4x64:float32", "--ranks", 2, "--layouts", "ddp", "fsdp")
    assert run(*wanted[:-1], "--json", "--write", "plan.yaml") == 0
    found = json.loads(capsys.readouterr().out)
    parameters = 4 * (64 * 64 + 64)
    (ddp,) = (one for one in found["layouts"] if one["layout"] == "ddp")
    assert (
        ddp["fits"]
        and ddp["memory_by_kind"]["weights"] == 4 * parameters
        and ddp["sent_bytes"] == 4 * parameters
    )
    assert {one["layout"] for one in found["layouts"]} == {"ddp"}
    assert launch_file.read("plan.yaml").values["num_processes"].value == 2

    (folder / "train.py").write_text(SCRIPT)
    command = [
        sys.executable,
        "-m",
        "accelerate.commands.main",
        "launch",
        "--config_file",
        "plan.yaml",
        "train.py",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (done.stdout + done.stderr).count("plan ddp: memory") == 1
    measured = json.loads((folder / "plan.plan.json").read_text())["measured"]
    assert measured["memory_of"] == "process" and measured["step_seconds"] > 0

    assert run(*wanted, "--json", "--calibrate", "plan.yaml") == 0
    (ddp,) = (
        one for one in json.loads(capsys.readouterr().out)["layouts"] if one["layout"] == "ddp"
    )
    low, high = ddp["step_seconds"]
    assert (low + high) / 2 == pytest.approx(measured["step_seconds"])
    assert (high - low) / (high + low) == pytest.approx(0.2)


def test_nothing_fits(capsys):
    small = ("--machine", "2x1GB", "--memory", 0.0001, "--layouts", "ddp", "fsdp")
    assert run("plan_net:make", "--batch", "8x64:float32", *small) == 1
    printed = capsys.readouterr()
    assert "does not fit" in printed.out and "in KiB:" in printed.out
    assert max(map(len, printed.out.splitlines())) <= 100
    assert re.search("accelerate: 2 of [0-9]+ layouts: fsdp, .*, step ", printed.err)
    assert re.search("no layout fits in 97.66 KiB.*closest, fsdp.* more", printed.err)


def test_what_was_estimated_before_an_interrupt_is_shown(capsys, monkeypatch):
    from accelerate.planning import estimate
    from accelerate.planning.ledger import KINDS

    def interrupted(training, machine, layouts, processes, on_estimate):
        interval = estimate.Interval(2 << 20, 3 << 20)
        kinds = dict.fromkeys(KINDS, 1 << 19)
        on_estimate(
            estimate.Estimate(layouts[0], interval, kinds, estimate.Interval(1, 2), 0, True),
            len(layouts),
        )
        raise KeyboardInterrupt

    monkeypatch.setattr(estimate, "plan", interrupted)
    assert (
        run(
            "plan_net:make", "--batch", "8x64:float32", "--machine", "2x1GB", "--write", "plan.yaml"
        )
        == 130
    )
    assert (
        re.search(r"ddp +2.00-3.00 +0.50 ", capsys.readouterr().out)
        and not Path("plan.yaml").exists()
    )


WRONG = {
    "plan_net:branches --batch 8x64:float32 --machine 1x1GB": r"Net \(.*py:11\) needs real data",
    "plan_net:broken --batch 8x64 --machine 1x1GB": r"fails on the meta device: RuntimeError: no such thing \(.*:17\)",
    "plan_net:number --batch 8x64 --machine 1x1GB": "must return a torch.nn.Module",
    "plan_net:nothing --batch 8x64 --machine 1x1GB": "does not have a function 'nothing'",
    "no_such_module:make --batch 8x64 --machine 1x1GB": "no_such_module cannot be imported, from /.*No module named",
    "lacks:make --batch 8x64 --machine 1x1GB": r"No module named 'no_such_package' \(/.*/lacks.py:1\)",
    "wrong:make --batch 8x64 --machine 1x1GB": r"module wrong cannot be imported.*SyntaxError.*\(/.*/wrong.py:1\)",
    "ends:make --batch 8x64 --machine 1x1GB": r"module ends cannot be imported.*SystemExit: 3 \(/.*/ends.py:1\)",
    "./plan_net.py:make --batch 8x64 --machine 1x1GB": "module ./plan_net.py cannot be imported",
    "plan_net:make --batch 0x64 --machine 1x1GB": "is not a batch",
    "plan_net:make --batch 7x64:float32 --machine 2x1GB --layouts ddp": "7 samples are not divisible by 2",
    "plan_net:make --batch 8x64 --machine lots": "--machine 'lots' cannot be parsed",
    "plan_net:make --batch 8x64 --machine 8xz900": "the device 'z900' is unknown",
    "plan_net:make --batch 8x64 --machine 8x1GB --layouts fdsp": "did you mean fsdp",
    "plan_net:make --batch 8x64 --machine 8x1GB --calibrate none.json": "--calibrate none.json cannot be read",
    "plan_net:make --batch 8x64 --link 3": "also add --machine",
    "plan_net:make --batch 8x64 --memory -1": "--memory -1.0: use a number above 0",
    "plan_net:make --batch 8x64 --write .": "--write='.' is a folder",
    "plan_net:make --batch 8x64 --machine 1x1GB --optimizer lion": "--optimizer 'lion' is unknown",
    "plan_net:mixture --batch 8x64 --machine 2x1GB --write plan.yaml --layout ep2+fsdp2": (
        r"a configuration file cannot select it.*distributed_config=DistributedConfig\(fsdp_size=2, ep_size=2\)"
    ),
    "./none --batch 8x64 --machine 1x1GB": "./none does not exist",
}


@pytest.mark.parametrize(("line", "message"), WRONG.items())
def test_wrong_input_is_one_error(line, message, capsys):
    assert run(*line.split()) == 2
    error = capsys.readouterr().err
    assert error.count("accelerate: error:") == 1 and re.search(message, error)
