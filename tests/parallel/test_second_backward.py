# SPDX-License-Identifier: Apache-2.0
"""Gradients of gradients, and several backwards of one forward, against the plain loop in float64."""

import pytest
import torch
from layouts import compare_state, sharded, sized
from rank_pool import on_ranks
from states import reset_states
from torch import nn

from accelerate import Accelerator
from accelerate.config.training import DistributedDataParallelKwargs

pytestmark = pytest.mark.usefixtures("float64")
STEPS = 3


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)) for _ in range(2)
        )
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def input_gradient(model, x, out=None):
    (found,) = torch.autograd.grad((model(x) if out is None else out).sum(), x, create_graph=True)
    return found


def penalty(model, x, backward):
    x = x.clone().requires_grad_(True)
    out = model(x)
    backward(out.square().mean() + (input_gradient(model, x, out).norm(dim=1) - 1).square().mean())


def penalty_of_a_second_forward(model, x, backward):
    loss = model(x).mean() - model(-x).square().mean()
    other = (x * 0.3).requires_grad_(True)
    backward(loss + (input_gradient(model, other).norm(dim=1) - 1).square().mean())


def penalties_one_by_one(model, x, backward):
    """The output's own graph is not in the second loss."""
    x = x.clone().requires_grad_(True)
    out = model(x)
    gradient = input_gradient(model, x, out)
    with torch.no_grad():
        model(x)
    backward(out.square().mean(), retain_graph=True)
    backward((gradient.norm(dim=1) - 1).square().mean())


def second_derivative(model, x, backward):
    x = x.clone().requires_grad_(True)
    out = model(x)
    (second,) = torch.autograd.grad(input_gradient(model, x, out).sum(), x, create_graph=True)
    backward((second.sum(1) + out[:, 0]).square().mean())


def two_backwards(model, x, backward):
    out = model(x)
    backward(out.square().mean(), retain_graph=True)
    backward(out.abs().mean())


def two_forwards_then_backwards(model, x, backward):
    first, second = model(x), model(-2 * x)
    backward(first.square().mean())
    backward(second.abs().mean())


def backwards_of_forwards_without_sync(run, model, x):
    losses = []
    for factor in (1, -2, 3):
        with run.no_sync(model):
            losses.append(model(factor * x).square().mean())
    for loss in losses[:-1]:
        run.backward(loss)
    with run.trigger_sync_in_backward(model):
        run.backward(losses[-1])


CASES = [
    penalty,
    penalty_of_a_second_forward,
    penalties_one_by_one,
    second_derivative,
    two_backwards,
    two_forwards_then_backwards,
]


def layout(name):
    return {
        "ddp": dict,
        "ddp, views": lambda: {
            "kwargs_handlers": [DistributedDataParallelKwargs(gradient_as_bucket_view=True)]
        },
        "fsdp2": lambda: sharded(2),
        "fsdp2, kept after forward": lambda: sharded(2, reshard_after_forward=False),
        "fsdp2, checkpointed": lambda: sharded(2, activation_checkpointing=True),
        "hsdp": lambda: sharded(2) | sized(dp_replicate_size=2, dp_shard_size=2),
        "tp": lambda: sized({"blocks.*.0": "colwise", "blocks.*.2": "rowwise"}, tp_size=2),
    }[name]()


def make():
    torch.manual_seed(0)
    model = Net()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def batches(shards):
    generator = torch.Generator().manual_seed(1)
    return [[torch.randn(4, 4, generator=generator) for _ in range(shards)] for _ in range(STEPS)]


def plain(case, shards):
    model, optimizer = make()
    for parts in batches(shards):
        optimizer.zero_grad()
        for x in parts:
            case(model, x, lambda loss, **options: (loss / shards).backward(**options))
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return model.state_dict()


def prepared(name):
    reset_states()
    run = Accelerator(cpu=True, **layout(name))
    return run, *run.prepare(*make())


def check(name):
    # Gradients of gradients under FSDP2 are as torch gives them.
    cases = (
        [two_backwards, two_forwards_then_backwards] if "fsdp" in name or name == "hsdp" else CASES
    )
    for case in cases:
        run, model, optimizer = prepared(name)
        index, shards = run.strategy.data_shard
        for parts in batches(shards):
            optimizer.zero_grad()
            case(model, parts[index], run.backward)
            run.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        compare_state(run, model, plain(case, shards), what=case.__name__)


@on_ranks(2)
@pytest.mark.parametrize(
    "name",
    ["ddp", "ddp, views", "fsdp2", "fsdp2, checkpointed", "tp"],
)
def test_matches_the_plain_loop(name):
    if name.startswith("ddp"):
        # Here the head's bias is not in the second loss.
        CASES.remove(second_derivative)
    check(name)


@on_ranks(2, 4)
@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_several_forwards_and_a_triggered_reduction(name):
    run, model, optimizer = prepared(name)
    expected, plain_optimizer = make()
    for parts in batches(run.num_processes):
        backwards_of_forwards_without_sync(run, model, parts[run.process_index])
        for x in parts:
            losses = [expected(factor * x).square().mean() for factor in (1, -2, 3)]
            (sum(losses) / len(parts)).backward()
        for each in (optimizer, plain_optimizer):
            each.step()
            each.zero_grad()
    compare_state(run, model, expected.state_dict())


@on_ranks(2)
@pytest.mark.thorough
@pytest.mark.parametrize("name", ["fsdp2, kept after forward"])
def test_matches_without_resharding_after_the_forward(name):
    check(name)


@on_ranks(4)
def test_matches_with_copies_of_shards():
    check("hsdp")
