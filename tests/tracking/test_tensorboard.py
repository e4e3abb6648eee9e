# SPDX-License-Identifier: Apache-2.0
"""What the TensorBoard tracker writes, read back with TensorBoard's own reader."""

import dataclasses
import enum
import logging
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from accelerate.core.errors import ConfigurationError
from accelerate.tracking import TensorBoardTracker

accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")


def read(folder):
    found = accumulator.EventAccumulator(str(folder), size_guidance={"images": 0, "tensors": 0})
    found.Reload()
    return found


def started(tmp_path, **kwargs):
    tracker = TensorBoardTracker("run", logging_dir=tmp_path, **kwargs)
    tracker.start()
    return tracker


def test_scalars_of_every_kind_of_number_and_their_steps(tmp_path):
    tracker = started(tmp_path)
    tracker.log({"loss": 1.5, "n": 3, "flag": True}, step=7)
    tracker.log({"loss": torch.tensor(0.25), "n": np.int64(4), "flag": np.float32(0.5)}, step=8)
    tracker.log({"loss": torch.tensor([2.0], requires_grad=True), "n": np.array([5])}, step=9)
    tracker.finish()
    events = read(tmp_path / "run")
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [
        (7, 1.5),
        (8, 0.25),
        (9, 2.0),
    ]
    assert [(event.step, event.value) for event in events.Scalars("n")] == [
        (7, 3.0),
        (8, 4.0),
        (9, 5.0),
    ]
    assert [event.value for event in events.Scalars("flag")] == [1.0, 0.5]


def test_what_was_logged_is_on_disk_before_the_run_is_finished(tmp_path):
    tracker = started(tmp_path)
    tracker.log({"loss": 1.0}, step=1)
    assert [event.value for event in read(tmp_path / "run").Scalars("loss")] == [1.0]
    tracker.finish()


def test_what_it_cannot_take_is_said_once_and_the_rest_is_written(tmp_path, caplog):
    tracker = started(tmp_path)
    with caplog.at_level(logging.WARNING, "accelerate.tracking"):
        for step in range(3):
            tracker.log(
                {
                    "list": [1, 2],
                    "many": torch.ones(3),
                    "loss": 1.0,
                    "none": None,
                    "d": {"x": "text"},
                },
                step,
            )
    tracker.finish()
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 4
    assert all(any(repr(key) in line for line in told) for key in ("list", "many", "none", "d/x"))
    assert [event.value for event in read(tmp_path / "run").Scalars("loss")] == [1.0, 1.0, 1.0]


class Kind(enum.Enum):
    FAST = "fast"


@dataclasses.dataclass
class Part:
    width: int = 8
    path: Path = Path("here")


def test_hyperparameters_of_any_depth_and_type(tmp_path):
    tracker = started(tmp_path)
    config = {
        "lr": 0.1,
        "steps": 3,
        "shuffle": True,
        "name": "digits",
        "scale": torch.tensor(2.0),
        "seed": np.int64(5),
        "nothing": None,
        "betas": [0.9, 0.99],
        "kind": Kind.FAST,
        "optimizer": {"name": "adam", "inner": {"eps": 1e-8}},
        "model": Part(),
    }
    tracker.store_init_configuration(config)
    tracker.log({"loss": 1.0}, step=1)
    tracker.finish()
    flat = {
        "lr": 0.1,
        "steps": 3,
        "shuffle": True,
        "name": "digits",
        "scale": 2.0,
        "seed": 5,
        "nothing": "None",
        "betas": "[0.9, 0.99]",
        "kind": "fast",
        "optimizer/name": "adam",
        "optimizer/inner/eps": 1e-8,
        "model/width": 8,
        "model/path": "here",
    }
    (path,) = (tmp_path / "run").glob("*/hparams.yml")
    assert yaml.safe_load(path.read_text()) == flat
    # one event file: the table of hyperparameters belongs to the run that has the curves
    (events,) = tmp_path.rglob("events.out.*")
    assert events.parent == tmp_path / "run"
    stored = (
        read(tmp_path / "run").SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    )
    from tensorboard.plugins.hparams import plugin_data_pb2

    values = plugin_data_pb2.HParamsPluginData.FromString(stored).session_start_info.hparams
    assert values["lr"].number_value == 0.1
    assert values["shuffle"].number_value == 1.0  # torch writes truth values so
    assert values["optimizer/name"].string_value == "adam"
    assert set(values) == set(flat)


def test_images_come_back_with_their_size(tmp_path):
    tracker = started(tmp_path)
    images = np.zeros((2, 3, 8, 6), dtype=np.uint8)
    tracker.log_images({"batch": images}, step=4)
    tracker.log_images({"last": images.transpose(0, 2, 3, 1)}, step=5, dataformats="NHWC")
    tracker.finish()
    events = read(tmp_path / "run")
    assert [(image.step, image.height, image.width) for image in events.Images("batch")] == [
        (4, 8, 12)
    ]
    assert [(image.step, image.height, image.width) for image in events.Images("last")] == [
        (5, 8, 12)
    ]


def test_only_the_main_process_writes(tmp_path, second_process):
    tracker = TensorBoardTracker("run", logging_dir=tmp_path)
    tracker.start()
    tracker.store_init_configuration({"lr": 1.0})
    tracker.log({"loss": 1.0}, step=1)
    tracker.log_images({"batch": np.zeros((1, 3, 2, 2))})
    tracker.finish()
    assert tracker.tracker is None
    assert list(tmp_path.rglob("*")) == []


def test_wrong_use_is_told(tmp_path):
    tracker = TensorBoardTracker("run", logging_dir=tmp_path)
    with pytest.raises(AttributeError, match="not been started"):
        tracker.log({"loss": 1.0})
    tracker.start()
    with pytest.raises(ConfigurationError, match="needs a dict"):
        tracker.log([1.0])
    tracker.finish()
