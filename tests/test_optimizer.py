# SPDX-License-Identifier: Apache-2.0
"""The prepared optimizer: it steps when a window ends, and is otherwise the optimizer inside."""

import copy
import math
import pickle

import pytest
import torch
from states import reset_states

from accelerate import Accelerator
from accelerate.config.precision import GradScalerKwargs
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


# By step: the factors of both losses, whether gradients are clipped, and which optimizers step.
SCALED_STEPS = [
    ((1.0, 1.0), False, (0, 1)),
    ((math.inf, 1.0), False, (0, 1)),
    ((1.0, 1.0), True, (0, 1)),
    ((math.inf, math.inf), True, (0, 1)),
    ((1.0, 1.0), False, (0,)),
    ((1.0, 1.0), True, (1,)),
    ((1.0, 1.0), False, (0, 1)),
]


def test_several_optimizers_step_with_one_scale():
    """The scale of fp16 is updated once for all, as in a plain loop; each says whether its step was skipped."""
    scaling = {"init_scale": 4.0, "growth_interval": 1}
    plain = torch.amp.GradScaler("cpu", **scaling)
    reset_states()
    accelerator = Accelerator(
        cpu=True, mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(**scaling)]
    )
    expected = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    weights = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    plain_optimizers = [torch.optim.SGD([weight], lr=0.25) for weight in expected]
    optimizers = accelerator.prepare(*(torch.optim.SGD([weight], lr=0.25) for weight in weights))
    for factors, clips, stepping in SCALED_STEPS:
        loss = sum(factor * w.sum() for factor, w in zip(factors, expected, strict=True))
        plain.scale(loss).backward()
        loss = sum(factor * w.sum() for factor, w in zip(factors, weights, strict=True))
        accelerator.backward(loss)
        if clips:
            for number in stepping:
                plain.unscale_(plain_optimizers[number])
                torch.nn.utils.clip_grad_norm_(expected[number], 0.5)
                accelerator.clip_grad_norm_(weights[number], 0.5)
        for number in stepping:
            plain.step(plain_optimizers[number])
            optimizers[number].step()
            assert optimizers[number].step_was_skipped == math.isinf(factors[number])
        plain.update()
        for optimizer in (*plain_optimizers, *optimizers):
            optimizer.zero_grad()
        torch.testing.assert_close(weights, expected, rtol=0, atol=0)
        if len(stepping) == 2:
            assert accelerator.scaler.get_scale() == plain.get_scale()


def test_schedulers_see_its_steps():
    weight, optimizer = prepared()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    weight.grad = torch.ones(3)
    optimizer.step()
    scheduler.step()
    assert optimizer.optimizer.param_groups[0]["lr"] == 0.25
