# SPDX-License-Identifier: Apache-2.0
"""The prepared scheduler: when it moves, how often, and what it hands through."""

from functools import partial

import pytest
import torch

from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.state import AcceleratorState


@pytest.fixture(autouse=True)
def fresh_state():
    AcceleratorState(cpu=True)


def pair(processes=1, make=None, **options):
    AcceleratorState().num_processes = processes
    plain = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    make = make or (
        lambda optimizer: torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: 1.0 / (1 + step)
        )
    )
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


class PerUpdate(torch.optim.lr_scheduler.LambdaLR):
    """Steps with the loss of an update, and keeps count of them."""

    def step(self, loss=None):
        super().step()


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_a_step_with_a_value_is_one_step(processes):
    plateau = partial(torch.optim.lr_scheduler.ReduceLROnPlateau, factor=0.5, patience=1)
    halved = partial(PerUpdate, lr_lambda=lambda step: 0.5**step)
    metrics = [1, 0.9, 0.9, 0.9, 0.8, 0.8, 0.8]
    for make, expected in (
        (plateau, [1, 1, 1, 0.5, 0.5, 0.5, 0.25]),
        (halved, [0.5**step for step in range(1, 8)]),
    ):
        _, scheduler = pair(processes, make)
        found = []
        for metric in metrics:
            scheduler.step(metric)
            found.append(scheduler.get_last_lr()[0])
        assert found == expected
    _, scheduler = pair(processes, halved)
    scheduler.step(loss=None)
    assert scheduler.get_last_lr() == [0.5**processes]


def test_a_left_out_step_leaves_the_schedule():
    optimizer, scheduler = pair()
    optimizer._is_overflow = True
    scheduler.step()
    assert scheduler.get_last_lr() == [1.0]


def test_a_schedule_with_an_end_stays_there():
    optimizer, scheduler = pair(
        processes=4,
        make=lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=1.0, total_steps=10),
    )
    assert len(rates(optimizer, scheduler, [True] * 4)) == 4


def linear(optimizer, steps):
    return torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=steps)


def warm_up(optimizer, steps):
    return torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, total_iters=steps)


def one_cycle(optimizer, steps):
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=steps)


cosine = torch.optim.lr_scheduler.CosineAnnealingLR


@pytest.mark.parametrize(
    "make, processes, steps, told",
    [
        *((make, 2, 30, True) for make in (linear, cosine, one_cycle)),  # the steps of one rank
        *((make, 2, 50, False) for make in (linear, cosine, one_cycle)),  # the batches of all ranks
        *(
            (make, 1, 30, make is one_cycle) for make in (cosine, linear, one_cycle)
        ),  # as torch, which raises or goes on
        (warm_up, 2, 10, False),
    ],
)
def test_a_schedule_that_ends_before_the_loop_is_reported_once(
    make, processes, steps, told, caplog
):
    """10 epochs of 5 batches are 3 steps an epoch on 2 processes: the last step of each epoch is filled."""
    optimizer, scheduler = pair(processes, lambda plain: make(plain, steps))

    class Loader:
        iteration, end_of_dataloader = 0, False

    loader = Loader()
    scheduler.gradient_state._add_dataloader(loader)
    for loader.iteration in range(10):
        rates(optimizer, scheduler, [True] * -(-5 // processes))
    messages = [
        record.getMessage() for record in caplog.records if "ended at step" in record.getMessage()
    ]
    assert len(messages) == told
    assert all(
        "step_scheduler_with_optimizer" in message and str(steps) in message for message in messages
    )


def test_state_goes_through():
    optimizer, scheduler = pair()
    rates(optimizer, scheduler, [True, True])
    other = pair()[1]
    other.load_state_dict(scheduler.state_dict())
    assert other.get_last_lr() == scheduler.get_last_lr()
    assert other.last_epoch == 2
    assert other.get_lr() == pytest.approx(scheduler.get_lr())
