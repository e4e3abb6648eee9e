# SPDX-License-Identifier: Apache-2.0
"""A project in a bucket: checkpoints are there, and everything else is local."""

import os

import pytest
import torch
from s3_server import SECRET, S3Server

import accelerate
from accelerate import Accelerator
from accelerate.core import buckets
from accelerate.core.errors import BucketAccessError, ConfigurationError
from accelerate.inference import map_dataset
from accelerate.utils import (
    FullyShardedDataParallelPlugin,
    ProfileKwargs,
    ProjectConfiguration,
    merge_fsdp_weights,
    save_fsdp_model,
)


@pytest.mark.parametrize(
    "project, folder",
    [
        ("s3://bucket/runs/gpt", "runs/gpt"),
        ("gs://bucket/run/", "run"),
        ("az://container", "container"),
        ("memory://name/run", "run"),
        ("runs/s3", "runs/s3"),
        (None, None),
    ],
)
def test_the_local_folder_of_a_project(project, folder):
    assert ProjectConfiguration(project).logging_dir == folder
    assert ProjectConfiguration(project, logging_dir="logs").logging_dir == "logs"


def test_values_and_telemetry_are_written_locally(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    accelerator = Accelerator(cpu=True, project_dir="memory://local/runs/a", telemetry=True)
    accelerator.init_trackers("values")
    accelerator.log({"loss": 1.0}, step=0)
    accelerator.end_training()
    assert (tmp_path / "runs/a/values/values.jsonl").exists()
    assert any((tmp_path / "runs/a").rglob("*.jsonl"))
    assert sorted(os.listdir(tmp_path)) == ["runs"]


BUCKET = "memory://name/run"
PLACES = {
    "save_model": lambda accelerator, model: accelerator.save_model(model, BUCKET),
    "save": lambda accelerator, model: accelerator.save({"a": torch.ones(1)}, f"{BUCKET}/a.bin"),
    "export": lambda accelerator, model: accelerate.export(model, BUCKET),
    "telemetry": lambda accelerator, model: Accelerator(cpu=True, telemetry=BUCKET),
    "logging_dir": lambda accelerator, model: Accelerator(
        cpu=True, log_with="local", project_config=ProjectConfiguration("run", logging_dir=BUCKET)
    ).init_trackers("values"),
    "offload folder": lambda accelerator, model: accelerate.disk_offload(model, BUCKET),
    "checkpoint_dir": lambda accelerator, model: merge_fsdp_weights(BUCKET, "out"),
    "output_dir": lambda accelerator, model: save_fsdp_model(
        FullyShardedDataParallelPlugin(), accelerator, model, BUCKET
    ),
    "map_dataset": lambda accelerator, model: map_dataset(list, [1], BUCKET),
    "output_trace_dir": lambda accelerator, model: ProfileKwargs(output_trace_dir=BUCKET),
}


@pytest.mark.parametrize("place", PLACES)
def test_what_is_no_checkpoint_is_not_written_to_a_bucket(place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(2, 2))
    with pytest.raises(ConfigurationError, match=f"{place}.*{BUCKET}.*local"):
        PLACES[place](accelerator, model)
    assert os.listdir(tmp_path) == []


def project(**options):
    return ProjectConfiguration("s3://bucket/run", automatic_checkpoint_naming=True, **options)


def prepare_a_run():
    accelerator = Accelerator(cpu=True, project_config=project())
    model = torch.nn.Linear(2, 2)
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize(
    "faults, told",
    [
        (lambda request: "403" if request.act == "put" else None, "AccessDenied"),
        (lambda request: "403" if request.act == "list" else None, "AccessDenied"),
        (lambda request: "403" if request.act == "delete_many" else None, "AccessDenied"),
        (lambda request: "skew", "clock"),
        (lambda request: "key", "credentials"),
    ],
)
def test_a_run_that_could_not_save_ends_at_its_start(faults, told):
    with S3Server(faults=faults), pytest.raises(BucketAccessError, match=told) as caught:
        prepare_a_run()
    assert "s3://bucket/run" in str(caught.value) and SECRET not in str(caught.value)


def test_a_bucket_that_does_not_exist_and_a_library_that_is_missing(monkeypatch):
    with S3Server(buckets=[]), pytest.raises(BucketAccessError, match="NoSuchBucket"):
        prepare_a_run()
    monkeypatch.setattr(buckets, "is_available", lambda name: name != "obstore")
    with pytest.raises(ConfigurationError, match=r"accelerate\[buckets\]"):
        prepare_a_run()


def test_a_run_that_only_reads_needs_no_right_to_write():
    with S3Server(faults=lambda request: "403" if request.act == "put" else None) as server:
        Accelerator(cpu=True, project_dir="s3://bucket/run")
        assert server.requests == []


def test_the_launcher_names_the_project(tmp_path, monkeypatch):
    """`accelerate launch --resume` sets the variable."""
    accelerator = Accelerator(cpu=True)
    monkeypatch.setenv("ACCELERATE_RESUME", str(tmp_path / "run"))
    model = torch.nn.Linear(2, 2)
    states = []
    for value in (1.0, 2.0):
        accelerator = Accelerator(
            cpu=True,
            project_config=ProjectConfiguration("elsewhere", automatic_checkpoint_naming=True),
        )
        model = accelerator.prepare(torch.nn.Linear(2, 2))
        loader = accelerator.prepare(torch.utils.data.DataLoader(torch.ones(2, 2)))
        next(iter(loader))
        states.append(model.weight.detach().clone())
        with torch.no_grad():
            model.weight.fill_(value)
        accelerator.save_state()
        accelerator.end_training()
    assert torch.equal(states[1], torch.ones(2, 2))
    assert sorted(os.listdir(tmp_path / "run/checkpoints")) == ["checkpoint_0", "checkpoint_1"]
