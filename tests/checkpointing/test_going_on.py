# SPDX-License-Identifier: Apache-2.0
"""A run that goes on by itself, and stops between the batches that it trains on, whatever its loop looks like."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from states import reset_states
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.checkpointing.layout import read_manifest
from accelerate.core.errors import ConfigurationError
from accelerate.tracking import GeneralTracker
from accelerate.utils import ProjectConfiguration, set_seed


@pytest.fixture(autouse=True)
def fresh_state():
    former = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, former)


class Steps:
    """A user's object, registered after `prepare` as most are."""

    done = 0

    def state_dict(self):
        return {"done": self.done}

    def load_state_dict(self, state):
        self.done = state["done"]


class Run:
    """A small run: `batch` trains on one; at batch number `stop_at` of this process it is told to stop."""

    def __init__(self, folder, stop_at=None, **options):
        reset_states()
        set_seed(3)
        project = ProjectConfiguration(str(folder), automatic_checkpoint_naming=True, total_limit=2)
        self.accelerator = Accelerator(cpu=True, project_config=project, **options)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(2, 4), torch.nn.Dropout(0.2), torch.nn.Linear(4, 1)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        x = torch.randn(20, 2)
        data = TensorDataset(x, x.sum(1, keepdim=True))
        loaders = (
            DataLoader(data, 2, shuffle=True),
            DataLoader(data, 4, shuffle=True),
            DataLoader(data, 5),
        )
        self.model, self.optimizer, *loaders = self.accelerator.prepare(
            self.model, self.optimizer, *loaders
        )
        self.evaluation, self.main, self.second = loaders[2], *loaders[:2]
        self.steps = Steps()
        self.accelerator.register_for_checkpointing(self.steps)
        self.batches, self.stop_at = 0, stop_at

    def batch(self, batch, step=True):
        inputs, targets = batch
        self.accelerator.backward(torch.nn.functional.mse_loss(self.model(inputs), targets))
        if step:
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.steps.done += 1
        self.count()

    def count(self):
        self.batches += 1
        if self.batches == self.stop_at:
            os.kill(os.getpid(), signal.SIGTERM)

    def weights(self):
        return [parameter.detach().clone() for parameter in self.model.parameters()]


def progress(run):
    """The position of a run, as a checkpoint of it has it."""
    return read_manifest(Path(run.accelerator.save_state())).progress


def usual(run):
    report = run.accelerator.resumed
    for _ in range(report.epoch if report else 0, 3):
        for batch in run.main:
            run.batch(batch)


def copies(run):
    """Every epoch is read through a loader without its first batches, as scripts that resume by hand do."""
    while run.steps.done < 30:
        for batch in run.accelerator.skip_first_batches(run.main, run.steps.done % 10):
            run.batch(batch)


def two_loaders(run):
    """Two loaders by turns: which is next, the run's own object tells."""
    assert run.accelerator.resumed is not None or run.steps.done == 0
    while run.steps.done < 30:
        for batch in run.main if run.steps.done % 15 < 10 else run.second:
            run.batch(batch)


LOOPS = {
    "usual": (usual, (4, 10, 17)),
    "copies": (copies, (3, 14, 20)),
    "two loaders": (two_loaders, (4, 10, 12, 27)),
}


@pytest.mark.parametrize("name", LOOPS)
def test_stopped_anywhere_and_started_again_the_run_ends_where_it_would_have(name, tmp_path):
    loop, stops = LOOPS[name]
    whole = Run(tmp_path / "whole", resume="auto")
    loop(whole)
    for stop in stops:
        cut = Run(tmp_path / str(stop), stop_at=stop, resume="auto")
        with pytest.raises(SystemExit) as left:
            loop(cut)
        assert (left.value.code, cut.batches) == (143, stop), (
            "it stops behind the batch that was worked on"
        )
        again = Run(tmp_path / str(stop), resume="auto")
        loop(again)
        assert again.steps.done == whole.steps.done == progress(again)["step"]
        assert again.accelerator.resumed.step == stop
        assert all(map(torch.equal, again.weights(), whole.weights())), (name, stop)


def test_an_evaluation_is_not_cut_in_two(tmp_path):
    run = Run(tmp_path, stop_at=12)
    assert run.accelerator.resume() is None
    seen = []

    def loop():
        for batch in run.main:
            run.batch(batch)
        for _ in run.evaluation:  # without model.eval(): the loader alone tells
            run.count()
            seen.append(run.batches)
        for batch in run.main:
            run.batch(batch)

    with pytest.raises(SystemExit):
        loop()
    assert seen == [11, 12, 13, 14] and run.batches == 15


def test_where_no_step_shows_itself_models_in_training_mode_do(tmp_path):
    run = Run(tmp_path, stop_at=6)
    run.accelerator.resume()
    run.model.eval()
    for _ in run.evaluation:
        run.count()
    run.model.train()

    def loop():
        for batch in run.main:
            run.batch(batch, step=False)

    with pytest.raises(SystemExit):
        loop()
    assert run.batches == 6


def test_what_is_prepared_later_is_stopped_too(tmp_path):
    run = Run(tmp_path, stop_at=2)
    run.accelerator.resume()
    loader = run.accelerator.prepare(
        DataLoader(TensorDataset(torch.ones(8, 2), torch.ones(8, 1)), 2)
    )
    with pytest.raises(SystemExit):
        for batch in loader:
            run.batch(batch)
    assert run.batches == 2


def test_a_save_before_the_first_pass_is_one_of_the_resumed_run(tmp_path):
    first = Run(tmp_path)
    for batch in first.main:
        first.batch(batch)
    first.accelerator.save_state()
    again = Run(tmp_path, resume="auto")
    assert again.accelerator.save_state().endswith("checkpoint_1")
    assert all(map(torch.equal, again.weights(), first.weights()))


def test_a_run_that_names_its_folders_is_stopped_and_resumed_under_a_number(tmp_path):
    for stop in range(2):
        run = Run(tmp_path, stop_at=3)
        run.accelerator.project_configuration.automatic_checkpoint_naming = False
        report = run.accelerator.resume()
        assert (report.step if report else 0) == run.steps.done == 3 * stop
        if report:
            run.accelerator.save_state(tmp_path / "named")
        with pytest.raises(SystemExit):
            for batch in run.main:
                run.batch(batch)
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["checkpoint_0", "checkpoint_2"]


def test_what_cannot_work_is_said_at_once(tmp_path):
    with pytest.raises(ConfigurationError, match="resume='always': use 'auto'"):
        Run(tmp_path, resume="always")
    reset_states()
    with pytest.raises(ConfigurationError, match=r"resume='auto'\) needs a folder"):
        Accelerator(cpu=True, resume="auto")
    reset_states()
    run = Run(tmp_path / "r", resume="auto")
    with pytest.raises(ConfigurationError, match=r"read `accelerator\.resumed` before the loop"):
        run.batch((torch.ones(2, 2), torch.ones(2, 1)))


class Service(GeneralTracker):
    name = "service"
    requires_logging_directory = False
    tracker = None

    def __init__(self, key):
        super().__init__()
        self.run_key = key

    run_key = None


def test_progress_and_tracker_runs_are_in_the_checkpoint(tmp_path):
    run = Run(tmp_path, log_with=Service("run 7"))
    run.accelerator.init_trackers("p")
    for _ in range(2):
        for batch in run.second:
            run.batch(batch)
    run.accelerator.save_state()
    again = Run(tmp_path)
    report = again.accelerator.resume(signals=())
    assert (report.step, report.epoch, report.trackers) == (10, 2, {"service": "run 7"})
    assert report.manifest.progress["step"] == 10
    # The epoch is that of the loader that was trained on, not of the one prepared first.
    assert progress(again)["epoch"] == 2
