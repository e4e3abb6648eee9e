# SPDX-License-Identifier: Apache-2.0
"""What is printed when memory runs out: once a run, by kind, with the allocator's state, and the error unchanged."""

import json
import pickle
import types
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from torch import nn

from accelerate import Accelerator
from accelerate.core import devices
from accelerate.telemetry.records import events_file
from accelerate.utils import find_executable_batch_size

ERROR = "[enforce fail at alloc_cpu.cpp:1] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"


def prepared(**arguments):
    accelerator = Accelerator(cpu=True, **arguments)
    model = nn.Linear(1024, 1024, bias=False)
    model, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters()))
    accelerator.backward(model(torch.ones(2, 1024)).sum())
    optimizer.step()
    return accelerator, model


def failing(model, message):
    """A loss whose backward raises."""

    def fail(gradient):
        raise RuntimeError(message)

    output = model(torch.ones(2, 1024))
    output.register_hook(fail)
    return output.sum()


def test_a_backward_that_runs_out_of_memory(capsys):
    accelerator, model = prepared()
    for _ in range(2):
        with pytest.raises(RuntimeError) as raised:
            accelerator.backward(failing(model, ERROR))
        assert str(raised.value) == ERROR
    printed = capsys.readouterr().err
    assert printed.count("out of memory on rank 0: ") == 1 and "can't allocate memory" in printed
    assert "parameters 4.00 MiB, gradients 4.00 MiB, optimizer state 8.00 MiB" in printed
    assert "accelerate plan" in printed


def test_other_errors_are_not_reported(capsys):
    accelerator, model = prepared()
    with pytest.raises(RuntimeError, match="something else"):
        accelerator.backward(failing(model, "something else"))
    assert capsys.readouterr().err == ""


def test_a_batch_size_that_does_not_fit(capsys):
    accelerator, _ = prepared()

    @find_executable_batch_size(starting_batch_size=64)
    def train(size):
        if size > 32:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return size

    assert train() <= 32 and accelerator.num_processes == 1
    assert capsys.readouterr().err.count("on rank 0: CUDA out of memory") == 1


@pytest.mark.parametrize("works", [True, False])
def test_the_state_of_the_allocator_is_written(works, tmp_path, monkeypatch, capsys):
    accelerator, _ = prepared(telemetry=tmp_path)
    module = types.SimpleNamespace(
        memory_summary=lambda device: f"1 GiB on {device}",
        memory_snapshot=lambda: [1] if works else 1 / 0,
    )
    with monkeypatch.context() as patch:
        patch.setattr(devices, "module_of", lambda device: module)
        devices.report_exhausted(
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        )
    accelerator.end_training()
    printed = capsys.readouterr().err
    lines = events_file(tmp_path, 0).read_text().splitlines()
    first, *files = [event for event in map(json.loads, lines) if event["event"] == "out_of_memory"]
    assert first["message"] == "CUDA out of memory. Tried to allocate 2.00 GiB"
    if not works:
        assert "ZeroDivisionError" in printed and not files
        return
    summary, snapshot = (Path(event["path"]) for event in files)
    assert str(summary) in printed and str(snapshot) in printed
    assert summary.read_text() == "1 GiB on cpu"
    assert pickle.loads(snapshot.read_bytes())["segments"] == [1]


SCRIPT = """
import torch
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
model = accelerator.prepare(torch.nn.Linear(2, 2))
raise MemoryError("no more")
"""


def test_an_error_that_ends_the_process():
    (done,) = run_ranks(SCRIPT, 1, check=False)
    assert done.returncode == 1
    assert "on rank 0: no more" in done.stderr and "MemoryError: no more" in done.stderr
