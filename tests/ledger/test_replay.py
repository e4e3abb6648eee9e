# SPDX-License-Identifier: Apache-2.0
"""The replay of a step: bit by bit in the recorded layout, and what is said where it cannot be made."""

import json
import os
import runpy
import sys

import numpy as np
import pytest
import torch
from s3_server import S3Server
from states import reset_states

from accelerate.commands import audit, replay
from accelerate.core.errors import ConfigurationError
from accelerate.ledger import rows
from accelerate.ledger.replay import Replay, find

SCRIPT = """
import sys, torch
from torch import nn
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed

folder, stop, bad = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
set_seed(5)
project = ProjectConfiguration(folder, automatic_checkpoint_naming=True)
accelerator = Accelerator(cpu=True, project_config=project, telemetry=folder)
inputs = torch.randn(40, 4)
if bad:
    inputs[bad] = float("nan")
data = torch.utils.data.TensorDataset(inputs, torch.randn(40, 1))
model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.ReLU(), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
loader = torch.utils.data.DataLoader(data, 4, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
report = accelerator.resume(signals=())
step = report.step if report else 0
for epoch in range(report.epoch if report else 0, 3):
    for x, y in loader:
        accelerator.backward(nn.functional.mse_loss(model(x), y))
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % 3 == 0:
            accelerator.save_state()
        if step == stop:
            break
    if step == stop:
        break
if not stop:
    accelerator.end_training()
else:
    # As after a kill, but for what a write every 0.2 seconds has had time for.
    accelerator._recorder.writer.flush(wait=True)
    accelerator._checkpoints._locks.release()
"""


def train(script, folder, stop=0, bad=0):
    """Run the script in this process until a step, as if it was killed there."""
    reset_states()
    torch.set_num_threads(1)
    sys.argv = [str(script), str(folder), str(stop), str(bad)]
    runpy.run_path(str(script), run_name="__main__")


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", sys.argv)
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def command(module, *words):
    """The exit code of a command."""
    with pytest.raises(SystemExit) as end:
        module.main([str(word) for word in words])
    return end.value.code


def test_a_run_on_other_numbers_of_ranks(ranks, script, tmp_path, capfd):
    """2 ranks, killed; 1 rank, killed; 2 ranks: each sample is trained once, and a replay has equal digests."""
    run = tmp_path / "run"
    ranks(2).run(train, script, run, 4)
    train(script, run, 8)
    ranks(2).run(train, script, run)
    assert command(audit, run, "--allow", "even_batches") == 0
    ledger = rows.read(run)
    assert list(ledger.superseded["step"]) == [4, 7, 8] and ledger.steps["step"][-1] == 17
    assert sorted(ledger.attempts) == [1, 2, 3] and ledger.attempt_of(5)["world_size"] == 1
    capfd.readouterr()
    assert command(replay, run, "--step", 15) == 0
    output = capfd.readouterr().out
    # Steps 13 to 15 on 2 ranks. The save at step 15 has a digest on each.
    assert "positions 16-23" in output and "3 steps, 2 digests" in output


@pytest.mark.thorough
def test_checkpoints_in_a_bucket(script, tmp_path, capfd):
    pytest.importorskip("obstore")
    script.write_text(SCRIPT.replace("(folder, auto", "('s3://bucket/run', auto"))
    run = tmp_path / "run"
    with S3Server():
        train(script, run)
        assert command(replay, run, "--step", 8) == 0
    output = capfd.readouterr()
    assert "2 steps" in output.out
    assert "s3://bucket/run/checkpoints/checkpoint_1" in output.out + output.err


@pytest.mark.thorough
def test_what_a_replay_finds(ranks, script, tmp_path, capfd):
    run = tmp_path / "run"
    ranks(2).run(train, script, run, 0, 31)
    capfd.readouterr()
    assert command(replay, run, "--find", "nan", "--dump", tmp_path / "dump") == 0
    output = capfd.readouterr().out
    assert "output of 0" in output
    step = find(rows.read(run), "nan")
    norms = json.loads((tmp_path / "dump" / "norms.json").read_text())
    assert set(norms) == {"0.weight", "0.bias", "3.weight", "3.bias"} and np.isnan(norms["0.bias"])
    batches = torch.load(tmp_path / "dump" / "rank_00001.pt")["batches"]
    assert [tuple(tensor.shape) for tensor in batches[0]] == [(4, 4), (4, 1)]
    assert command(replay, run, "--step", step, "--from_start") == 0


@pytest.mark.thorough
def test_one_process_in_place_of_two(ranks, script, tmp_path, capfd):
    run = tmp_path / "run"
    ranks(2).run(train, script, run)
    capfd.readouterr()
    assert command(replay, run, "--step", 8, "--single") == 0
    assert "2 steps on one process" in capfd.readouterr().out
    # A batch of another content is a difference.
    script.write_text(
        SCRIPT.replace("torch.randn(40, 1)", "torch.randn(40, 1) + accelerator.process_index")
    )
    assert command(replay, run, "--step", 8, "--single", "--anyway") == 1


@pytest.mark.thorough
def test_the_debugger_stops_in_the_loop(script, tmp_path, capfd):
    run = tmp_path / "run"
    train(script, run)
    capfd.readouterr()
    commands = tmp_path / "commands"
    commands.write_text("p step, epoch\nc\n")
    with commands.open() as file:
        saved = os.dup(0)
        os.dup2(file.fileno(), 0)
        try:
            assert command(replay, run, "--step", 14, "--break") == 0
        finally:
            os.dup2(saved, 0)
    output = capfd.readouterr().out
    assert "(13, 1)" in output and "-> accelerator.backward" in output


def test_what_cannot_be_replayed(script, tmp_path, capfd, monkeypatch):
    run = tmp_path / "run"
    train(script, run, 8)
    ledger = rows.read(run)
    for step, words in ((9, "1 to 8"), (2, "--from_start")):
        assert command(replay, run, "--step", step) == 2
        assert words in capfd.readouterr().err
    assert command(replay, tmp_path / "none", "--step", 1) == command(replay, run) == 2
    with pytest.raises(ConfigurationError, match="not have a nan"):
        find(ledger, "nan")
    attempt = ledger.attempts[1]
    for changes, words in (
        ({"versions": {"torch": "0.1"}}, "torch 0.1"),
        ({"device": "cuda", "world_size": 512}, "--single"),
    ):
        monkeypatch.setitem(ledger.attempts, 1, {**attempt, **changes})
        with pytest.raises(ConfigurationError, match=words):
            Replay(ledger, 8)
    monkeypatch.setitem(ledger.attempts, 1, attempt)
    assert Replay(ledger, 8).first_step == 7 and Replay(ledger, 3, from_start=True).first_step == 1
    (run / "checkpoints" / "checkpoint_1" / "model.safetensors").unlink()
    assert Replay(ledger, 8).first_step == 4
    capfd.readouterr()
    script.write_text(SCRIPT + "\n")
    assert command(replay, run, "--step", 8) == 2 and "--anyway" in capfd.readouterr().err
    script.unlink()
    assert command(replay, run, "--step", 8) == 2 and "no longer exists" in capfd.readouterr().err


def test_a_spike():
    losses = np.ones(40) + 0.01 * np.sin(np.arange(40))
    losses[25] = 2.0
    steps = np.zeros(40, rows.STEP.dtype)
    steps["step"] = np.arange(1, 41)
    steps["loss"] = losses
    steps["gradient_norm"] = np.nan
    ledger = rows.Ledger(None, {}, steps, steps[:0], steps[:0])
    assert find(ledger, "spike") == 26
