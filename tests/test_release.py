# SPDX-License-Identifier: Apache-2.0
"""What was prepared is freed with its last reference, without the garbage collector."""

import gc
import json
import weakref

import pytest
import torch
from rank_pool import on_ranks
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.utils import (
    DataLoaderConfiguration,
    FullyShardedDataParallelPlugin,
    MasterWeightsKwargs,
    ProjectConfiguration,
)


def train(steps, **arguments):
    """Weak references to all that a short run has made."""
    accelerator = Accelerator(cpu=True, **arguments)
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    loader = DataLoader(TensorDataset(torch.randn(8, 3)), 2)
    prepared = accelerator.prepare(model, optimizer, loader, scheduler)
    net, wrapped, batches, schedule = prepared
    for _ in range(steps):
        for (x,) in batches:
            with accelerator.accumulate(net):
                accelerator.backward(net(x).sum(), num_items=2)
                wrapped.step()
                schedule.step()
                wrapped.zero_grad()
    weight = next(net.parameters())
    made = {
        "optimizer": wrapped,
        "loader": batches,
        "scheduler": schedule,
        "accelerator": accelerator,
    }
    return {
        name: weakref.ref(one) for name, one in {"weight": weight, "model": net, **made}.items()
    }


def left(references):
    return [name for name, reference in references.items() if reference() is not None]


def check(steps, collect=False, **arguments):
    train(0, **arguments)  # torch keeps frames of what first makes an optimizer
    gc.collect()
    gc.disable()
    try:
        references = train(steps, **arguments)
        if collect:
            gc.collect()
        assert left(references) == []
    finally:
        gc.enable()


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("auto", [False, True])
def test_one_process(steps, auto, tmp_path):
    project = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True)
    check(steps, **({"project_config": project, "resume": "auto"} if auto else {}))


# Each observer of a run, and each option that refers to a model.
OPTIONS = {
    "plain": {},
    "recorder": {"telemetry": True},
    "profile": {"variables": {"ACCELERATE_PROFILE": "1:2"}},
    "plan": {"variables": {"ACCELERATE_PLAN_FILE": "plan.json"}},
    "guard": {"non_finite": "skip"},
    "resume": {"resume": "auto"},
    "average": {"average": True},
    "exact": {"exact": True},
    "accumulation": {"gradient_accumulation_steps": 2},
    "precision": {"mixed_precision": "bf16"},
    "master weights": {"mixed_precision": "bf16", "kwargs_handlers": [MasterWeightsKwargs()]},
    "precision policy": {"mixed_precision": "bf16", "precision_policy": {"0": torch.float32}},
    "compiled": {"dynamo_backend": "eager"},
    "transforms": {"transforms": ["activation_offload"]},
    "lazy placement": {"dataloader_config": DataLoaderConfiguration(device_placement="lazy")},
    "hooks": {"hooks": True},
    "custom": {"custom": True},
    "trackers": {"log_with": "local"},
}
# The API has the forward of mixed precision as an attribute of the module, which is then in a cycle.
CYCLES = ("precision", "master weights", "precision policy")


@pytest.mark.parametrize("option", OPTIONS)
def test_free_memory(option, tmp_path, monkeypatch):
    """While the accelerator lives, `free_memory` frees all that it has made."""
    monkeypatch.chdir(tmp_path)
    arguments = dict(OPTIONS[option])
    for name, value in arguments.pop("variables", {}).items():
        monkeypatch.setenv(name, value)
    if option == "plan":
        estimate = {"layout": "single", "memory_bytes": [1, 2], "step_seconds": [1, 2]}
        (tmp_path / "plan.json").write_text(json.dumps(estimate))
    average = arguments.pop("average", False)
    hooks, custom = arguments.pop("hooks", False), arguments.pop("custom", False)
    project = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True)
    accelerator = Accelerator(cpu=True, project_config=project, **arguments)
    if option == "trackers":
        accelerator.init_trackers("run")

    def round_of_training():
        model = torch.nn.Sequential(torch.nn.Linear(3, 3))
        optimizer = torch.optim.AdamW(model.parameters())
        loader = DataLoader(TensorDataset(torch.randn(8, 3)), 2)
        net, wrapped, batches = accelerator.prepare(model, optimizer, loader)
        averaged = accelerator.track_average(net) if average else None
        if hooks:
            accelerator.register_save_state_pre_hook(lambda *_: None)
        for (x,) in batches:
            with accelerator.accumulate(net):
                accelerator.backward(net(x).sum(), num_items=2)
                accelerator.clip_grad_norm_(net.parameters(), 1.0)
                wrapped.step()
                wrapped.zero_grad()
        if custom:
            accelerator.save_state()
        made = [next(net.parameters()), net, wrapped, batches]
        if averaged is not None:
            with averaged.applied():
                net(x)
            made.append(averaged)
        references = [weakref.ref(made_object) for made_object in made]
        accelerator.free_memory()
        return references, averaged

    round_of_training()  # torch keeps frames of what first makes an optimizer
    gc.collect()
    gc.disable()
    try:
        # An average that the user keeps is empty.
        references, averaged = round_of_training()
        if option in CYCLES:
            gc.collect()
        alive = [reference() for reference in references if reference() is not None]
        assert all(obj is averaged for obj in alive), alive
    finally:
        gc.enable()


@pytest.mark.parametrize("average", [False, True])
def test_rounds_in_one_process(average):
    """Three runs one after the other, as a notebook or a search makes them, leave nothing."""
    references = []
    gc.disable()
    try:
        for _ in range(3):
            accelerator = Accelerator(cpu=True)
            model = accelerator.prepare(torch.nn.Linear(3, 3))
            optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
            if average:
                accelerator.track_average(model)
            accelerator.backward(model(torch.ones(2, 3)).sum())
            optimizer.step()
            references.append(weakref.ref(model))
            model, optimizer = accelerator.free_memory(model, optimizer)
            assert [reference() for reference in references] == [None] * len(references)
    finally:
        gc.enable()


@on_ranks(2)
def test_data_parallel():
    check(1)


@on_ranks(2)
def test_sharded():
    # torch's fully_shard keeps each module and its state in a cycle.
    check(1, collect=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
