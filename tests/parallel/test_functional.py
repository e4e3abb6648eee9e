# SPDX-License-Identifier: Apache-2.0
"""`torch.func` and gradients with a graph on prepared models: equal to the plain loop, or an error that says why."""

import pytest
import torch
from layouts import compare_state, sharded_by_size, sized
from rank_pool import on_ranks
from states import reset_states
from torch import nn
from torch.func import functional_call, grad, jacrev, jvp, vmap

from accelerate import Accelerator
from accelerate.core.errors import PrepareError
from accelerate.core.imports import is_torch_version

pytestmark = pytest.mark.usefixtures("float64")


LAYOUTS = {
    "ddp": dict,
    "fsdp2": lambda: sharded_by_size(2),
    "tp": lambda: sized({"0": "colwise", "2": "rowwise"}, tp_size=2),
    "pp": lambda: sized(pp_size=2),
}


def own_parameters(model, x):
    return functional_call(model, dict(model.named_parameters()), (x,)).square().mean()


def other_parameters(model, x):
    return (
        functional_call(model, {name: p * 0.5 for name, p in model.named_parameters()}, (x,))
        .square()
        .mean()
    )


def two_steps(model, x):
    """As meta learning: the gradient of a step."""
    parameters = dict(model.named_parameters())
    gradients = torch.autograd.grad(
        model(x).square().mean(), list(parameters.values()), create_graph=True
    )
    stepped = {
        name: p - 0.1 * g for (name, p), g in zip(parameters.items(), gradients, strict=True)
    }
    return functional_call(model, stepped, (x,)).square().mean()


def each_sample(model, x):
    return vmap(model)(x).square().mean()


def input_gradient(model, x):
    return model(x).square().mean() + grad(lambda x: model(x).square().sum())(x).square().mean()


def jacobian(model, x):
    return model(x).square().mean() + jacrev(model)(x[0]).square().mean()


def forward_mode(model, x):
    return model(x).square().mean() + jvp(model, (x,), (torch.ones_like(x),))[1].square().mean()


FUNCTIONS = [
    own_parameters,
    other_parameters,
    two_steps,
    each_sample,
    input_gradient,
    jacobian,
    forward_mode,
]
TRANSFORMS = FUNCTIONS[3:]
# vmap needs torch 2.13: before, the backward finds parameters that are not gathered.
FSDP2 = [own_parameters] if is_torch_version("<", "2.13") else [own_parameters, each_sample]
REFUSED = {
    "ddp": [],
    "fsdp2": [],
    "tp": TRANSFORMS,
    "pp": [other_parameters, two_steps, *TRANSFORMS],
}


def make():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def compare(layout, function):
    reset_states()
    run = Accelerator(cpu=True, **LAYOUTS[layout]())
    model, optimizer = run.prepare(*make())
    expected, plain = make()
    index, shards = run.strategy.data_shard
    for step in range(2):
        parts = torch.randn(shards, 4, 4, generator=torch.Generator().manual_seed(step))
        run.backward(function(model, parts[index]))
        (sum(function(expected, rows) for rows in parts) / shards).backward()
        for each in (optimizer, plain):
            each.step()
            each.zero_grad()
    compare_state(run, model, expected.state_dict(), 1e-10)


@on_ranks(2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_equal_or_refused(layout):
    for function in FUNCTIONS:
        if layout == "fsdp2" and function not in FSDP2:
            # As torch gives it.
            continue
        if layout == "tp" and function is two_steps and is_torch_version("<", "2.12"):
            # DTensor's second derivatives are wrong there.
            continue
        if function not in REFUSED[layout]:
            compare(layout, function)
            continue
        # Sharded parameters are not in the graph of a forward: torch says that.
        cause = (
            r"create_graph|used in the graph" if function is two_steps else r"torch\.func|functorch"
        )
        with pytest.raises((PrepareError, RuntimeError), match=cause):
            compare(layout, function)
