# SPDX-License-Identifier: Apache-2.0
"""What the ranks exchange in a loop, where they have different numbers of batches, against a plain loop."""

import contextlib
import logging
import math
import os
import signal
import time

import pytest
import torch
from rank_pool import on_ranks
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.checkpointing.layout import read_manifest
from accelerate.runtime.step_exchange import StepExchange
from accelerate.state import PartialState
from accelerate.utils import FullyShardedDataParallelPlugin, ProjectConfiguration

SIZE, BATCH, RATE = 15, 1, 0.05  # 8 batches for rank 0, 7 for rank 1
# In whose batch a value is not finite: one that both ranks read, and the last one, which only rank 0 has.
BAD = {"non_finite": (2, 14), "all": (3,)}


def data(bad=()):
    x = torch.linspace(-1, 1, 2 * SIZE, dtype=torch.float64).reshape(SIZE, 2)
    y = x.sum(1, keepdim=True).sin()
    for index in bad:
        y[index] = math.nan
    return x, y


def items_of(x):
    # Not the same on the two ranks.
    return 1 + int(4 * (x[0, 0] + 1))


def make():
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1, dtype=torch.float64)
    return model, torch.optim.SGD(model.parameters(), lr=RATE)


def plain_run(features, epochs):
    """Each step has the batches that the ranks read at the same time. A rank without one counts in the mean."""
    model, optimizer = make()
    x, y = data(BAD.get(features, ()))
    for _ in range(epochs):
        for start in range(0, SIZE, 2):
            rows = range(start, min(start + 2, SIZE))
            losses = [
                torch.nn.functional.mse_loss(model(x[row : row + 1]), y[row : row + 1])
                for row in rows
            ]
            if features in ("items", "all"):
                counts = [items_of(x[row : row + 1]) for row in rows]
                loss = sum(loss * count for loss, count in zip(losses, counts, strict=True)) / sum(
                    counts
                )
            else:
                loss = sum(losses) / 2
            loss.backward()
            if features == "preemption" or bool(torch.isfinite(loss)):
                optimizer.step()
            optimizer.zero_grad()
    return model.state_dict()


@on_ranks(2)
@pytest.mark.parametrize("features", ["preemption", "items", "non_finite", "all"])
def test_ranks_that_run_out_of_batches(features, tmp_path):
    project = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True)
    guard = {"non_finite": "skip"} if features in ("non_finite", "all") else {}
    accelerator = Accelerator(cpu=True, project_config=project, **guard)
    model, optimizer = make()
    loader = DataLoader(TensorDataset(*data(BAD.get(features, ()))), batch_size=BATCH)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if features in ("preemption", "all"):
        assert accelerator.resume() is None
    batches = 0
    for _ in range(3):
        with accelerator.join_uneven_inputs([model], even_batches=False):
            for x, y in loader:
                items = {"num_items": items_of(x)} if features in ("items", "all") else {}
                accelerator.backward(torch.nn.functional.mse_loss(model(x), y), **items)
                optimizer.step()
                optimizer.zero_grad()
                batches += 1
    assert batches == 3 * (8 - accelerator.process_index)
    values = accelerator.unwrap_model(model).state_dict()
    for name, expected in plain_run(features, 3).items():
        torch.testing.assert_close(values[name], expected, rtol=0, atol=1e-12)


@on_ranks(2)
@pytest.mark.parametrize("guard", [{}, {"non_finite": "raise"}])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_among_unequal_numbers_of_batches(guard, rank, tmp_path):
    """A rank that is alone in the loop goes on: the run stops at a step that both ranks make."""
    project = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True)
    accelerator = Accelerator(cpu=True, project_config=project, **guard)
    model, optimizer = make()
    loader = DataLoader(TensorDataset(*data()), batch_size=BATCH)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accelerator.resume()
    steps = 0
    with pytest.raises(SystemExit) as stop:
        for _ in range(3):
            with accelerator.join_uneven_inputs([model], even_batches=False):
                for x, y in loader:
                    if accelerator.process_index == rank and steps == (7 if rank == 0 else 6):
                        os.kill(os.getpid(), signal.SIGUSR1)
                    accelerator.backward(torch.nn.functional.mse_loss(model(x), y))
                    optimizer.step()
                    optimizer.zero_grad()
                    steps += 1
    assert stop.value.code == 128 + signal.SIGUSR1
    assert len(list((tmp_path / "checkpoints").iterdir())) == 1


@on_ranks(2)
def test_a_first_pass_without_steps(tmp_path):
    """Batches that are read in training mode without a step exchange nothing."""
    project = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True)
    accelerator = Accelerator(cpu=True, project_config=project)
    model, optimizer = make()
    rank = accelerator.process_index
    x, y = data()
    loader = DataLoader(TensorDataset(x, y), batch_size=BATCH)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accelerator.resume()
    total = 0.0
    for number, (inputs, _) in enumerate(loader):
        total += float(inputs.sum())
        if rank and number == 6:
            break
    accelerator.gather(torch.tensor([total]))
    for inputs, targets in loader:
        accelerator.backward(torch.nn.functional.mse_loss(model(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.steps_made == 8


@on_ranks(2)
def test_a_rank_without_any_batch_has_the_reference_of_the_others():
    accelerator = Accelerator(cpu=True)
    model, optimizer = make()
    model, optimizer = accelerator.prepare(model, optimizer)
    x, y = data()
    with accelerator.join_uneven_inputs([model]):
        if accelerator.is_main_process:
            loss = torch.nn.functional.mse_loss(model(x[:1]), y[:1])
            accelerator.backward(loss, num_items=3)
            optimizer.step()
            optimizer.zero_grad()
    row = 1 + accelerator.process_index
    loss = torch.nn.functional.mse_loss(model(x[row : row + 1]), y[row : row + 1])
    accelerator.backward(loss, num_items=1)
    optimizer.step()
    plain, stepper = make()
    for rows in ([0], [1, 2]):
        torch.nn.functional.mse_loss(plain(x[rows]), y[rows]).backward()
        stepper.step()
        stepper.zero_grad()
    values = accelerator.unwrap_model(model).state_dict()
    for name, expected in plain.state_dict().items():
        torch.testing.assert_close(values[name], expected, rtol=0, atol=1e-12)


@on_ranks(2)
def test_steps_that_take_long_exchange_each_time():
    exchange = StepExchange(PartialState(cpu=True))
    exchange.is_watching = True
    exchange._last_exchange = -1e6
    exchange.step()
    if PartialState().process_index:
        exchange.received = "SIGTERM"
    exchange.step()
    assert exchange.agreed == "SIGTERM"


def evaluate(accelerator, model, loader, stop, gathers):
    model.eval()
    for batch, (x, _) in enumerate(loader):
        stop(batch)
        with torch.no_grad():
            output = model(x)
        if gathers:
            accelerator.gather_for_metrics(output)
    model.train()


# Who evaluates: all ranks with a gather of each batch, all without one (under DDP, under FSDP2, or where ranks run out
# of batches), or rank 0 alone while rank 1 waits, or while rank 1 goes on to the next step. And who gets the signal.
EVALUATIONS = [
    ("gather", 0, "SIGTERM"),
    ("none", 1, "request"),
    ("sharded", 1, "SIGTERM"),
    ("uneven", 1, "SIGUSR1"),
    ("alone", 1, "SIGUSR1"),
    ("ahead", 0, "SIGTERM"),
]
ALL = ("gather", "none", "sharded", "uneven")


def run_with_evaluation(folder, kind, rank, how):
    """Train three epochs with an evaluation in the second one. Returns the weights, or the exit code and batches."""
    project = ProjectConfiguration(str(folder), automatic_checkpoint_naming=True)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2) if kind == "sharded" else None
    accelerator = Accelerator(cpu=True, project_config=project, fsdp_plugin=plugin)
    index = accelerator.process_index
    model, optimizer = make()
    # Ranks that make other numbers of steps would have other rates.
    gamma = 1.0 if kind == "uneven" else 0.5
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=gamma)
    # Without a batch for each rank in the last step. In such a block each forward of DDP communicates.
    samples, tested = (13, 14) if kind == "uneven" else (SIZE, SIZE)
    train, test = (
        TensorDataset(*(values[:count] for values in data())) for count in (samples, tested)
    )
    train, test = DataLoader(train, batch_size=2, shuffle=True), DataLoader(test, batch_size=1)
    model, optimizer, train, test, scheduler = accelerator.prepare(
        model, optimizer, train, test, scheduler
    )
    start = accelerator.resume()
    batches = 0

    def stop(batch):
        nonlocal batches
        batches += 1
        if how is not None:
            time.sleep(0.08)
        if index == rank and batch == 1:
            if how == "request":
                accelerator.request_stop()
            elif how is not None:
                os.kill(os.getpid(), getattr(signal, how))

    try:
        for epoch in range(start.epoch if start else 0, 3):
            block = contextlib.nullcontext()
            if kind == "uneven":
                block = accelerator.join_uneven_inputs([model], even_batches=False)
            with block:
                for number, (x, y) in enumerate(train):
                    accelerator.backward(torch.nn.functional.mse_loss(model(x), y))
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                    # The rest of the epoch that was cut has a step of rank 0 alone.
                    is_rest = kind == "uneven" and start is not None
                    if number != 1 or epoch != 1 or is_rest:
                        continue
                    if kind in ALL:
                        evaluate(accelerator, model, test, stop, kind == "gather")
                    elif index == 0:
                        evaluate(accelerator, accelerator.unwrap_model(model), test, stop, False)
                    elif kind == "alone":
                        stop(1)
                    if kind == "alone":
                        accelerator.wait_for_everyone()
    except SystemExit as stopped:
        return stopped.code, batches
    values = accelerator.get_state_dict(model)
    return {name: value.tolist() for name, value in values.items()}


@pytest.mark.parametrize(("kind", "rank", "how"), EVALUATIONS)
def test_a_signal_in_an_evaluation(kind, rank, how, ranks, tmp_path):
    """The run stops in it, or after a step that a rank has begun meanwhile, and continues to the same parameters."""
    whole = ranks(2).run(run_with_evaluation, tmp_path / "whole", kind, rank, None)
    stopped = ranks(2).run(run_with_evaluation, tmp_path / "cut", kind, rank, how)
    number = signal.SIGTERM if how == "request" else getattr(signal, how)
    assert [code for code, _ in stopped] == [128 + number] * 2
    [checkpoint] = (tmp_path / "cut" / "checkpoints").iterdir()
    step = read_manifest(checkpoint).progress["step"]
    if kind in ALL:
        assert step == 6 and all(batches < 8 for _, batches in stopped)
    else:
        assert step > 6
    assert ranks(2).run(run_with_evaluation, tmp_path / "cut", kind, rank, None) == whole


@on_ranks(2)
@pytest.mark.parametrize("how", ["SIGTERM", "request"])
def test_a_signal_before_the_first_step(how, tmp_path):
    texts = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())
    logging.getLogger("accelerate").addHandler(handler)
    project = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True)
    accelerator = Accelerator(cpu=True, project_config=project)
    model, optimizer = make()
    loader = DataLoader(TensorDataset(*data()), batch_size=1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accelerator.resume()
    begin = time.monotonic()
    with pytest.raises(SystemExit) as stopped:
        if accelerator.process_index:
            if how == "request":
                accelerator.request_stop()
            else:
                os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(20)
    assert stopped.value.code == 143 and time.monotonic() - begin < 10
    assert not list(tmp_path.rglob("checkpoint_*"))
    if accelerator.is_main_process:
        (text,) = [text for text in texts if "before the first step" in text]
        assert ("SIGTERM" in text) == (how == "SIGTERM")
        assert ("request_stop()" in text) == (how == "request")
