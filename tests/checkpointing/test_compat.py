# SPDX-License-Identifier: Apache-2.0
"""The API's own folder format: `data/api_format` was written by accelerate 1.15.0; reading it runs nothing."""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from accelerate.checkpointing import (
    Options,
    PreparedModel,
    PreparedOptimizer,
    RunState,
    load_accelerator_state,
    load_custom_state,
    load_newest,
    load_run,
    save_accelerator_state,
    save_custom_state,
    save_run,
)
from accelerate.checkpointing.compat import load_pickled
from accelerate.core.errors import CheckpointError, ConfigurationError
from accelerate.data_loader import prepare_data_loader

FOLDER = Path(__file__).parent / "data" / "api_format"


def build():
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return (
        model,
        optimizer,
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1)),
    )


class Counted:
    n = 0

    def state_dict(self):
        return {"n": self.n}

    def load_state_dict(self, state):
        self.n = state["n"]


def test_a_folder_of_the_api_goes_on_where_it_stopped(process):
    model, optimizer, scheduler = build()
    counted = Counted()
    run = RunState(
        [PreparedModel(model)], [PreparedOptimizer(optimizer)], [scheduler], custom=[counted]
    )
    report = load_run(run, FOLDER, process=process)
    expected = json.loads((FOLDER / "expected.json").read_text())
    drawn = {
        "python": random.random(),
        "numpy": float(np.random.rand()),
        "torch": torch.rand(()).item(),
    }
    assert drawn == {key: expected[key] for key in drawn}
    assert counted.n == 3 and report.world_size == 0 and report.manifest is None
    model(torch.linspace(-1, 1, 20).reshape(5, 4)).square().mean().backward()
    optimizer.step()
    for parameter, value in zip(model.parameters(), expected["weights"], strict=True):
        torch.testing.assert_close(parameter.data, torch.tensor(value))


def test_the_api_names_of_layout_compat(tmp_path, process):
    model, optimizer, scheduler = build()
    run = RunState(
        [PreparedModel(model)],
        [PreparedOptimizer(optimizer)],
        [scheduler],
        custom=[Counted()],
        progress={"step": 4},
    )
    save_run(run, tmp_path / "c", process=process, options=Options(layout="compat"))
    theirs = {path.name for path in FOLDER.iterdir()} - {"expected.json"}
    assert {path.name for path in (tmp_path / "c").iterdir()} == theirs | {
        "checkpoint_manifest.json"
    }
    for name in theirs - {"model.safetensors"}:
        ours, peers = load_pickled(tmp_path / "c" / name), load_pickled(FOLDER / name)
        assert set(ours) == set(peers), name


def test_functions_that_need_no_accelerator(tmp_path):
    """A run that is saved after three steps continues as one that was not interrupted."""

    def objects():
        torch.manual_seed(0)
        return *build(), DataLoader(range(4), 2, shuffle=True, generator=torch.Generator())

    def train(model, optimizer, scheduler, steps):
        for _ in range(steps):
            model(torch.rand(5, 4)).square().mean().backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        return [parameter.detach().clone() for parameter in model.parameters()]

    first, optimizer, scheduler, loader = objects()
    train(first, optimizer, scheduler, 3)
    saved = save_accelerator_state(
        tmp_path / "new" / "c", [first.state_dict()], [optimizer], [scheduler], [loader], 0, 5
    )
    save_custom_state(Counted(), saved, 1)
    theirs = {path.name for path in FOLDER.iterdir()} - {"expected.json", "custom_checkpoint_0.pkl"}
    assert {path.name for path in saved.iterdir()} == theirs | {"custom_checkpoint_1.pkl"}
    expected = train(first, optimizer, scheduler, 3)
    second, optimizer, scheduler, loader = objects()
    with pytest.raises(CheckpointError, match="the weights of model 1"):
        load_accelerator_state(saved, [second, second], [optimizer], [scheduler], [loader], 0)
    with pytest.raises(ConfigurationError, match=r"process_index is 1, .*rank 0"):
        load_accelerator_state(saved, [second], [optimizer], [scheduler], [loader], 1)
    with pytest.raises(CheckpointError, match="does not exist"):
        load_accelerator_state(tmp_path / "none", [second], [optimizer], [scheduler], [loader], 0)
    assert load_accelerator_state(saved, [second], [optimizer], [scheduler], [loader], 0) == {
        "step": 5
    }
    assert all(map(torch.equal, train(second, optimizer, scheduler, 3), expected))
    counted = Counted()
    counted.n = 7
    load_custom_state(counted, saved, 1)
    assert counted.n == 0
    torch.save({"n": Trap(tmp_path / "owned")}, saved / "custom_checkpoint_1.pkl")
    with pytest.raises(CheckpointError, match="more than plain data"):
        load_custom_state(counted, saved, 1)


class Trap:
    """What a hostile file would do when it is unpickled."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


@pytest.mark.parametrize(
    "name", ["optimizer.bin", "scheduler.bin", "random_states_0.pkl", "custom_checkpoint_0.pkl"]
)
def test_a_crafted_pickle_is_not_run(tmp_path, process, name):
    shutil.copytree(FOLDER, tmp_path / "c")
    torch.save({"x": Trap(tmp_path / "owned")}, tmp_path / "c" / name)
    model, optimizer, scheduler = build()
    before = [parameter.clone() for parameter in model.parameters()]
    run = RunState(
        [PreparedModel(model)], [PreparedOptimizer(optimizer)], [scheduler], custom=[Counted()]
    )
    with pytest.raises(CheckpointError, match=f"{name}.*mkdir.*allow_pickle=True"):
        load_run(run, tmp_path / "c", process=process)
    assert not (tmp_path / "owned").exists()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_trust_is_given_by_the_user_alone(tmp_path):
    torch.save({"x": Trap(tmp_path / "made")}, tmp_path / "f")
    assert (
        load_pickled(tmp_path / "f", allow_pickle=True) == {"x": None}
        and (tmp_path / "made").exists()
    )
    (tmp_path / "g").write_bytes(b"not a pickle at all")
    with pytest.raises(CheckpointError, match=r"cannot be read|plain data"):
        load_pickled(tmp_path / "g")


def test_a_missing_file_is_named_and_a_folder_without_manifest_is_not_picked(tmp_path, process):
    model, optimizer, scheduler = build()
    run = RunState([PreparedModel(model)], [PreparedOptimizer(optimizer)], [scheduler])
    shutil.copytree(FOLDER, tmp_path / "checkpoint_0")
    with pytest.raises(CheckpointError, match="another library wrote it"):
        load_newest(run, tmp_path, process=process)
    (tmp_path / "checkpoint_0" / "scheduler.bin").unlink()
    with pytest.raises(CheckpointError, match=r"has no scheduler\.bin"):
        load_run(run, tmp_path / "checkpoint_0", process=process)


def test_positions_of_other_loaders_are_not_used_and_noted(tmp_path, process):
    loader = prepare_data_loader(
        DataLoader(range(12), 2, shuffle=True), num_processes=1, process_index=0
    )
    model, optimizer, scheduler = build()
    shutil.copytree(FOLDER, tmp_path / "c")
    torch.save({"x": Trap(tmp_path / "owned")}, tmp_path / "c" / "sampler.bin")
    torch.save({"_num_yielded": 5}, tmp_path / "c" / "dl_state_dict.bin")
    run = RunState(
        [PreparedModel(model)],
        [PreparedOptimizer(optimizer)],
        [scheduler],
        [loader],
        custom=[Counted()],
    )
    assert any(
        "skip the 5 batches" in note
        for note in load_run(run, tmp_path / "c", process=process).notes
    )
    (tmp_path / "c" / "dl_state_dict.bin").unlink()
    assert any(
        "sampler.bin was not read" in note
        for note in load_run(run, tmp_path / "c", process=process).notes
    )
    assert not (tmp_path / "owned").exists() and len(list(loader)) == 6


def test_views_are_written_without_the_rest_of_their_storage(tmp_path, process):
    """What two tensors share is written once, as torch.save does."""
    view = torch.arange(4_000_000.0)[7:17]
    state = {"view": view, "again": view, "rows": torch.zeros(3, 4)}
    custom = SimpleNamespace(state_dict=lambda: state)
    save_run(
        RunState(custom=[custom]), tmp_path / "c", process=process, options=Options(layout="compat")
    )
    file = tmp_path / "c" / "custom_checkpoint_0.pkl"
    state = torch.load(file)
    assert file.stat().st_size < 10_000 and torch.equal(state["view"], view)
    assert state["view"].data_ptr() == state["again"].data_ptr() and state["rows"].shape == (3, 4)


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "optimizer.bin")
    with pytest.raises(CheckpointError, match="is a pipe"):
        load_pickled(tmp_path / "optimizer.bin")
