# SPDX-License-Identifier: Apache-2.0
"""Parameters frozen and unfrozen after `prepare`, against the plain loop in float64; never silently wrong."""

import pytest
import torch
from layouts import compare_state, sized
from rank_pool import on_ranks
from states import reset_states
from torch import nn

from accelerate import Accelerator
from accelerate.config.fsdp import FullyShardedDataParallelPlugin
from accelerate.config.training import DistributedDataParallelKwargs
from accelerate.core.errors import PrepareError

pytestmark = pytest.mark.usefixtures("float64")
LAYOUTS = {
    "ddp": dict,
    "ddp, unused": lambda: {
        "kwargs_handlers": [DistributedDataParallelKwargs(find_unused_parameters=True)]
    },
    "fsdp2": lambda: {
        "fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=2, min_num_params=10)
    },
    "fsdp1": lambda: {
        "fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=1, use_orig_params=True)
    },
    "tp": lambda: sized({"0": "colwise", "2": "rowwise"}, tp_size=2),
}


def alternate(step, model, optimizer):
    model[0].requires_grad_(step % 2 == 0)
    model[4].requires_grad_(step % 2 == 1)


def unfreeze(step, model, optimizer):
    if step == 2:
        model[2].requires_grad_(True)
        optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 0.02})


def make():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2))
    model[2].requires_grad_(False)
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)


def compare(name, change):
    reset_states()
    run = Accelerator(cpu=True, **LAYOUTS[name]())
    model, optimizer = run.prepare(*make())
    expected, plain = make()
    index, shards = run.strategy.data_shard
    for step in range(4):
        parts = torch.randn(shards, 4, 4, generator=torch.Generator().manual_seed(step))
        change(step, run.unwrap_model(model), optimizer)
        change(step, expected, plain)
        run.backward(model(parts[index]).square().mean())
        expected(parts.flatten(0, 1)).square().mean().backward()
        for each in (optimizer, plain):
            each.step()
            each.zero_grad()
    compare_state(run, model, expected.state_dict())


@on_ranks(2)
@pytest.mark.parametrize("name", ["ddp, unused", "fsdp1", "fsdp2", "tp"])
def test_equals_the_plain_loop(name):
    compare(name, alternate)
    compare(name, unfreeze)


@on_ranks(2)
def test_ddp_averages_gradients_of_unfrozen_parameters():
    compare("ddp", unfreeze)


@on_ranks(2)
def test_a_model_that_was_frozen_as_a_whole_is_refused():
    run = Accelerator(cpu=True)
    model = run.prepare(nn.Linear(2, 1).requires_grad_(False))
    model.requires_grad_(True)
    with pytest.raises(PrepareError, match=r"Linear.*weight.*[Pp]repare"):
        run.backward(model(torch.ones(1, 2)).sum())


@on_ranks(2)
@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_a_discriminator_frozen_for_the_generators_step(name):
    def models():
        torch.manual_seed(0)
        made = [nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, size)) for size in (4, 1)]
        return made, [torch.optim.Adam(model.parameters(), lr=0.05) for model in made]

    def step(generator, discriminator, optimizers, x, backward):
        fake = generator(x)
        optimizers[1].zero_grad()
        backward((discriminator(fake.detach()) - discriminator(x)).mean())
        optimizers[1].step()
        discriminator.requires_grad_(False)
        optimizers[0].zero_grad()
        backward(-discriminator(fake).mean())
        optimizers[0].step()
        discriminator.requires_grad_(True)

    run = Accelerator(cpu=True, **LAYOUTS[name]())
    made, optimizers = models()
    *made, first, second = run.prepare(*made, *optimizers)
    expected, plain = models()
    for seed in range(3):
        parts = torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(seed))
        step(*made, (first, second), parts[run.process_index], run.backward)
        step(*expected, plain, parts.flatten(0, 1), torch.Tensor.backward)
    for model, reference in zip(made, expected, strict=True):
        compare_state(run, model, reference.state_dict())
