# SPDX-License-Identifier: Apache-2.0
"""The views of a DeepSpeed engine, which steps once a window; the placeholders; what happens without DeepSpeed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from accelerate.config.deepspeed import DeepSpeedPlugin
from accelerate.core.imports import is_available
from accelerate.parallel.deepspeed.engine import (
    DeepSpeedEngineWrapper,
    DeepSpeedOptimizerWrapper,
    DeepSpeedSchedulerWrapper,
    start_engine,
)
from accelerate.parallel.placeholders import DummyOptim, DummyScheduler
from accelerate.state import AcceleratorState


class Engine:
    """What the wrapper asks of an engine, on plain torch: gradients accumulate until the boundary."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.boundary, self.norm = optimizer, False, None

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        self.boundary = is_boundary

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        loss.backward(**kwargs)

    def step(self) -> None:
        assert self.boundary, "stepped in the middle of a window"
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        self.norm = torch.nn.utils.get_total_norm([p.grad for p in parameters])
        self.optimizer.step()
        self.optimizer.zero_grad()

    def get_global_grad_norm(self) -> torch.Tensor | None:
        return self.norm


@pytest.fixture(autouse=True)
def fresh_state():
    AcceleratorState(cpu=True)


def test_a_loop_over_the_wrappers_steps_once_a_window() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    inner = torch.optim.SGD([weight], lr=0.5)
    engine = DeepSpeedEngineWrapper(Engine(inner))
    optimizer = DeepSpeedOptimizerWrapper(inner)
    schedule = torch.optim.lr_scheduler.StepLR(inner, step_size=1)
    scheduler = DeepSpeedSchedulerWrapper(schedule, optimizer)
    assert engine.get_global_grad_norm() is None
    for batch in range(4):
        engine.backward(
            (weight * torch.tensor([3.0, 4.0])).sum() / 2, sync_gradients=batch % 2 == 1
        )
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    # Two windows, each of the gradient (3, 4), at the rate 0.5: nothing else has stepped or zeroed.
    torch.testing.assert_close(weight.detach(), torch.tensor([1.0 - 3.0, 1.0 - 4.0]))
    assert engine.get_global_grad_norm() == pytest.approx(5.0)
    assert schedule.last_epoch == 0 and scheduler.get_last_lr() == [0.5]


def test_overflow_and_closures() -> None:
    inner = SimpleNamespace(overflow=True, state={}, param_groups=[])
    optimizer = DeepSpeedOptimizerWrapper(inner)
    assert optimizer.step_was_skipped
    inner.overflow = False
    assert not optimizer.step_was_skipped
    with pytest.raises(TypeError, match="closure"):
        optimizer.step(lambda: 0)


def test_placeholders_keep_what_they_are_given() -> None:
    parameters = [torch.nn.Parameter(torch.ones(1))]
    optimizer = DummyOptim(parameters, lr=0.1, betas=(0.9, 0.95))
    assert (optimizer.params, optimizer.lr, optimizer.weight_decay) == (parameters, 0.1, 0)
    assert optimizer.kwargs == {"betas": (0.9, 0.95)}
    schedule = DummyScheduler(optimizer, total_num_steps=10, warmup_num_steps=2)
    assert (schedule.optimizer, schedule.total_num_steps, schedule.warmup_num_steps) == (
        optimizer,
        10,
        2,
    )
    assert DummyScheduler(optimizer, power=3).kwargs == {"power": 3}


class RecordingEngine:
    def __init__(self):
        self.calls = []

    def set_gradient_accumulation_boundary(self, is_boundary):
        self.calls.append(is_boundary)

    def backward(self, loss, **kwargs):
        self.calls.append(("backward", kwargs))

    def step(self):
        self.calls.append("step")

    def get_global_grad_norm(self):
        return torch.tensor(2.0)


def test_the_engine_steps_where_a_window_ends():
    engine = RecordingEngine()
    driver = DeepSpeedEngineWrapper(engine)
    driver.backward(torch.ones(()), sync_gradients=False)
    driver.backward(torch.ones(()), retain_graph=True)
    assert engine.calls == [
        False,
        ("backward", {}),
        True,
        ("backward", {"retain_graph": True}),
        "step",
    ]
    assert driver.get_global_grad_norm() == 2.0


@pytest.mark.skipif(is_available("deepspeed"), reason="deepspeed is installed")
def test_absence_is_reported():
    with pytest.raises(ImportError, match="deepspeed"):
        start_engine(
            DeepSpeedPlugin(),
            torch.nn.Linear(1, 1),
            micro_batch_size=1,
            gradient_accumulation_steps=1,
            world_size=1,
        )
