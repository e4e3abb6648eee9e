# SPDX-License-Identifier: Apache-2.0
"""A load that is refused changes nothing on any rank, whichever object cannot take its state, and training goes on."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from cases import cases
from rank_pool import on_ranks

from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.collectives import gather_object
from accelerate.core.errors import CheckpointError

FSDP = {
    "fsdp2": {"fsdp_version": 2, "state_dict_type": "FULL_STATE_DICT"},
    "fsdp2 sharded": {"fsdp_version": 2, "state_dict_type": "SHARDED_STATE_DICT"},
    "fsdp1": {"fsdp_version": 1, "state_dict_type": "FULL_STATE_DICT", "use_orig_params": True},
    "fsdp1 sharded": {
        "fsdp_version": 1,
        "state_dict_type": "SHARDED_STATE_DICT",
        "use_orig_params": True,
    },
}
# What differs from the run that saved, and a part of the message.
CHANGES = {
    "a different dataset": (
        {"samples": 40},
        r"data loader 0 .*epoch over 24 samples, but this loader has 40",
    ),
    "another sampler": (
        {"batches": True},
        r"data loader 0 .*counts samples of the epoch, but this loader counts batches",
    ),
    "another model": ({"width": 5}, r"model 0.*\[4, 4\].*\[5, 4\]"),
    "more groups": ({"groups": 2}, r"optimizer 0 .*1 parameter groups saved, 2 here"),
    "another scheduler": (
        {"scheduler": "cosine"},
        r"scheduler 0 .*saved by StepLR .* this is CosineAnnealingLR",
    ),
    "a list of schedulers": (
        {"scheduler": "list"},
        r"scheduler 0 .*saved by StepLR .* this is SequentialLR",
    ),
    "an object": ({}, r"registered object 0 \(Registered\).*ValueError: not mine"),
}


class Registered:
    """Refuses a value, after it has taken it."""

    def __init__(self):
        self.value, self.refused = 0, None

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]
        if self.value == self.refused:
            raise ValueError("not mine")


class Batches(list):
    """A batch sampler of another kind than torch's."""

    batch_size, drop_last = 2, False


class Run:
    def __init__(
        self, layout, seed=0, samples=24, width=4, groups=1, scheduler="step", batches=False
    ):
        plugin = FullyShardedDataParallelPlugin(**FSDP[layout]) if layout in FSDP else None
        self.accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.Linear(width, 1))
        parts = [{"params": list(part.parameters())} for part in model]
        optimizer = torch.optim.AdamW(parts if groups == 2 else model.parameters(), lr=0.01)
        schedulers = torch.optim.lr_scheduler
        if scheduler == "list":
            parts = [schedulers.StepLR(optimizer, 1), schedulers.StepLR(optimizer, 1)]
            scheduler = schedulers.SequentialLR(optimizer, parts, [2])
        else:
            scheduler = {"step": schedulers.StepLR, "cosine": schedulers.CosineAnnealingLR}[
                scheduler
            ](optimizer, 1)
        data = torch.rand(samples, 4)
        if batches:
            sampler = Batches([number, number + 1] for number in range(0, samples, 2))
            loader = torch.utils.data.DataLoader(data, batch_sampler=sampler)
        else:
            loader = torch.utils.data.DataLoader(data, batch_size=2, shuffle=True)
        self.objects = self.accelerator.prepare(model, optimizer, scheduler, loader)
        self.registered = Registered()
        self.accelerator.register_for_checkpointing(self.registered)

    def steps(self):
        model, optimizer, scheduler, loader = self.objects
        for batch in loader:
            self.accelerator.backward(model(batch).square().mean())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            self.registered.value += 1
            yield

    def state(self):
        """What a load changes, as plain data of this rank."""
        model, optimizer, scheduler, loader = self.objects
        generators = [random.getstate(), np.random.get_state()[1], torch.get_rng_state()]
        states = [optimizer.optimizer, scheduler, loader, self.registered]
        return plain(
            [dict(model.named_parameters()), generators, *(one.state_dict() for one in states)]
        )


def plain(value):
    if isinstance(value, torch.Tensor):
        return (value.to_local() if hasattr(value, "to_local") else value).tolist()
    if isinstance(value, dict):
        return {name: plain(one) for name, one in value.items()}
    return [plain(one) for one in value] if isinstance(value, (list, tuple, np.ndarray)) else value


def refuse(run, folder, text):
    """Load a folder that does not fit: one message on all ranks, and nothing is changed."""
    before = run.state()
    with pytest.raises(CheckpointError, match=text) as caught:
        run.accelerator.load_state(folder)
    message = str(caught.value)
    assert "Nothing was" in message and set(gather_object([message])) == {message}
    assert run.state() == before


@on_ranks(1)
def test_one_process(tmp_path):
    check("ddp", tmp_path)


@on_ranks(2, timeout=100)
@pytest.mark.parametrize(
    "layout", cases(["ddp", *FSDP], thorough=["fsdp2", "fsdp1", "fsdp1 sharded"])
)
def test_two_processes(layout, tmp_path):
    check(layout, tmp_path)


def check(layout, tmp_path):
    run = Run(layout)
    for _ in zip(range(2), run.steps(), strict=False):
        pass
    run.accelerator.save_state(tmp_path / "c")
    last = run.accelerator.is_last_process
    for name, (changes, text) in CHANGES.items():
        ends = []
        for loads in (False, True) if name == "a different dataset" else (True,):
            run.accelerator.free_memory()
            run = Run(layout, seed=1, **changes)
            steps = run.steps()
            next(steps)
            run.registered.refused = 2 if name == "an object" and last else None
            if loads:
                refuse(run, tmp_path / "c", text)
            ends.append([run.state() for _ in steps])
        assert ends[0] == ends[-1]
    run.registered.refused = None
    assert run.accelerator.load_state(tmp_path / "c").notes == []
    assert run.registered.value == 2


@on_ranks(2)
def test_a_hook_that_fails_on_one_rank(tmp_path):
    run = Run("ddp")
    run.accelerator.save_state(tmp_path / "c")
    run.registered.value = 5

    def hook(models, folder):
        if run.accelerator.is_last_process:
            raise ValueError("no adapter")

    handle = run.accelerator.register_load_state_pre_hook(hook)
    before = run.state()
    with pytest.raises(
        CheckpointError, match=r"rank 1: the hook .* \(ValueError: no adapter\)"
    ) as caught:
        run.accelerator.load_state(tmp_path / "c")
    assert (
        "Changes that load hooks made" in str(caught.value)
        and len(set(gather_object([str(caught.value)]))) == 1
    )
    assert run.state() == before
    handle.remove()
    run.accelerator.load_state(tmp_path / "c")
