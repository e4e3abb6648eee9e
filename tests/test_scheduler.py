# SPDX-License-Identifier: Apache-2.0
"""The prepared scheduler: when it moves, how often, and what it hands through."""

import pytest
import torch

from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.state import AcceleratorState, GradientState


@pytest.fixture(autouse=True)
def fresh_state():
    AcceleratorState(cpu=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def pair(processes=1, make=None, **options):
    AcceleratorState().num_processes = processes
    plain = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    make = make or (lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step)))
    optimizer = AcceleratedOptimizer(plain)
    return optimizer, AcceleratedScheduler(make(plain), optimizer, **options)


def rates(optimizer, scheduler, sync):
    found = []
    for flag in sync:
        optimizer.gradient_state._set_sync_gradients(flag)
        optimizer.step()
        scheduler.step()
        found.append(scheduler.get_last_lr()[0])
    return found


def test_once_a_process_at_the_end_of_a_window():
    assert rates(*pair(), [False, True, False, True]) == [1, 1 / 2, 1 / 2, 1 / 3]
    assert rates(*pair(processes=2), [False, True, True]) == [1, 1 / 3, 1 / 5]


def test_split_batches_and_own_pace():
    assert rates(*pair(processes=2, split_batches=True), [True, True]) == [1 / 2, 1 / 3]
    assert rates(*pair(processes=2, step_with_optimizer=False), [False, False]) == [1 / 2, 1 / 3]


def test_a_left_out_step_leaves_the_schedule():
    optimizer, scheduler = pair()
    optimizer._is_overflow = True
    scheduler.step()
    assert scheduler.get_last_lr() == [1.0]


def test_a_schedule_with_an_end_stays_there():
    optimizer, scheduler = pair(
        processes=4, make=lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=1.0, total_steps=10)
    )
    assert len(rates(optimizer, scheduler, [True] * 4)) == 4


def test_state_goes_through():
    optimizer, scheduler = pair()
    rates(optimizer, scheduler, [True, True])
    other = pair()[1]
    other.load_state_dict(scheduler.state_dict())
    assert other.get_last_lr() == scheduler.get_last_lr()
    assert other.last_epoch == 2
    assert other.get_lr() == pytest.approx(scheduler.get_lr())
