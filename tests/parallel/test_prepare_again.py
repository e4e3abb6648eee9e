# SPDX-License-Identifier: Apache-2.0
"""A model that is prepared again, with other trainable parameters: their gradients are averaged too."""

from __future__ import annotations

import pytest
import torch
from rank_pool import on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from accelerate import Accelerator
from accelerate.config.fsdp import FullyShardedDataParallelPlugin
from accelerate.core.errors import PrepareError


def add_layer(model):
    model.add_module("adapter", nn.Linear(2, 2, dtype=torch.float64))


def replace_layer(model):
    model[0] = nn.Linear(2, 2, dtype=torch.float64)


def train_what_was_frozen(model):
    model.requires_grad_(True)


@on_ranks(2)
@pytest.mark.parametrize("wrapper", [False, True])
@pytest.mark.parametrize("change", [add_layer, replace_layer, train_what_was_frozen])
def test_gradients_of_other_parameters_are_averaged(change, wrapper):
    run = Accelerator(cpu=True)
    model = nn.Sequential(nn.Linear(2, 2, dtype=torch.float64))
    model.requires_grad_(change is not train_what_was_frozen)
    former = run.prepare(model)
    assert run.prepare(model) is run.prepare(former) is former
    change(model)
    prepared = run.prepare(former if wrapper else model)
    assert isinstance(prepared, DistributedDataParallel) and prepared is not former
    assert run.prepare(model) is prepared and run._models == [prepared]
    inputs = torch.randn(2, 3, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    run.backward(prepared(inputs[run.process_index]).square().mean())
    found = [parameter.grad for parameter in model.parameters()]
    expected = torch.autograd.grad(
        sum(model(rows).square().mean() for rows in inputs) / 2, list(model.parameters())
    )
    torch.testing.assert_close(found, list(expected), rtol=1e-12, atol=1e-12)


@on_ranks(2)
@pytest.mark.parametrize("change", [add_layer, replace_layer])
@pytest.mark.parametrize(
    "options",
    [
        {"fsdp_version": 2},
        {"fsdp_version": 1, "use_orig_params": True},
        {"fsdp_version": 1, "use_orig_params": False},
    ],
    ids=["fsdp2", "fsdp1", "fsdp1 flat"],
)
def test_fsdp_refuses_what_it_would_not_shard(options, change):
    run = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(**options))
    raw = nn.Sequential(nn.Linear(2, 2, dtype=torch.float64))
    model = run.prepare(raw)
    assert run.prepare(model) is run.prepare(raw) is model
    run.backward(model(torch.ones(3, 2, dtype=torch.float64)).sum())
    assert run.prepare(model) is model
    change(raw)
    name = "adapter" if change is add_layer else "0"
    for again in (raw, model):
        with pytest.raises(ValueError, match=rf"^{name}\.weight was added or replaced"):
            run.prepare(again)


@on_ranks(2)
@pytest.mark.parametrize("version", [0, 1, 2])
def test_optimizers_do_not_step_on_parameters_that_the_layout_does_not_train(version):
    plugin = (
        FullyShardedDataParallelPlugin(fsdp_version=version, use_orig_params=True)
        if version
        else None
    )
    run = Accelerator(cpu=True, fsdp_plugin=plugin)
    raw = nn.Sequential(nn.Linear(2, 2, dtype=torch.float64))
    model, optimizer = run.prepare(raw, torch.optim.SGD(raw.parameters(), 0.1))
    inner = run.unwrap_model(model)

    def step():
        run.backward(model(torch.ones(3, 2, dtype=torch.float64)).square().mean())
        optimizer.step()
        optimizer.zero_grad()

    step()
    # Parameters of no prepared model, and of one that is prepared later.
    other = nn.Linear(2, 2, dtype=torch.float64)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2)), *other.parameters()]})
    step()
    add_layer(inner)
    step()
    before = inner[0].weight.detach().clone()
    optimizer.add_param_group({"params": list(inner.adapter.parameters())})
    with pytest.raises(ValueError, match=r"^adapter\.weight was added"):
        step()
    assert torch.equal(inner[0].weight, before)
    if version == 0:
        model, optimizer = run.prepare(model, optimizer)
        step()


@on_ranks(2)
@pytest.mark.parametrize("prepared", [False, True])
def test_a_step_before_ddp_has_averaged_the_gradients_is_refused(prepared):
    run = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2, dtype=torch.float64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, wrapped = run.prepare(model, optimizer) if prepared else (run.prepare(model), optimizer)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: wrapped.step())
    with pytest.raises(PrepareError, match="stepped inside the backward"):
        run.backward(model(torch.ones(1, 2, dtype=torch.float64)).sum())
