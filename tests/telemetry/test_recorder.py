# SPDX-License-Identifier: Apache-2.0
"""What is recorded of a run: each step with its values, events, after kills, restarts, and on a full disk."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.flop_counter import FlopCounterMode

from accelerate import Accelerator
from accelerate.core import devices, memory
from accelerate.core.errors import ConfigurationError
from accelerate.monitor.findings import summarize
from accelerate.monitor.report import html, read_all
from accelerate.monitor.run import open_runs
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.runtime import hang_watch
from accelerate.telemetry import recorder as recording
from accelerate.telemetry import start, writer
from accelerate.telemetry.records import FLAG_FIRST, HEADER_SIZE, PHASES, STEP, events_file, read_steps, steps_file
from accelerate.telemetry.status import read_status, status_file
from accelerate.telemetry.writer import TelemetryWriter, merged
from accelerate.utils import ProjectConfiguration


def make_data(samples=16):
    torch.manual_seed(0)
    return TensorDataset(torch.randn(samples, 4), torch.randn(samples, 1))


def events(folder, rank=0):
    return [json.loads(line) for line in events_file(Path(folder), rank).read_text().splitlines()]


def train(folder, epochs=2, accumulation=1, **arguments):
    """A run with an evaluation after each epoch. Returns its losses and gradient norms, step by step."""
    accelerator = Accelerator(cpu=True, telemetry=folder, gradient_accumulation_steps=accumulation, **arguments)
    torch.manual_seed(1)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    prepared = accelerator.prepare(model, optimizer, DataLoader(make_data(), 4), DataLoader(make_data(), 8), scheduler)
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


@pytest.fixture(autouse=True)
def fresh_state():
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.mark.parametrize("accumulation", [1, 2])
def test_each_step_has_a_record(tmp_path, accumulation):
    begin = time.time()
    accelerator, losses, norms = train(tmp_path, accumulation=accumulation)
    folder = accelerator.save_state(tmp_path / "saved")
    accelerator.end_training()
    rows = read_steps(steps_file(tmp_path, 0))
    steps = 8 // accumulation
    assert list(rows["step"]) == list(range(1, steps + 1)) and set(rows["steps"]) == {1}
    np.testing.assert_allclose(rows["loss"], np.reshape(losses, (-1, accumulation)).mean(1), rtol=1e-6)
    np.testing.assert_allclose(rows["gradient_norm"], norms, rtol=1e-6)
    np.testing.assert_allclose(rows["learning_rate"], 0.1 * 0.5 ** np.arange(steps), rtol=1e-6)
    assert list(rows["epoch"]) == [0] * (steps // 2) + [1] * (steps // 2)
    assert set(rows["samples"]) == set(rows["tokens"]) == {4.0 * accumulation}
    assert rows["flags"][0] == FLAG_FIRST and not rows["flags"][1:].any()
    phases = sum(rows[name].astype(float) for name in PHASES)
    assert (phases <= rows["seconds"] * 1.001).all() and (rows["backward"] > 0).all() and (rows["data"] > 0).all()
    assert (np.diff(rows["time"]) > 0).all() and begin < rows["time"][0] and rows["time"][-1] < time.time()
    assert (rows["host_memory"] > 1e6).all() and np.isnan(rows["device_memory"]).all()
    found = [(event["event"], event.get("step")) for event in events(tmp_path)]
    evaluations = [(name, step) for step in (steps // 2, steps) for name in ("evaluation_begin", "evaluation_end")]
    assert found == [("start", None), *evaluations, ("save", steps), ("end", None)]
    assert events(tmp_path)[-2]["path"] == folder


@pytest.fixture
def groups_of_16(monkeypatch):
    monkeypatch.setattr(recording, "_SHARED", 16)
    monkeypatch.setattr(recording, "_SHORT", 1e3)
    monkeypatch.setattr(recording, "Random", lambda seed: SimpleNamespace(random=lambda: 0.5))


def test_short_steps_share_records(tmp_path, monkeypatch, groups_of_16):
    monkeypatch.setattr(recording, "EACH", 20)
    begin = time.perf_counter()
    accelerator, losses, norms = train(tmp_path, epochs=14)
    accelerator.save_state(tmp_path / "saved")
    total = time.perf_counter() - begin
    accelerator.end_training()
    rows = read_steps(steps_file(tmp_path, 0))
    # 20 records of a step, the one that is under way then, two of 16 steps, and the last 3 of 56 steps.
    assert list(rows["steps"]) == [1] * 21 + [16] * 2 + [3]
    assert list(rows["step"]) == list(np.cumsum(rows["steps"]))
    assert list(rows["samples"]) == list(rows["tokens"]) == list(4 * rows["steps"])
    known, at = rows[:-1], rows["step"][:-1] - 1
    np.testing.assert_allclose(known["loss"], np.asarray(losses)[at], rtol=1e-6)
    np.testing.assert_allclose(known["gradient_norm"], np.asarray(norms)[at], rtol=1e-6)
    np.testing.assert_allclose(known["learning_rate"], 0.1 * 0.5 ** at.astype(float), rtol=1e-6)
    assert list(known["epoch"]) == list(at // 4)
    phases = sum(known[name].astype(float) for name in PHASES)
    assert (phases <= known["seconds"] * 1.001).all() and (known["backward"] > 0).all() and (known["data"] > 0).all()
    assert (rows["longest"] >= rows["seconds"] * 0.999).all() and (rows["longest"] <= rows["seconds"] * 16).all()
    # Evaluations and what comes after the last step are in no record.
    assert 0 < (rows["seconds"] * rows["steps"]).sum() < total
    # The rest is written without phases; the save comes after its last step.
    assert all(np.isnan(rows[-1][name]) for name in ("loss", "forward", "backward", "gradient_norm"))
    # An evaluation in the middle of a record is none of its communication.
    assert (rows["communication"] == 0).all()


def test_a_save_between_short_steps(tmp_path, monkeypatch, groups_of_16):
    monkeypatch.setattr(recording, "EACH", 0)
    accelerator = Accelerator(cpu=True, telemetry=tmp_path)
    model = torch.nn.Linear(4, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(33):
        accelerator.backward(model(torch.ones(2, 4)).sum(), num_items=2)
        if step == 8:
            accelerator.save_state(tmp_path / "saved")
        if step == 31:
            accelerator.gather(torch.ones(2))
        optimizer.step()
        optimizer.zero_grad()
    accelerator.end_training()
    rows = read_steps(steps_file(tmp_path, 0))
    assert list(rows["steps"]) == [1, 16, 16] and list(rows["tokens"]) == [2, 32, 32]
    (saved,) = [event["seconds"] for event in events(tmp_path) if event["event"] == "save"]
    assert rows["checkpoint"][1] * 16 == pytest.approx(saved, rel=1e-3) and rows["checkpoint"][2] == 0
    assert rows["longest"][1] > saved and rows["communication"][1] == 0 < rows["communication"][2]
    phases = sum(rows[name].astype(float) for name in PHASES)
    assert (phases <= rows["seconds"] * 1.001).all()


def test_between_records_nothing_is_replaced(tmp_path, monkeypatch, groups_of_16):
    """In most steps that share a record the accelerator and its optimizer are those of a run without records."""
    monkeypatch.setattr(recording, "EACH", 10)
    accelerator = Accelerator(cpu=True, telemetry=tmp_path)
    model = torch.nn.Linear(4, 1)
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(make_data(800), 4)
    )
    plain = []

    def train(stop=None, items=None):
        for step, (x, _) in enumerate(loader):
            accelerator.backward(model(x).sum(), **({} if items is None else {"num_items": items}))
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            plain.append(type(optimizer) is AcceleratedOptimizer)
            replaced = {"backward", "clip_grad_norm_"} & set(vars(accelerator))
            assert replaced == (set() if plain[-1] else {"backward", "clip_grad_norm_"}) or items is not None
            assert "backward" in replaced or items is None
            if step == stop:
                break

    for _ in range(2):
        train()
    assert 0.8 < sum(plain) / len(plain) < 0.9
    train(stop=50)
    assert plain[-1]
    # The end of the pass has undone it.
    assert type(optimizer) is recording.MeteredOptimizer and "backward" in vars(accelerator)
    train(items=3)
    accelerator.end_training()
    rows = read_steps(steps_file(tmp_path, 0))
    assert rows["steps"].sum() == rows["step"][-1] == 651 and rows["steps"].max() == 16
    assert np.nansum(rows["samples"]) == 4 * 651 and np.nansum(rows["tokens"]) == 3 * 200
    split = rows[~np.isnan(rows["optimizer"])]
    assert np.isfinite(split["loss"]).all() and (split["backward"] > 0).all() and len(split) >= len(rows) - 1


class Slowing(torch.utils.data.Dataset):
    """From its element 400 on each takes 50 ms."""

    def __len__(self):
        return 440

    def __getitem__(self, index):
        if index >= 400:
            time.sleep(0.05)
        return torch.ones(2, 4)


def test_steps_that_become_long_are_recorded_one_by_one(tmp_path, monkeypatch):
    monkeypatch.setattr(recording, "EACH", 10)
    accelerator = Accelerator(cpu=True, telemetry=tmp_path)
    model = torch.nn.Linear(4, 1)
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(Slowing(), None)
    )
    for x in loader:
        accelerator.backward(model(x).sum())
        optimizer.step()
        optimizer.zero_grad()
    accelerator.end_training()
    rows = read_steps(steps_file(tmp_path, 0))
    assert rows["steps"].sum() == 440 and (rows["steps"] > 1).any()
    # The thread looks every 0.2 seconds, and later on a busy machine.
    alone = rows[(rows["step"] > 400) & (rows["steps"] == 1)]
    assert len(alone) > 20 and (alone["data"] > 0.04).all() and (alone["forward"] < 0.04).all()


def test_what_happens_between_records(tmp_path, monkeypatch, groups_of_16):
    """Copies, methods that a script replaces, evaluations and loaded checkpoints in the middle of a record."""
    monkeypatch.setattr(recording, "EACH", 10)
    accelerator = Accelerator(cpu=True, telemetry=tmp_path)
    model = torch.nn.Linear(4, 1)
    model, optimizer, loader, other = accelerator.prepare(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        DataLoader(make_data(400), 4),
        DataLoader(make_data(8), 4),
    )
    accelerator.save_state(tmp_path / "saved")

    def train_on(x):
        accelerator.backward(model(x).sum())
        optimizer.step()
        optimizer.zero_grad()

    seen = []
    for step, (x, _) in enumerate(loader):
        train_on(x)
        if step == 40:
            assert type(optimizer) is AcceleratedOptimizer
            copied = pickle.loads(pickle.dumps(optimizer))
            assert type(copied) is AcceleratedOptimizer and copied._meter is None
            accelerator.clip_grad_norm_ = lambda *args: seen.append(args)
        if step == 60:
            accelerator.clip_grad_norm_(1)
            for x, _ in other:
                model(x)
    loader.set_epoch(0)
    for step, (x, _) in enumerate(loader):
        train_on(x)
        if step == 40:
            assert type(optimizer) is AcceleratedOptimizer
            accelerator.load_state(tmp_path / "saved")
            break
    accelerator.clip_grad_norm_(2)
    assert seen == [(1,), (2,)]
    train_on(x)
    accelerator.end_training()
    rows = read_steps(steps_file(tmp_path, 0))
    assert rows["steps"][:-1].sum() == rows["step"][-2] == 141 and rows["step"][-1] == rows["steps"][-1] == 1
    assert np.nansum(rows["samples"]) == 4 * 141
    evaluated = [event["step"] for event in events(tmp_path) if event["event"].startswith("evaluation")]
    assert evaluated == [61, 61]


def varied(samples):
    """Batches of 1 to 5 samples, in turn."""
    starts = np.cumsum([0] + [1 + step % 5 for step in range(samples)])
    return [list(range(low, min(high, samples))) for low, high in itertools.pairwise(starts) if low < samples]


def inputs(one, other):
    """The inputs of the batches of `one`, which are read beside those of `other`, if there is one."""
    yield from (x for x, _ in one) if other is None else (x for (x, _), _ in zip(one, other, strict=True))


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
def test_all_samples_are_counted(arguments, second, accumulation, steps_a_batch, stop, tmp_path, monkeypatch):
    """In the records of several steps too, of any length, for all kinds of loaders."""
    monkeypatch.setattr(recording, "EACH", 5)
    monkeypatch.setattr(recording, "_SHORT", 1e3)
    accelerator = Accelerator(cpu=True, telemetry=tmp_path, gradient_accumulation_steps=accumulation)
    data = make_data(101)
    if arguments.get("batch_size", 0) is None:
        data = [tuple(tensor[batch] for tensor in data.tensors) for batch in varied(101)]
    model = torch.nn.Linear(4, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loader, other = (accelerator.prepare(DataLoader(data, **arguments)) for _ in range(2))
    read = made = counted = 0
    for _ in range(12):
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
    assert rows["steps"].sum() == rows["step"][-1] == made and (rows["steps"] > 1).any()
    assert np.nansum(rows["samples"].astype(float)) == counted == read
    split = rows[~np.isnan(rows["forward"])]
    assert (np.diff(rows["time"]) > 0).all() and len(split) >= len(rows) - 1
    # Where a loop makes several steps of a batch, one of them waits for it.
    assert (split["data"] > 0).any() if steps_a_batch > 1 else (split["data"] > 0).all()


@pytest.mark.parametrize(
    "form",
    [
        lambda x: x,
        lambda x: [x],
        lambda x: {"x": x, "ids": [1]},
        lambda x: {"ids": ["a"], "x": x},
        lambda x: {"inputs": {"x": x}, "y": x[:1]},
        lambda x: x if len(x) % 2 else (x,),
        lambda x: {"x": x} if len(x) % 2 else {"y": x},
        lambda x: torch.nested.nested_tensor(list(x)),
        lambda x: [torch.nested.nested_tensor(list(x))],
    ],
    ids=["tensor", "list", "mapping", "later", "nested", "either", "names", "nested tensor", "nested tensors"],
)
def test_samples_of_given_batches(form, tmp_path, monkeypatch):
    monkeypatch.setattr(recording, "EACH", 5)
    monkeypatch.setattr(recording, "_SHORT", 1e3)
    accelerator = Accelerator(cpu=True, telemetry=tmp_path)
    model = torch.nn.Linear(4, 1)
    sizes = [1 + step % 5 for step in range(200)]
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
    assert rows["steps"].max() > 10 and np.nansum(rows["samples"].astype(float)) == sum(sizes)


def test_a_backward_with_its_own_gradient(tmp_path):
    accelerator = Accelerator(cpu=True, telemetry=tmp_path)
    model = torch.nn.Linear(4, 2)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.backward(model(torch.ones(1, 4)), gradient=torch.ones(1, 2))
    optimizer.step()
    accelerator.end_training()
    (row,) = read_steps(steps_file(tmp_path, 0))
    assert np.isnan(row["loss"]) and row["backward"] > 0


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
    read_all(run)
    rows = read_steps(steps_file(tmp_path, 0))
    rate = counter.get_total_flops() / rows["seconds"].astype(float).mean()
    found = summarize(run)
    assert found.flops == pytest.approx(rate, rel=1e-3) and found.utilization == pytest.approx(rate / 1e12, rel=1e-3)
    with pytest.raises(ConfigurationError, match="one of flops_per_token and flops_per_sample"):
        accelerator.record_work()
    with pytest.raises(ConfigurationError, match=r"record_work\(peak=-1\): it is a positive number"):
        accelerator.record_work(flops_per_sample=1.0, peak=-1)
    # The peak of a known device, in bf16.
    monkeypatch.setattr(
        devices, "module_of", lambda device: SimpleNamespace(get_device_name=lambda device: "NVIDIA H200 NVL")
    )
    assert start.declared_work(None, 2.0, None, torch.device("cpu"))["peak"] == 989e12


def test_nothing_is_recorded_unless_requested(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    accelerator, _, _ = train(None)
    assert "backward" not in vars(accelerator) and type(accelerator._optimizers[0]) is AcceleratedOptimizer
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
    assert Accelerator(cpu=True)._meter is None


def on_two_ranks(folder):
    accelerator, _, _ = train(folder)
    ones = accelerator.gather(torch.ones(2))
    accelerator.end_training()
    return len(ones), str(accelerator._meter._writer.folder)


def reduce_late(folder, steps, each):
    """The backward of rank 1 begins late. That of rank 0 is then long enough for its wait to be measured next time."""
    recording.EACH, recording._SHORT, recording._SHARED = each, 1e3, 4
    accelerator = Accelerator(cpu=True, telemetry=folder)
    model = torch.nn.Linear(4, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(steps):
        loss = model(torch.ones(2, 4)).sum()
        if accelerator.process_index and step:
            time.sleep(0.1)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.end_training()


@pytest.mark.parametrize("steps, each", [(4, 1000), (20, 2)], ids=["one by one", "grouped"])
def test_the_wait_for_gradients_is_communication(steps, each, ranks, tmp_path):
    ranks(2).run(reduce_late, str(tmp_path), steps, each)
    rows = [read_steps(steps_file(tmp_path, rank))[2:-1] for rank in range(2)]
    for first, second in zip(*rows, strict=False):
        assert first["communication"] > 4 * first["backward"] > 0 and second["forward"] > first["forward"]
        assert first["communication"] > 4 * second["communication"]
        assert first["communication"] == pytest.approx(first["seconds"], rel=0.3)
    assert (rows[0]["steps"].max() > 1) == (each < steps)


def default_folder(folder):
    os.chdir(folder)
    sys.argv[0] = f"script{os.environ['RANK']}.py"
    return on_two_ranks(True)[1]


def test_two_ranks(ranks, tmp_path):
    assert [length for length, _ in ranks(2).run(on_two_ranks, str(tmp_path))] == [4, 4]
    for rank in range(2):
        rows = read_steps(steps_file(tmp_path, rank))
        assert list(rows["step"]) == [1, 2, 3, 4] and set(rows["samples"]) == {4.0}
        assert {"start", "evaluation_begin", "end"} <= {event["event"] for event in events(tmp_path, rank)}


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
        model, torch.optim.SGD(model.parameters(), 0.1), DataLoader(make_data(), 4), DataLoader(make_data(), 8)
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
    process = subprocess.Popen([sys.executable, script, tmp_path], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    steps = {}
    for line in process.stdout:
        when, step = line.split()
        steps[int(step)] = float(when)
        if float(when) - steps[1] > 1.0:
            process.kill()
    process.wait()
    rows = read_steps(steps_file(tmp_path, 0))
    assert list(rows["step"]) == list(np.cumsum(rows["steps"])) and set(rows["steps"][:1000]) == {1}
    last = max(steps)
    # The interval of the writer, and time for its thread to run on a busy machine.
    assert steps[last] - rows["time"][-1] < writer.INTERVAL + 2.0
    # What a kill in the middle of a write leaves is removed by the next process.
    for path in (steps_file(tmp_path, 0), events_file(tmp_path, 0)):
        with open(path, "ab") as file:
            file.write(b'{"time": 1, "ev')
    again = TelemetryWriter(tmp_path, 0, world_size=1)
    again.append((time.perf_counter(), 1, 1, 0, 0, *[0.0] * 13, None))
    again.close()
    assert len(read_steps(steps_file(tmp_path, 0))) == len(rows) + 1
    assert (steps_file(tmp_path, 0).stat().st_size - HEADER_SIZE) % STEP.itemsize == 0
    assert [event["event"] for event in events(tmp_path)] == ["start", "start", "end"]


UNFINISHED = """
import gc, sys
import torch
from accelerate import Accelerator
from accelerate.telemetry import recorder

recorder.EACH, recorder._SHORT = 10, 1e3

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


@pytest.mark.parametrize("end", ["kept", "collected", pytest.param("failed", marks=pytest.mark.thorough)])
def test_a_script_that_ends_without_end_training(end, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(UNFINISHED)
    done = subprocess.run([sys.executable, script, tmp_path, "50", end], capture_output=True, text=True, timeout=120)
    assert (done.returncode, "Traceback" in done.stderr) == (3 if end == "failed" else 0, False)
    assert read_steps(steps_file(tmp_path, 0))["steps"].sum() == 50
    assert [event["event"] for event in events(tmp_path)] == ["start", "end"]


def limited(folder):
    import logging
    import resource

    warnings = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())
    logging.getLogger("accelerate").addHandler(handler)
    writer.INTERVAL = 0.01
    resource.setrlimit(resource.RLIMIT_FSIZE, (HEADER_SIZE + 10 * STEP.itemsize + 7, resource.RLIM_INFINITY))
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
    assert [event.get("message") for event in events(tmp_path)] == [None, "The run stands still", None]
    assert recorder._hang not in hang_watch.on_report


def test_a_long_run_stays_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "MOST_RECORDS", 64)
    made = TelemetryWriter(tmp_path, 0, world_size=1)
    path = steps_file(tmp_path, 0)
    for step in range(1, 1001):
        made.append(
            (float(step), step, 1, 0, 0, float(step), *[1.0] * 7, float(step), 1.0, 1.0, float(step), 0.1, None)
        )
        if step % 16 == 0:
            made.flush()
            assert len(read_steps(path)) < 64 + 16
    made.close()
    rows = read_steps(path)
    assert rows["steps"].sum() == rows["samples"].sum() == 1000 and (np.diff(rows["step"].astype(int)) > 0).all()
    assert (rows["steps"][-16:] == 1).all() and rows["steps"][0] > 16 and set(rows["data"]) == {1.0}
    assert (rows["longest"] == rows["step"]).all() and (rows["loss"] == rows["step"]).all()


def test_an_out_of_memory_error_is_an_event(tmp_path):
    accelerator, _, _ = train(tmp_path, epochs=1)
    hooks = len(memory.exhausted_hooks)
    memory.report_exhausted(RuntimeError("DefaultCPUAllocator: can't allocate memory: 8 bytes\nmore"))
    accelerator.end_training()
    (found,) = [event["message"] for event in events(tmp_path) if event["event"] == "out_of_memory"]
    assert found.endswith("8 bytes") and len(memory.exhausted_hooks) == hooks - 1


def test_the_memory_of_the_device_is_kept(tmp_path, monkeypatch):
    snapshot = SimpleNamespace(_snapshot=lambda device: {"segments": [1]})
    module = SimpleNamespace(memory_summary=lambda device: f"1 GiB on {device}", memory=snapshot)
    accelerator, _, _ = train(tmp_path, epochs=1)
    with monkeypatch.context() as patch:
        patch.setattr(devices, "module_of", lambda device: module)
        memory.report_exhausted(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"))
        del module.memory_summary
        module.memory._snapshot = None
        module.memory_stats = lambda device: 1 / 0
        memory.report_exhausted(torch.OutOfMemoryError("CUDA out of memory. Again"))
    accelerator.end_training()
    _, summary, snapshot, _ = (event for event in events(tmp_path) if event["event"] == "out_of_memory")
    assert Path(summary["path"]).read_text() == "1 GiB on cpu"
    with open(snapshot["path"], "rb") as file:
        assert pickle.load(file) == {"segments": [1]}
    (warning,) = [event["message"] for event in events(tmp_path) if event["event"] == "warning"]
    assert "the memory of rank 0 cannot be written: ZeroDivisionError" in warning
    (run,) = open_runs([str(tmp_path)])
    read_all(run)
    assert all(f'<a href="{Path(event["path"]).as_uri()}">' in html(run) for event in (summary, snapshot))


def test_records_around_a_resume_are_not_merged():
    rows = np.zeros(6, STEP)
    rows["step"], rows["steps"] = [1, 2, 3, 2, 3, 4], 1
    assert list(merged(rows)["step"]) == [2, 3, 2, 4] and list(merged(rows[:5])["step"]) == [2, 3, 2, 3]


def test_the_launcher_sees_the_newest_state(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_STATUS_DIR", str(tmp_path))
    accelerator, _, _ = train(None, epochs=3)
    found = read_status(status_file(tmp_path, 0))
    assert (found.step, found.epoch, found.batches) == (12, 2, 2) and found.samples == 48.0 and found.tokens == 48.0
    assert found.state == 2 and found.loss > 0 and abs(found.time - time.time()) < 60 and not found.checkpoint
    folder = accelerator.save_state(tmp_path / "saved")
    found = read_status(status_file(tmp_path, 0))
    assert found.state == 1 and found.checkpoint == folder
    # Another object has the file.
    assert Accelerator(cpu=True)._meter is None


@pytest.mark.parametrize(
    ("words", "expected"),
    [(["--telemetry", "s.py"], "true"), (["--telemetry=here", "s.py"], "here"), (["s.py", "--telemetry", "x"], None)],
)
def test_the_option_takes_no_script_for_its_value(words, expected):
    from accelerate.commands.launch import launch_command_parser

    args = launch_command_parser().parse_args(words)
    assert (args.telemetry, args.training_script) == (expected, "s.py")
    assert args.training_script_args == words[words.index("s.py") + 1 :]


class Doubled(Accelerator):
    """Its methods take less than those of the base class."""

    def backward(self, loss, **kwargs):
        super().backward(2 * loss, **kwargs)

    def clip_grad_norm_(self, parameters, max_norm):
        return super().clip_grad_norm_(parameters, max_norm)


@pytest.mark.parametrize("items", [{}, {"num_items": 2}])
def test_methods_of_a_subclass(items, tmp_path):
    accelerator = Doubled(cpu=True, telemetry=tmp_path)
    model = torch.nn.Linear(2, 1, bias=False)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    before = model.weight.detach().clone()
    accelerator.backward(model(torch.ones(2, 2)).mean(), **items)
    assert accelerator.clip_grad_norm_(model.parameters(), 100.0) == pytest.approx(2 * 2**0.5)
    optimizer.step()
    torch.testing.assert_close(model.weight.detach(), before - 0.2)
