# SPDX-License-Identifier: Apache-2.0
"""Trackers and the profiler as a training script uses them: through the Accelerator."""

import json

import pytest
import torch

from accelerate import Accelerator
from accelerate.tracking import GeneralTracker
from accelerate.utils import ProfileKwargs, ProjectConfiguration

accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")


class Recorder(GeneralTracker):
    name = "recorder"
    requires_logging_directory = False

    def __init__(self):
        super().__init__()
        self.calls = []

    @property
    def tracker(self):
        return self.calls

    def store_init_configuration(self, values):
        self.calls.append(("config", values))

    def log(self, values, step=None, **kwargs):
        self.calls.append(("log", values, step, kwargs))

    def finish(self):
        self.calls.append(("finish",))


def test_a_run_logs_to_each_tracker_and_closes_them(tmp_path):
    mine = Recorder()
    project = ProjectConfiguration(project_dir=str(tmp_path), logging_dir=str(tmp_path / "logs"))
    accelerator = Accelerator(cpu=True, log_with=["tensorboard", mine], project_config=project)
    accelerator.init_trackers("run", {"lr": 0.5}, {"tensorboard": {"filename_suffix": ".x"}})
    accelerator.log({"loss": torch.tensor(2.0)}, step=3, log_kwargs={"recorder": {"extra": 1}})
    assert accelerator.get_tracker("recorder") is mine
    assert accelerator.get_tracker("recorder", unwrap=True) is mine.calls
    assert accelerator.get_tracker("tensorboard", unwrap=True).get_logdir() == str(
        tmp_path / "logs" / "run"
    )
    with pytest.raises(ValueError, match="nope"):
        accelerator.get_tracker("nope")
    accelerator.end_training()
    assert mine.calls == [
        ("config", {"lr": 0.5}),
        ("log", {"loss": torch.tensor(2.0)}, 3, {"extra": 1}),
        ("finish",),
    ]
    events = accumulator.EventAccumulator(str(tmp_path / "logs" / "run"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(3, 2.0)]


def test_a_tracker_that_needs_a_folder_is_refused_at_once():
    with pytest.raises(ValueError, match="needs a folder"):
        Accelerator(cpu=True, log_with="tensorboard")


def test_profile_takes_its_options_from_the_handlers_or_the_call(tmp_path):
    options = ProfileKwargs(activities=["cpu"], output_trace_dir=str(tmp_path / "first"))
    accelerator = Accelerator(cpu=True, kwargs_handlers=[options])
    with accelerator.profile():
        torch.ones(4, 4) @ torch.ones(4, 4)
    with accelerator.profile(
        ProfileKwargs(activities=["cpu"], output_trace_dir=str(tmp_path / "second"))
    ):
        torch.ones(4, 4).sum()
    for folder, operator in (("first", "aten::matmul"), ("second", "aten::sum")):
        (path,) = (tmp_path / folder).iterdir()
        assert path.name == "profile_0.json"
        assert operator in {event["name"] for event in json.loads(path.read_text())["traceEvents"]}
