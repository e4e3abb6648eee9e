# SPDX-License-Identifier: Apache-2.0
"""FSDP1: a saved optimizer comes back, also one without a state, into optimizers that have stepped or not."""

import pytest
import torch
from cases import pairs
from rank_pool import on_ranks
from states import reset_states
from torch import nn

from accelerate import Accelerator
from accelerate.core.errors import CheckpointError
from accelerate.utils import FullyShardedDataParallelPlugin as Plugin

STEPS = 5


def adamw_of_two_groups(model):
    groups = [[p for p in model.parameters() if (p.ndim == 1) == flag] for flag in (False, True)]
    return torch.optim.AdamW(
        [{"params": one, "weight_decay": 0.1 * i} for i, one in enumerate(groups)], lr=1e-2
    )


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def momentum(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def make_run(make_optimizer):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)
    ).double()
    return model, make_optimizer(model)


def train(model, optimizer, steps, accelerator=None):
    losses = []
    for step in steps:
        rows = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        rank, ranks = (
            (0, 1)
            if accelerator is None
            else (accelerator.process_index, accelerator.num_processes)
        )
        loss = model(rows.chunk(ranks)[rank]).square().mean()
        loss.backward() if accelerator is None else accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(
            loss.item() if accelerator is None else accelerator.reduce(loss.detach(), "mean").item()
        )
    return torch.tensor(losses, dtype=torch.float64)


@on_ranks(2)
@pytest.mark.parametrize(
    "kind, flat",
    pairs(
        ["SHARDED_STATE_DICT", "FULL_STATE_DICT"],
        [False, True],
        usual=[("SHARDED_STATE_DICT", True)],
    ),
)
def test_a_resumed_run_equals_one_process(flat, kind, tmp_path):
    def start(make_optimizer):
        reset_states()
        plugin = Plugin(
            fsdp_version=1,
            use_orig_params=not flat,
            state_dict_type=kind,
            auto_wrap_policy="SIZE_BASED_WRAP",
            min_num_params=20,
        )
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
        return accelerator, *accelerator.prepare(*make_run(make_optimizer))

    for make_optimizer in (adamw, momentum, sgd) if flat else (adamw_of_two_groups, momentum, sgd):
        expected = train(*make_run(make_optimizer), range(STEPS))
        for before in (0, 2):
            folder = str(tmp_path / f"{make_optimizer.__name__}-{before}")
            accelerator, model, optimizer = start(make_optimizer)
            train(model, optimizer, range(before), accelerator)
            accelerator.save_state(folder)
            uninterrupted = train(model, optimizer, range(before, STEPS), accelerator)
            torch.testing.assert_close(uninterrupted, expected[before:], rtol=1e-9, atol=0)
            for other_steps in (0, 2):
                accelerator, model, optimizer = start(make_optimizer)
                train(model, optimizer, range(7, 7 + other_steps), accelerator)
                accelerator.load_state(folder)
                resumed = train(model, optimizer, range(before, STEPS), accelerator)
                torch.testing.assert_close(resumed, expected[before:], rtol=1e-9, atol=0)


class NestedMomentum(torch.optim.SGD):
    """It has tensors in a dict."""

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["nested"] = {
                    "average": torch.zeros_like(parameter),
                    "count": 1,
                }


@on_ranks(2)
@pytest.mark.parametrize("kind", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
@pytest.mark.parametrize("flat", [False, True], ids=["original parameters", "flat parameters"])
def test_containers_in_the_state_are_refused_before_anything_is_written(flat, kind, tmp_path):
    plugin = Plugin(fsdp_version=1, state_dict_type=kind, use_orig_params=not flat)
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    model, optimizer = accelerator.prepare(
        *make_run(lambda model: NestedMomentum(model.parameters(), lr=0.1))
    )
    train(model, optimizer, range(1), accelerator)
    with pytest.raises(
        CheckpointError, match=r"state 'nested' of NestedMomentum is a dict, .*FSDP1"
    ):
        accelerator.save_state(str(tmp_path / "saved"))
    assert not (tmp_path / "saved").exists()
