# SPDX-License-Identifier: Apache-2.0
"""What is recorded of a run: each step with its values, events, after kills, restarts, and on a full disk."""

from __future__ import annotations

import io
import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from ranks import run_ranks
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.flop_counter import FlopCounterMode

from accelerate import Accelerator
from accelerate.core import devices
from accelerate.core.errors import ConfigurationError
from accelerate.monitor.run import open_runs
from accelerate.monitor.summary import summarize
from accelerate.runtime import hang_watch
from accelerate.telemetry import display as telemetry_display
from accelerate.telemetry import start, writer
from accelerate.telemetry.records import (
    FLAG_FIRST,
    HEADER_SIZE,
    PHASES,
    STEP,
    events_file,
    read_header,
    steps_file,
)
from accelerate.telemetry.status import TRAINING, read_status, status_file
from accelerate.telemetry.writer import TelemetryWriter, merged
from accelerate.utils import ProjectConfiguration


def read_steps(path):
    """The records of a file of steps; what was not written yet is zeros behind them."""
    _, record = read_header(path)
    records = np.fromfile(path, record, offset=HEADER_SIZE)
    return records[records["steps"] > 0]


def make_data(samples=16):
    torch.manual_seed(0)
    return TensorDataset(torch.randn(samples, 4), torch.randn(samples, 1))


def events(folder, rank=0):
    return [json.loads(line) for line in events_file(Path(folder), rank).read_text().splitlines()]


def train(folder, epochs=2, accumulation=1, **arguments):
    """A run with an evaluation after each epoch. Returns its losses and gradient norms, step by step."""
    accelerator = Accelerator(
        cpu=True, telemetry=folder, gradient_accumulation_steps=accumulation, **arguments
    )
    torch.manual_seed(1)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    prepared = accelerator.prepare(
        model, optimizer, DataLoader(make_data(), 4), DataLoader(make_data(), 8), scheduler
    )
    model, optimizer, loader, evaluated, scheduler = prepared
    losses, norms = [], []
    for _ in range(epochs):
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = torch.nn.functional.mse_loss(model(x), y)
                accelerator.backward(loss, num_items=len(x))
                losses.append(loss.item())
                if accelerator.sync_gradients:
                    norms.append(accelerator.clip_grad_norm_(model.parameters(), 1.0).item())
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        for x, _ in evaluated:
            with torch.no_grad():
                accelerator.gather_for_metrics(model(x))
    return accelerator, losses, norms


@pytest.mark.parametrize("accumulation", [1, 2])
def test_each_step_has_a_record(tmp_path, accumulation):
    begin = time.time()
    accelerator, losses, norms = train(tmp_path, accumulation=accumulation)
    folder = accelerator.save_state(tmp_path / "saved")
    accelerator.end_training()
    rows = read_steps(steps_file(tmp_path, 0))
    steps = 8 // accumulation
    assert list(rows["step"]) == list(range(1, steps + 1)) and set(rows["steps"]) == {1}
    np.testing.assert_allclose(
        rows["loss"], np.reshape(losses, (-1, accumulation)).mean(1), rtol=1e-6
    )
    np.testing.assert_allclose(rows["gradient_norm"], norms, rtol=1e-6)
    np.testing.assert_allclose(rows["learning_rate"], 0.1 * 0.5 ** np.arange(steps), rtol=1e-6)
    assert list(rows["epoch"]) == [0] * (steps // 2) + [1] * (steps // 2)
    assert set(rows["samples"]) == set(rows["tokens"]) == {4.0 * accumulation}
    assert rows["flags"][0] == FLAG_FIRST and not rows["flags"][1:].any()
    phases = sum(rows[name].astype(float) for name in PHASES)
    assert (
        (phases <= rows["seconds"] * 1.001).all()
        and (rows["backward"] > 0).all()
        and (rows["data"] > 0).all()
    )
    assert (
        (np.diff(rows["time"]) > 0).all()
        and begin < rows["time"][0]
        and rows["time"][-1] < time.time()
    )
    assert (rows["host_memory"] > 1e6).all() and np.isnan(rows["device_memory"]).all()
    found = [(event["event"], event.get("step")) for event in events(tmp_path)]
    evaluations = [
        (name, step)
        for step in (steps // 2, steps)
        for name in ("evaluation_begin", "evaluation_end")
    ]
    assert found == [("start", None), *evaluations, ("save", steps), ("end", None)]
    assert events(tmp_path)[-2]["path"] == folder


def test_a_save_and_a_collective_in_a_step(tmp_path):
    accelerator = Accelerator(cpu=True, telemetry=tmp_path)
    model = torch.nn.Linear(4, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(4):
        accelerator.backward(model(torch.ones(2, 4)).sum(), num_items=2)
        if step == 1:
            accelerator.save_state(tmp_path / "saved")
        if step == 2:
            accelerator.gather(torch.ones(2))
        optimizer.step()
        optimizer.zero_grad()
    accelerator.load_state(tmp_path / "saved")
    accelerator.backward(model(torch.ones(2, 4)).sum())
    optimizer.step()
    accelerator.end_training()
    rows = read_steps(steps_file(tmp_path, 0))
    assert list(rows["step"]) == [1, 2, 3, 4, 2] and list(rows["tokens"][:4]) == [2, 2, 2, 2]
    (saved,) = [event["seconds"] for event in events(tmp_path) if event["event"] == "save"]
    assert rows["checkpoint"][1] == pytest.approx(saved, rel=1e-3) and rows["checkpoint"][2] == 0
    assert rows["communication"][1] == 0 < rows["communication"][2]
    phases = sum(rows[name].astype(float) for name in PHASES)
    assert (phases <= rows["seconds"] * 1.001).all()


def varied(samples):
    """Batches of 1 to 5 samples, in turn."""
    starts = np.cumsum([0] + [1 + step % 5 for step in range(samples)])
    return [
        list(range(low, min(high, samples)))
        for low, high in itertools.pairwise(starts)
        if low < samples
    ]


def inputs(one, other):
    """The inputs of the batches of `one`, which are read beside those of `other`, if there is one."""
    yield from (
        (x for x, _ in one) if other is None else (x for (x, _), _ in zip(one, other, strict=True))
    )


@pytest.mark.parametrize(
    ("arguments", "second", "accumulation", "steps_a_batch", "stop"),
    [
        ({"batch_size": 4}, False, 1, 1, None),
        ({"batch_size": 4}, False, 3, 1, None),
        ({"batch_size": 4}, False, 1, 1, 17),
        ({"batch_size": 4}, False, 1, 3, None),
        ({"batch_size": 4}, True, 1, 1, None),
        ({"batch_sampler": varied(101)}, False, 1, 1, None),
        ({"batch_size": None}, False, 1, 1, None),
        ({"batch_size": 4, "num_workers": 1}, False, 1, 1, None),
    ],
    ids=["plain", "accumulation", "break", "steps", "two", "varied", "unbatched", "worker"],
)
def test_all_samples_are_counted(arguments, second, accumulation, steps_a_batch, stop, tmp_path):
    accelerator = Accelerator(
        cpu=True, telemetry=tmp_path, gradient_accumulation_steps=accumulation
    )
    data = make_data(101)
    if arguments.get("batch_size", 0) is None:
        data = [tuple(tensor[batch] for tensor in data.tensors) for batch in varied(101)]
    model = torch.nn.Linear(4, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loader, other = (accelerator.prepare(DataLoader(data, **arguments)) for _ in range(2))
    read = made = counted = 0
    for _ in range(2):
        for number, x in enumerate(inputs(loader, other if second else None)):
            read += len(x) * (1 + second)
            with accelerator.accumulate(model):
                for _ in range(steps_a_batch):
                    accelerator.backward(model(x).sum())
                    optimizer.step()
                    optimizer.zero_grad()
                    if accelerator.sync_gradients:
                        made, counted = made + 1, read
            if number == stop:
                break
    accelerator.end_training()
    rows = read_steps(steps_file(tmp_path, 0))
    assert len(rows) == rows["step"][-1] == made
    assert np.nansum(rows["samples"].astype(float)) == counted == read
    # Where a loop makes several steps of a batch, one of them waits for it.
    assert (rows["data"] > 0).sum() >= len(rows) / steps_a_batch


@pytest.mark.parametrize(
    "form",
    [
        lambda x: x,
        lambda x: {"x": x, "ids": [1]},
        lambda x: {"ids": ["a"], "x": x},
        lambda x: {"x": x} if len(x) % 2 else {"y": x},
        lambda x: [torch.nested.nested_tensor(list(x))],
    ],
    ids=["tensor", "mapping", "later", "names", "nested tensors"],
)
def test_samples_of_given_batches(form, tmp_path):
    accelerator = Accelerator(cpu=True, telemetry=tmp_path)
    model = torch.nn.Linear(4, 1)
    sizes = [1 + step % 5 for step in range(20)]
    data = [form(torch.ones(size, 4)) for size in sizes]
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(data, None)
    )
    for _ in loader:
        accelerator.backward(model(torch.ones(1, 4)).sum())
        optimizer.step()
        optimizer.zero_grad()
    accelerator.end_training()
    rows = read_steps(steps_file(tmp_path, 0))
    assert list(rows["samples"]) == sizes


def test_the_declared_work(tmp_path, monkeypatch):
    """The operations of a linear layer, counted by torch, over the time that the loop measures."""
    accelerator = Accelerator(cpu=True, telemetry=tmp_path)
    model = torch.nn.Linear(64, 64, bias=False)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
    x = torch.ones(32, 64, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        accelerator.backward(model(x).sum(), num_items=32)
    assert counter.get_total_flops() == 3 * 2 * 32 * 64 * 64
    optimizer.step()
    accelerator.record_work(flops_per_token=counter.get_total_flops() / 32, peak=1e12)
    for _ in range(20):
        accelerator.backward(model(x).sum(), num_items=32)
        optimizer.step()
    accelerator.end_training()
    (run,) = open_runs([str(tmp_path)])
    run.read_all()
    rows = read_steps(steps_file(tmp_path, 0))
    rate = counter.get_total_flops() / rows["seconds"].astype(float).mean()
    found = summarize(run)
    assert found.flops == pytest.approx(rate, rel=1e-3) and found.utilization == pytest.approx(
        rate / 1e12, rel=1e-3
    )
    with pytest.raises(ConfigurationError, match="either flops_per_token or flops_per_sample"):
        accelerator.record_work()
    with pytest.raises(ConfigurationError, match=r"record_work\(peak=-1\): use a positive number"):
        accelerator.record_work(flops_per_sample=1.0, peak=-1)
    # The peak of a known device, in bf16.
    monkeypatch.setattr(
        devices,
        "module_of",
        lambda device: SimpleNamespace(get_device_name=lambda device: "NVIDIA H200 NVL"),
    )
    assert start.declared_work(None, 2.0, None, torch.device("cpu"))["peak"] == 989e12


def test_nothing_is_recorded_unless_requested(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train(None)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("variable", "arguments", "expected"),
    [
        ("true", {"project_dir": "project"}, "project"),
        ("yes", {"project_config": ProjectConfiguration("project", "logs")}, "logs"),
        ("given", {"project_dir": "project"}, "given"),
        ("1", {}, "runs/script-20260102"),
    ],
)
def test_the_folder(tmp_path, monkeypatch, variable, arguments, expected):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["some/script.py"])
    monkeypatch.setenv("ACCELERATE_TELEMETRY", variable)
    monkeypatch.setenv("ACCELERATE_LAUNCH_TIME", "20260102")
    Accelerator(cpu=True, **arguments).end_training()
    assert [event["event"] for event in events(tmp_path / expected)] == ["start", "end"]
    monkeypatch.setenv("ACCELERATE_TELEMETRY", "off")
    Accelerator(cpu=True, **arguments).end_training()
    assert len(events(tmp_path / expected)) == 2


def on_two_ranks(folder):
    accelerator, _, _ = train(folder)
    ones = accelerator.gather(torch.ones(2))
    accelerator.end_training()
    return len(ones), str(accelerator._recorder.folder)


def default_folder(folder):
    os.chdir(folder)
    sys.argv[0] = f"script{os.environ['RANK']}.py"
    return on_two_ranks(True)[1]


def test_two_ranks(ranks, tmp_path):
    assert [length for length, _ in ranks(2).run(on_two_ranks, str(tmp_path))] == [4, 4]
    for rank in range(2):
        rows = read_steps(steps_file(tmp_path, rank))
        assert list(rows["step"]) == [1, 2, 3, 4] and set(rows["samples"]) == {4.0}
        assert {"start", "evaluation_begin", "end"} <= {
            event["event"] for event in events(tmp_path, rank)
        }


def test_two_ranks_agree_on_the_folder(ranks, tmp_path):
    first, second = ranks(2).run(default_folder, str(tmp_path))
    assert first == second and Path(first).name.startswith("script0-")
    assert steps_file(Path(first), 1).exists()


def test_a_resumed_run_appends(tmp_path):
    project = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True)
    accelerator, _, _ = train(tmp_path, epochs=1, project_config=project)
    accelerator.save_state()
    accelerator.end_training()
    accelerator = Accelerator(cpu=True, telemetry=tmp_path, project_config=project)
    model = torch.nn.Linear(4, 1)
    prepared = accelerator.prepare(
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        DataLoader(make_data(), 4),
        DataLoader(make_data(), 8),
    )
    model, optimizer, loader, _ = prepared
    accelerator._schedulers.append(torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 1, 0.5))
    accelerator.resume()
    for x, y in loader:
        accelerator.backward(torch.nn.functional.mse_loss(model(x), y))
        optimizer.step()
    accelerator.end_training()
    rows = read_steps(steps_file(tmp_path, 0))
    assert list(rows["step"]) == list(range(1, 9)) and list(rows["epoch"]) == [0] * 4 + [1] * 4
    resumed = next(event for event in events(tmp_path) if event["event"] == "resume")
    assert resumed["step"] == 4 and resumed["path"].endswith("checkpoint_0")


KILLED = """
import sys, time
import torch
from accelerate import Accelerator
accelerator = Accelerator(cpu=True, telemetry=sys.argv[1])
model = torch.nn.Linear(4, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
x = torch.ones(2, 4)
while True:
    accelerator.backward(model(x).sum())
    optimizer.step()
    print(time.time(), optimizer.steps_made, flush=True)
"""


@pytest.mark.thorough
def test_a_killed_process_loses_a_moment(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(KILLED)
    launched = time.time()
    process = subprocess.Popen(
        [sys.executable, script, tmp_path], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    steps = {}
    for line in process.stdout:
        when, step = line.split()
        steps[int(step)] = float(when)
        if float(when) - steps[1] > 1.0:
            process.kill()
    process.wait()
    rows = read_steps(steps_file(tmp_path, 0))
    assert list(rows["step"]) == list(range(1, len(rows) + 1))
    last = max(steps)
    # The interval of the writer, and time for its thread to run on a busy machine.
    assert steps[last] - rows["time"][-1] < writer.INTERVAL + 2.0
    # What a kill in the middle of a write leaves is removed by the next process.
    for path in (steps_file(tmp_path, 0), events_file(tmp_path, 0)):
        with open(path, "ab") as file:
            file.write(b'{"time": 1, "ev')
    again = TelemetryWriter(tmp_path, 0, world_size=1)
    again.append([time.time(), 1, 1, 0, 0, *[0.0] * 16])
    again.close()
    assert len(read_steps(steps_file(tmp_path, 0))) == len(rows) + 1
    assert (steps_file(tmp_path, 0).stat().st_size - HEADER_SIZE) % STEP.itemsize == 0
    start, *others = events(tmp_path)
    assert [event["event"] for event in (start, *others)] == ["start", "start", "end"]
    assert start["time"] - start["seconds"] == pytest.approx(launched, abs=0.3)


UNFINISHED = """
import gc, sys
import torch
from accelerate import Accelerator

def train():
    accelerator = Accelerator(cpu=True, telemetry=sys.argv[1])
    model = torch.nn.Linear(4, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(int(sys.argv[2])):
        accelerator.backward(model(torch.ones(2, 4)).sum())
        optimizer.step()
        optimizer.zero_grad()
    return accelerator

kept = train()
if sys.argv[3] == "collected":
    del kept
    gc.collect()
elif sys.argv[3] == "failed":
    raise SystemExit(3)
"""


@pytest.mark.parametrize(
    "end", ["kept", "collected", pytest.param("failed", marks=pytest.mark.thorough)]
)
def test_a_script_that_ends_without_end_training(end, tmp_path):
    (done,) = run_ranks(UNFINISHED, 1, tmp_path, 50, end, check=False)
    assert (done.returncode, "Traceback" in done.stderr) == (3 if end == "failed" else 0, False)
    assert read_steps(steps_file(tmp_path, 0))["steps"].sum() == 50
    assert [event["event"] for event in events(tmp_path)] == ["start", "end"]


def test_a_session_is_older_than_its_run(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    TelemetryWriter(tmp_path, 0, world_size=1).close()
    assert events(tmp_path)[0]["seconds"] == 0


def limited(folder):
    import logging
    import resource

    warnings = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())
    logging.getLogger("accelerate").addHandler(handler)
    writer.INTERVAL = 0.01
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (HEADER_SIZE + 10 * STEP.itemsize + 7, resource.RLIM_INFINITY)
    )
    accelerator, losses, _ = train(folder, epochs=10)
    accelerator.end_training()
    return len(losses), [text for text in warnings if "telemetry" in text]


def test_a_full_disk_stops_the_recording_only(ranks, tmp_path):
    steps, warnings = zip(*ranks(2).run(limited, str(tmp_path)), strict=True)
    # One of the ranks reports it.
    (warning,) = [*warnings[0], *warnings[1]]
    assert steps == (20, 20) and "cannot be written" in warning
    for rank in range(2):
        assert 0 <= len(read_steps(steps_file(tmp_path, rank))) <= 10
        assert (steps_file(tmp_path, rank).stat().st_size - HEADER_SIZE) % STEP.itemsize == 0


def test_a_stand_still_is_an_event(tmp_path):
    recorder = TelemetryWriter.shared(tmp_path, 0, world_size=1, host="", device="cpu", started=0.0)
    for call in hang_watch.on_report:
        call("The run stands still")
    recorder.release()
    assert [event.get("message") for event in events(tmp_path)] == [
        None,
        "The run stands still",
        None,
    ]
    assert recorder._hang not in hang_watch.on_report


def test_a_long_run_stays_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "MOST_RECORDS", 64)
    made = TelemetryWriter(tmp_path, 0, world_size=1)
    path = steps_file(tmp_path, 0)
    for step in range(1, 1001):
        made.append(
            [
                float(step),
                step,
                1,
                0,
                0,
                float(step),
                *[1.0] * 7,
                float(step),
                1.0,
                1.0,
                float(step),
                *[0.1] * 4,
            ]
        )
        if step % 16 == 0:
            made.flush()
            assert len(read_steps(path)) < 64 + 16
    made.close()
    rows = read_steps(path)
    assert (
        rows["steps"].sum() == rows["samples"].sum() == 1000
        and (np.diff(rows["step"].astype(int)) > 0).all()
    )
    assert (rows["steps"][-16:] == 1).all() and rows["steps"][0] > 16 and set(rows["data"]) == {1.0}
    assert (rows["longest"] == rows["step"]).all() and (rows["loss"] == rows["step"]).all()


def test_records_around_a_resume_are_not_merged():
    rows = np.zeros(6, STEP)
    rows["step"], rows["steps"] = [1, 2, 3, 2, 3, 4], 1
    assert list(merged(rows)["step"]) == [2, 3, 2, 4] and list(merged(rows[:5])["step"]) == [
        2,
        3,
        2,
        3,
    ]


def test_the_launcher_sees_the_newest_state(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_STATUS_DIR", str(tmp_path))
    accelerator, _, _ = train(None, epochs=3)
    found = read_status(status_file(tmp_path, 0))
    assert (
        (found.step, found.epoch, found.batch, found.batches) == (12, 2, 4, 4)
        and found.samples == 48.0
        and found.tokens == 48.0
    )
    assert (
        found.state == TRAINING
        and found.loss > 0
        and abs(found.time - time.time()) < 60
        and not found.checkpoint
    )
    folder = accelerator.save_state(tmp_path / "saved")
    found = read_status(status_file(tmp_path, 0))
    assert found.state == TRAINING and found.checkpoint == folder
    # Another object has the file.
    assert Accelerator(cpu=True)._recorder is None


@pytest.mark.parametrize("way", ["load", "skip"])
def test_the_progress_of_a_pass_that_begins_in_the_middle(tmp_path, monkeypatch, way):
    """The launcher, a TrainJob and the bar count what was read before a resume, or is skipped."""
    tqdm = pytest.importorskip("tqdm")
    monkeypatch.setenv("ACCELERATE_STATUS_DIR", str(tmp_path))

    def shown():
        status = read_status(status_file(tmp_path, 0))
        return status.epoch, status.batch, status.batches

    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(make_data(32), 4))

    def step(x):
        accelerator.backward(model(x).sum())
        optimizer.step()

    for number, (x, _) in enumerate(loader):
        step(x)
        if number == 4:
            break
    folder = accelerator.save_state(tmp_path / "saved")
    rest = loader
    if way == "load":
        accelerator.load_state(folder)
    else:
        rest = accelerator.skip_first_batches(loader, 5)
    bar = telemetry_display.tqdm(rest, file=io.StringIO())
    assert isinstance(bar, tqdm.tqdm) and (bar.initial, bar.total) == (5, 8)
    numbers = []
    for x, _ in bar:
        step(x)
        numbers.append(shown())
    assert numbers == [(0, 6, 8), (0, 7, 8), (0, 8, 8)] and bar.n == 8
    # The next pass is a whole one.
    bar = telemetry_display.tqdm(loader, file=io.StringIO())
    assert (bar.initial, bar.total) == (0, 8)
    for x, _ in bar:
        step(x)
        break
    assert shown() == (1, 1, 8)
