# SPDX-License-Identifier: Apache-2.0
"""The prepared optimizer: it steps when a window ends, and is otherwise the optimizer inside."""

import copy
import pickle

import pytest
import torch

from accelerate.data_loader import DataLoaderStateMixin
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.state import AcceleratorState


@pytest.fixture(autouse=True)
def fresh_state():
    AcceleratorState(cpu=True)


def prepared(kind=torch.optim.SGD, scaler=None, **options):
    weight = torch.nn.Parameter(torch.ones(3))
    return weight, AcceleratedOptimizer(kind([weight], **{"lr": 0.5, **options}), scaler=scaler)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_copy_made_in_a_window_steps_at_its_end(copied):
    weight, optimizer = prepared()
    scheduler = AcceleratedScheduler(torch.optim.lr_scheduler.StepLR(optimizer, 1), optimizer)
    state = optimizer.gradient_state
    loader = DataLoaderStateMixin()
    loader.begin()
    state._set_sync_gradients(False)
    optimizer, scheduler = copied((optimizer, scheduler))
    (weight,) = optimizer.param_groups[0]["params"]
    weight.grad = torch.ones(3)
    optimizer.step()
    assert weight.tolist() == [1.0] * 3
    loader.end()
    state._set_sync_gradients(True)
    optimizer.step()
    assert weight.tolist() == [0.5] * 3
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.05


def test_nothing_happens_inside_a_window():
    weight, optimizer = prepared()
    weight.grad = torch.ones(3)
    optimizer.gradient_state._set_sync_gradients(False)
    optimizer.step()
    optimizer.zero_grad()
    assert torch.equal(weight, torch.ones(3))
    assert torch.equal(weight.grad, torch.ones(3))
    optimizer.gradient_state._set_sync_gradients(True)
    optimizer.step()
    assert torch.equal(weight, torch.full((3,), 0.5))
    optimizer.zero_grad()
    assert weight.grad is None
    weight.grad = torch.ones(3)
    optimizer.zero_grad(set_to_none=False)
    assert torch.equal(weight.grad, torch.zeros(3))


def test_it_is_the_optimizer_inside():
    weight, optimizer = prepared(torch.optim.AdamW)
    assert isinstance(optimizer, torch.optim.Optimizer)
    weight.grad = torch.ones(3)
    optimizer.step()
    assert optimizer.state is optimizer.optimizer.state
    assert optimizer.param_groups is optimizer.optimizer.param_groups
    assert optimizer.defaults["lr"] == 0.5
    extra = torch.nn.Parameter(torch.zeros(1))
    optimizer.add_param_group({"params": [extra], "lr": 0.1})
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.1]
    other = prepared(torch.optim.AdamW)[1]
    other.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})
    other.load_state_dict(optimizer.state_dict())
    assert other.param_groups[1]["lr"] == 0.1
    assert optimizer.train() is None and optimizer.eval() is None
    with pytest.raises(AttributeError):
        optimizer.no_such_thing  # noqa: B018
    assert pickle.loads(pickle.dumps(optimizer)).param_groups[0]["lr"] == 0.5


def test_closures_are_called():
    _weight, optimizer = prepared(torch.optim.LBFGS, max_iter=2)
    calls = []

    def closure():
        calls.append(1)
        optimizer.optimizer.zero_grad()
        loss = (optimizer.param_groups[0]["params"][0] ** 2).sum()
        loss.backward()
        return loss

    assert float(optimizer.step(closure)) == 3.0
    assert calls


def test_a_step_on_infinite_gradients_is_left_out_and_said():
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
    weight, optimizer = prepared(scaler=scaler)
    scaler.scale(weight.sum())
    weight.grad = torch.full((3,), float("inf"))
    optimizer.step()
    assert optimizer.step_was_skipped
    assert torch.equal(weight, torch.ones(3))
    assert scaler.get_scale() == 2.0
    weight.grad = torch.full((3,), 2.0)
    optimizer.unscale()
    optimizer.unscale()
    assert torch.equal(weight.grad, torch.ones(3))
    optimizer.step()
    assert not optimizer.step_was_skipped
    assert torch.equal(weight, torch.full((3,), 0.5))
    assert scaler.get_scale() == 4.0


def test_schedulers_see_its_steps():
    weight, optimizer = prepared()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    weight.grad = torch.ones(3)
    optimizer.step()
    scheduler.step()
    assert optimizer.optimizer.param_groups[0]["lr"] == 0.25
