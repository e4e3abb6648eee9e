# SPDX-License-Identifier: Apache-2.0
"""State that differs between the ranks of a run: each rank's own comes back on as many processes."""

from __future__ import annotations

import pytest
import torch
from rank_pool import on_ranks

from accelerate import Accelerator
from accelerate.checkpointing.layout import read_manifest
from accelerate.core.errors import CheckpointError


class Own:
    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def prepared():
    """A run with registered objects: one that is alike on all ranks, and three that differ."""
    accelerator = Accelerator(cpu=True)
    rank = accelerator.process_index
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    accelerator.prepare(model, optimizer)
    objects = Own("same"), Own(rank * 10), Own(torch.full((300,), float(rank)))
    accelerator.register_for_checkpointing(*objects, scheduler)
    return accelerator, *objects, scheduler


def save(root):
    accelerator, _, own, _, scheduler = prepared()
    scheduler.step(1.0), scheduler.step(2.0 if accelerator.process_index == 1 else 0.5)
    for name, blocking in (("later", False), ("now", True)):
        accelerator.save_state(root / name, blocking=blocking)
    accelerator.wait_for_everyone()
    files = {
        name
        for name in read_manifest(root / "now").files
        if name.startswith("session") and name[-4:] == "json"
    }
    assert files == {"session.json", "session_rank_1.json"}
    assert "same" not in (root / "now" / "session_rank_1.json").read_text()
    own.value = accelerator.process_index
    accelerator.save_state(root / "compat", layout="compat")
    accelerator.end_training()


def load(root):
    accelerator, same, own, large, scheduler = prepared()
    rank = accelerator.process_index
    for name in ("now", "later"):
        same.value = own.value = large.value = None
        scheduler.best = -1.0
        accelerator.load_state(root / name)
        assert same.value == "same" and own.value == rank * 10, own.value
        assert torch.equal(large.value, torch.full((300,), float(rank)))
        assert scheduler.best == (1.0 if rank == 1 else 0.5), scheduler.best


def load_alone(root):
    accelerator, _, own, large, _ = prepared()
    accelerator.load_state(root / "now")
    assert own.value == 0 and torch.equal(large.value, torch.zeros(300))


def test_registered_objects_that_differ_come_back_on_each_rank(ranks, tmp_path):
    two, one = ranks(2), ranks(1)
    two.run(save, tmp_path)
    assert "a state for each rank" in str(two.outputs)
    two.run(load, tmp_path)
    one.run(load_alone, tmp_path)
    message = one.outputs[0].stderr
    assert "custom[1], custom[2], custom[3] differed" in message and "2 processes" in message


@on_ranks(2)
def test_ranks_with_other_objects_are_refused_when_saving(tmp_path):
    accelerator, *_ = prepared()
    if accelerator.process_index == 1:
        accelerator.register_for_checkpointing(Own(1))
    with pytest.raises(CheckpointError) as caught:
        accelerator.save_state(tmp_path / "uneven")
    assert "rank 0: 4 registered objects" in str(caught.value) and "rank 1: 5" in str(caught.value)
    assert not (tmp_path / "uneven").exists()
