# SPDX-License-Identifier: Apache-2.0
"""What was prepared is freed with its last reference, without the garbage collector."""

import gc
import weakref

import pytest
import torch
from rank_pool import on_ranks
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin, ProjectConfiguration


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


@on_ranks(2)
def test_data_parallel():
    check(1)


@on_ranks(2)
def test_sharded():
    # torch's fully_shard keeps each module and its state in a cycle.
    check(1, collect=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
