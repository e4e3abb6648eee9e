# SPDX-License-Identifier: Apache-2.0
"""Saving in the background, the gradients of an open window, and the signal that asks for a last save."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
from ranks import run_ranks

from accelerate.checkpointing import (
    PendingGradients,
    PreemptionWatch,
    PreparedModel,
    RunState,
    Writer,
    load_run,
    save_run,
    saving,
    verify,
)
from accelerate.checkpointing import writer as writers
from accelerate.core.errors import CheckpointError, ConfigurationError


@pytest.mark.parametrize("layout", ["native", "compat"])
def test_the_state_is_that_of_the_call_whatever_trains_on(
    tmp_path, small_run, process, same_tensors, monkeypatch, layout
):
    run = small_run(custom={"t": torch.arange(50.0)})
    run.step()
    expected = run.weights()
    steps = iter(range(3))
    original = saving._write

    def slow(pending):
        # The loop goes on before a byte is written.
        for _ in steps:
            run.step()
            run.registered.state["t"].add_(1)
        return original(pending)

    monkeypatch.setattr(saving, "_write", slow)
    writer = Writer()
    save_run(
        run.bundle(),
        tmp_path / "c",
        process=process,
        writer=writer,
        options=saving.Options(layout=layout),
    )
    writer.wait()
    assert next(steps, None) is None and not same_tensors(expected, run.weights())
    other = small_run(seed=3)
    load_run(other.bundle(), tmp_path / "c", process=process)
    assert same_tensors(expected, other.weights()) and torch.equal(
        other.registered.state["t"], torch.arange(50.0)
    )
    assert all(state["step"] == 1 for state in other.optimizer.state.values())


def test_the_host_buffer_is_used_again_and_a_second_save_waits(
    tmp_path, small_run, process, caplog
):
    run = small_run()
    run.step()
    writer = Writer()
    save_run(run.bundle(progress={"step": 1}), tmp_path / "a", process=process, writer=writer)
    place = writer._buffer.data_ptr()
    save_run(run.bundle(progress={"step": 2}), tmp_path / "b", process=process, writer=writer)
    assert not caplog.messages  # the wait was short
    assert verify(tmp_path / "a").progress == {"step": 1}  # it was finished before the second began
    assert writer._buffer.data_ptr() == place
    writer.release()
    assert verify(tmp_path / "b").progress == {"step": 2} and writer._buffer is None


def test_a_message_says_that_a_save_waits_for_a_slow_one(
    tmp_path, small_run, process, monkeypatch, caplog
):
    run = small_run()
    writer = Writer()
    original = saving._write

    def slow(pending):
        time.sleep(0.3)
        return original(pending)

    monkeypatch.setattr(saving, "_write", slow)
    monkeypatch.setattr(writers, "_UNNOTICED", 0.01)
    save_run(run.bundle(), tmp_path / "a", process=process, writer=writer)
    save_run(run.bundle(), tmp_path / "b", process=process, writer=writer)
    writer.wait()
    (message,) = caplog.messages
    assert str(tmp_path / "a") in message


def test_an_error_surfaces_once_at_the_next_call(tmp_path, small_run, process, monkeypatch):
    run = small_run()
    writer = Writer()
    with monkeypatch.context() as patch:
        patch.setattr(
            os, "pwritev", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device"))
        )
        save_run(run.bundle(), tmp_path / "a", process=process, writer=writer)
        writer._job.thread.join()
    with pytest.raises(CheckpointError, match=r"background save of .*No space left"):
        save_run(run.bundle(), tmp_path / "b", process=process, writer=writer)
    save_run(run.bundle(), tmp_path / "b", process=process, writer=writer)
    writer.wait()
    assert [entry.name for entry in tmp_path.iterdir()] == ["b"]
    run.registered.state = object()
    with pytest.raises(CheckpointError, match=r"custom\[0\]"):
        save_run(run.bundle(), tmp_path / "c", process=process, writer=writer)
    writer.wait()


LEAVING = """
import sys, torch
from accelerate.checkpointing import PreparedModel, RunState, Writer, save_run
from accelerate.state import PartialState
model = torch.nn.Linear(1500, 1500)
save_run(RunState(models=[PreparedModel(model)]), sys.argv[1], process=PartialState(cpu=True), writer=Writer())
if sys.argv[2] == "raise":
    raise SystemExit(3)
"""


@pytest.mark.parametrize("end", ["return", "raise"])
def test_an_exit_finishes_what_is_being_written(tmp_path, end):
    (done,) = run_ranks(LEAVING, 1, tmp_path / "c", end, timeout=60, check=False)
    assert done.returncode == (3 if end == "raise" else 0), done.stderr
    assert "model.safetensors" in verify(tmp_path / "c").files and not done.stderr


def test_gradients_of_an_open_window(tmp_path, process):
    model, other = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    model.bias.requires_grad_(False)
    data = torch.ones(4, 3)
    model(data).sum().backward()
    for pending in (True, False):
        part = PendingGradients([model], lambda: pending)  # noqa: B023
        save_run(
            RunState(models=[PreparedModel(model)], rank_state=part),
            tmp_path / "c",
            process=process,
        )
        taken = PendingGradients([other], lambda: True)
        load_run(
            RunState(models=[PreparedModel(other)], rank_state=taken),
            tmp_path / "c",
            process=process,
        )
        if pending:
            assert torch.equal(other.weight.grad, model.weight.grad) and other.bias.grad is None
        else:
            assert other.weight.grad is None


def test_a_signal_asks_for_a_last_save(process):
    before = signal.getsignal(signal.SIGUSR1)
    watch = PreemptionWatch(process, ["SIGUSR1"])
    assert not watch.requested()
    os.kill(os.getpid(), signal.SIGUSR1)
    assert watch.requested() and watch.requested() and watch.received == "SIGUSR1"
    watch.close()
    assert signal.getsignal(signal.SIGUSR1) is before
    with pytest.raises(ConfigurationError, match="SIGNOTHING"):
        PreemptionWatch(process, ["SIGNOTHING"])
