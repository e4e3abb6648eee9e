# SPDX-License-Identifier: Apache-2.0
"""Optimizers that wrap another one, or keep parameters in lists of their own, against the plain loop in float64.

They are written as those of pytorch_optimizer and schedulefree.
"""

import copy
import itertools
from collections import OrderedDict, defaultdict

import pytest
import torch
from layouts import compare_state, sharded, sized
from newton_schulz import Orthogonal
from rank_pool import on_ranks
from states import reset_states
from torch import nn

from accelerate import Accelerator
from accelerate.utils import register_matrix_optimizer

pytestmark = pytest.mark.usefixtures("float64")
STEPS = 5


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)


class Wrapper(torch.optim.Optimizer):
    """Has the groups of the other one."""

    def __init__(self, parameters):
        self.optimizer = momentum(parameters)
        self._patch_step_function()
        self._optimizer_step_pre_hooks = OrderedDict()
        self._optimizer_step_post_hooks = OrderedDict()
        self.defaults = self.optimizer.defaults

    param_groups = property(lambda self: self.optimizer.param_groups)

    def state_dict(self):
        return self.optimizer.state_dict()

    def load_state_dict(self, state):
        self.optimizer.load_state_dict(state)


class Projecting(Wrapper):
    """Removes from each gradient what is parallel to the parameter. Has the state of the other one too."""

    state = property(lambda self: self.optimizer.state)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                weight, gradient = p.flatten(), p.grad.flatten()
                scale = torch.dot(weight, gradient) / torch.dot(weight, weight)
                p.grad.sub_(p * scale)
        return self.optimizer.step()


class Sharpness(torch.optim.Optimizer):
    """Steps with the gradients at perturbed weights, which a closure computes."""

    def __init__(self, parameters):
        super().__init__(parameters, {"rho": 0.05})
        self.base = momentum(self.param_groups)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def step(self, closure):
        parameters = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        before = [p.clone() for p in parameters]
        for p in parameters:
            p.add_(p.grad, alpha=0.05 / float(norm))
        self.zero_grad()
        with torch.enable_grad():
            closure()
        for p, old in zip(parameters, before, strict=True):
            p.copy_(old)
        self.base.step()


class SlowWeights(Wrapper):
    """Moves every second step half the way back. The slow weights are copies from before `prepare`."""

    def __init__(self, parameters):
        super().__init__(parameters)
        self.defaults, self.state, self.count = {}, defaultdict(dict), 0
        for p in self.param_groups[0]["params"]:
            self.state[p]["slow"] = p.detach().clone()

    @torch.no_grad()
    def step(self, closure=None):
        self.optimizer.step()
        self.count += 1
        for p in self.param_groups[0]["params"] if self.count % 2 == 0 else ():
            slow = self.state[p]["slow"]
            slow.add_(p - slow, alpha=0.5)
            p.copy_(slow)

    def state_dict(self):
        own = {(0, i): dict(self.state[p]) for i, p in enumerate(self.param_groups[0]["params"])}
        return {"own": own, "count": self.count, "base": self.optimizer.state_dict()}

    def load_state_dict(self, state):
        self.optimizer.load_state_dict(state["base"])
        self.count = state["count"]
        for i, p in enumerate(self.param_groups[0]["params"]):
            self.state[p] = {"slow": state["own"][0, i]["slow"].clone()}


class References(torch.optim.Optimizer):
    """Keeps a list of its parameters, and one value for each in a dict of its state."""

    def __init__(self, parameters):
        super().__init__(parameters, {})
        self.listed = list(self.param_groups[0]["params"])

    @torch.no_grad()
    def step(self, closure=None):
        averages = self.state["averages"]
        for p in self.listed:
            average = averages.setdefault(p, torch.zeros_like(p))
            average.mul_(0.9).add_(p.grad / p.grad.norm())
            p.sub_(average, alpha=0.1)


class NoOptimizer:
    """Is no `torch.optim.Optimizer`. Interpolates between the weights and those of the other one."""

    def __init__(self, parameters):
        self.base = momentum(parameters)

    param_groups = property(lambda self: self.base.param_groups)
    state = property(lambda self: self.base.state)

    def zero_grad(self):
        self.base.zero_grad()

    def state_dict(self):
        return self.base.state_dict()

    def load_state_dict(self, state):
        self.base.load_state_dict(state)

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            fast = self.state[p].setdefault("fast", p.clone())
            self.state[p]["average"] = p.clone()
            p.copy_(fast)
        self.base.step()
        for p in self.param_groups[0]["params"]:
            self.state[p]["fast"].copy_(p)
            p.copy_(self.state[p]["average"].lerp(p, 0.3))


KINDS = [Projecting, Sharpness, SlowWeights, References, NoOptimizer]
LAYOUTS = {
    "ddp": dict,
    "fsdp2": lambda: sharded(2),
    "tp": lambda: sized({"0": "colwise", "2": "rowwise"}, tp_size=2),
}


def make(kind):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))
    return model, kind(model.parameters())


def train(model, optimizer, rows, backward):
    for x in rows:

        def closure(x=x):
            optimizer.zero_grad()
            backward((model(x) - x).square().mean())

        closure()
        optimizer.step(closure)


@on_ranks(2)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_steps_equal_those_of_one_process(kind, layout):
    run = Accelerator(cpu=True, **LAYOUTS[layout]())
    model, optimizer = run.prepare(*make(kind))
    index, shards = run.strategy.data_shard
    rows = torch.randn(STEPS, 4 * shards, 4, generator=torch.Generator().manual_seed(1))
    train(model, optimizer, rows[:, index::shards], run.backward)
    expected, plain = make(kind)
    train(expected, plain, rows, torch.Tensor.backward)
    compare_state(run, model, expected.state_dict())
    assert len(optimizer.state) == len(plain.state)
    assert copy.copy(plain.param_groups[0]).keys() == optimizer.param_groups[0].keys()


class SharpMatrices(Sharpness):
    def __init__(self, parameters):
        super().__init__(parameters)
        self.base = Orthogonal(self.param_groups)
        self.param_groups = self.base.param_groups


class SlowMatrices(SlowWeights):
    def __init__(self, parameters):
        super().__init__(parameters)
        self.optimizer = Orthogonal(self.param_groups)


@on_ranks(2)
def test_optimizers_of_matrices_inside_of_others(tmp_path):
    """Those that are wrapped are not shared. They keep their state, and a loaded run continues."""
    register_matrix_optimizer(Orthogonal)
    for layout, kind in itertools.product(LAYOUTS, (SharpMatrices, SlowMatrices)):

        def make(kind=kind):
            torch.manual_seed(0)
            layers = nn.Linear(4, 6, bias=False), nn.Tanh(), nn.Linear(6, 4, bias=False)
            model = nn.Sequential(*layers)
            return model, kind(model.parameters())

        expected, plain = make()
        for rows in (slice(3), slice(3, STEPS)):
            reset_states()
            run = Accelerator(cpu=True, **LAYOUTS[layout]())
            model, optimizer = run.prepare(*make())
            index, shards = run.strategy.data_shard
            data = torch.randn(STEPS, 4 * shards, 4, generator=torch.Generator().manual_seed(1))
            if rows.start:
                run.load_state(tmp_path / f"{layout}-{kind.__name__}")
            train(model, optimizer, data[rows, index::shards], run.backward)
            train(expected, plain, data[rows], torch.Tensor.backward)
            compare_state(run, model, expected.state_dict())
            if not rows.start and kind is SlowMatrices:
                run.save_state(tmp_path / f"{layout}-{kind.__name__}")
            if kind is SharpMatrices:
                break


@on_ranks(2)
@pytest.mark.parametrize("layout", ["fsdp2", "tp"])
def test_an_optimizer_that_is_prepared_before_its_model(layout):
    for kind in (momentum, Projecting):
        reset_states()
        run = Accelerator(cpu=True, **LAYOUTS[layout]())
        model, optimizer = make(kind)
        optimizer = run.prepare(optimizer)
        model = run.prepare(model)
        index, shards = run.strategy.data_shard
        rows = torch.randn(STEPS, 4 * shards, 4, generator=torch.Generator().manual_seed(1))
        train(model, optimizer, rows[:, index::shards], run.backward)
        expected, plain = make(kind)
        train(expected, plain, rows, torch.Tensor.backward)
        compare_state(run, model, expected.state_dict())


@on_ranks(2)
@pytest.mark.parametrize("layout", ["fsdp2", "tp"])
@pytest.mark.parametrize("kind", [Projecting, SlowWeights])
def test_a_loaded_run_continues(kind, layout, tmp_path):
    """Also where torch's functions do not know the form of the state, and the model starts from other weights."""
    run = Accelerator(cpu=True, **LAYOUTS[layout]())
    model, optimizer = run.prepare(*make(kind))
    index, shards = run.strategy.data_shard
    rows = torch.randn(STEPS, 4 * shards, 4, generator=torch.Generator().manual_seed(1))
    train(model, optimizer, rows[:3, index::shards], run.backward)
    run.save_state(tmp_path / "saved")
    reset_states()
    run = Accelerator(cpu=True, **LAYOUTS[layout]())
    model, optimizer = make(kind)
    nn.init.ones_(model[0].weight)
    model, optimizer = run.prepare(model, optimizer)
    run.load_state(tmp_path / "saved")
    train(model, optimizer, rows[3:, index::shards], run.backward)
    expected, plain = make(kind)
    train(expected, plain, rows, torch.Tensor.backward)
    compare_state(run, model, expected.state_dict())


@on_ranks(2)
def test_an_optimizer_of_other_parameters_beside_that_of_the_model():
    run = Accelerator(cpu=True, **LAYOUTS["fsdp2"]())
    model, optimizer = make(momentum)
    temperature = nn.Parameter(torch.ones(1))
    model, optimizer, other = run.prepare(model, optimizer, momentum([temperature]))
    run.backward((model(torch.ones(2, 4)) * temperature).sum())
    other.step()
    assert temperature.item() != 1.0
    model, _ = make(momentum)
    with pytest.raises(ValueError, match=r"SGD.*not train anything"):
        run.prepare(model, momentum([temperature]))
