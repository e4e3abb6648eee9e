# SPDX-License-Identifier: Apache-2.0
"""`no_sync`, `accumulate` and `trigger_sync_in_backward` in unusual orders: equal to the plain loop, or an error."""

import pytest
import torch
from layouts import compare_state, sharded_by_size
from rank_pool import on_ranks
from states import reset_states
from torch import nn

from accelerate import Accelerator
from accelerate.config.training import DistributedDataParallelKwargs
from accelerate.core.errors import AccelerateError, PrepareError

pytestmark = pytest.mark.usefixtures("float64")


LAYOUTS = {
    "ddp": dict,
    "ddp, unused": lambda: {
        "kwargs_handlers": [DistributedDataParallelKwargs(find_unused_parameters=True)]
    },
    "fsdp2": lambda: sharded_by_size(2),
    "fsdp1": lambda: sharded_by_size(1, use_orig_params=True),
}


def make(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def batch(step):
    return torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(step))


class Run:
    """Models of a run, and the same in plain loops."""

    def __init__(self, layout, models=1, window=1):
        reset_states()
        self.run = Accelerator(cpu=True, gradient_accumulation_steps=window, **LAYOUTS[layout]())
        self.models = [self.run.prepare(*make(seed)) for seed in range(models)]
        self.plain = [make(seed) for seed in range(models)]

    def loss(self, step, model=0):
        return self.models[model][0](batch(step)[self.run.process_index]).square().mean()

    def compare(self, *windows):
        """The plain models take a step for each window, a list of batches."""
        for (model, _), (expected, optimizer) in zip(self.models, self.plain, strict=True):
            for window in windows:
                for step in window:
                    expected(batch(step).flatten(0, 1)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            compare_state(self.run, model, expected.state_dict(), 1e-10)

    def step(self):
        for _, optimizer in self.models:
            optimizer.step()
            optimizer.zero_grad()


def some_forwards_without_synchronization(layout):
    case = Run(layout)
    run, model = case.run, case.models[0][0]
    for step in range(0, 12, 4):
        with run.no_sync(model):
            run.backward(case.loss(step))
            with run.no_sync(model):
                first = case.loss(step + 1)
        run.backward(first + case.loss(step + 2))
        before = case.loss(step + 3)
        with run.no_sync(model):
            loss = before + case.loss(step)
        run.backward(loss)
        case.step()
    case.compare([0, 0, 1, 2, 3], [4, 4, 5, 6, 7], [8, 8, 9, 10, 11])


def a_trigger(layout):
    case = Run(layout)
    run, model = case.run, case.models[0][0]
    for step in range(0, 4, 2):
        with run.no_sync(model):
            run.backward(case.loss(step))
            loss = case.loss(step + 1)
        with run.trigger_sync_in_backward(model):
            run.backward(loss)
        case.step()
    case.compare([0, 1], [2, 3])


def models_that_take_turns(layout):
    """Of the first, gradients are reduced in each batch; a backward of one model is none of the other."""
    case = Run(layout, models=2, window=2)
    for both in (True, False):
        for step in range(4):
            chosen = [model for model, _ in case.models][0 if both else 1 :]
            with case.run.accumulate(*chosen):
                for number in range(2):
                    case.run.backward(case.loss(step, number) * 2)
                case.step()
    case.compare(*[[0, 1], [2, 3]] * 2)


@on_ranks(2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_equal_to_the_plain_loop_or_an_error(layout):
    for compare in (some_forwards_without_synchronization, a_trigger, models_that_take_turns):
        compare(layout)
    case = Run(layout, models=2, window=2)
    (first, _), (second, _) = case.models
    with pytest.raises(AccelerateError, match=r"inside accumulate.*accumulate\(first, second\)"):
        with case.run.accumulate(first), case.run.accumulate(second):
            pass
    case.run.step = 0
    with case.run.accumulate(first):
        case.run.backward(case.loss(0))
    with pytest.raises(AccelerateError, match=r"earlier batch.*accumulate\(first, second\)"):
        case.run.accumulate(second).__enter__()
    if layout == "fsdp2":
        with (
            pytest.raises(PrepareError, match="outside the no_sync block"),
            case.run.no_sync(first),
        ):
            case.run.trigger_sync_in_backward(first).__enter__()
