# SPDX-License-Identifier: Apache-2.0
"""A small run to save and load: tied weights, an optimizer that has stepped, a scheduler, an object of the user's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from accelerate.checkpointing import PreparedModel, PreparedOptimizer, RunState


@dataclass(frozen=True)
class OneProcess:
    process_index: int = 0
    num_processes: int = 1
    local_process_index: int = 0
    is_main_process: bool = True
    is_local_main_process: bool = True


class Tied(torch.nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.first = torch.nn.Linear(width, width)
        self.norm = torch.nn.BatchNorm1d(width)
        self.second = torch.nn.Linear(width, width)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.norm(self.first(x)))


class Registered:
    def __init__(self, state: Any = None) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


class SmallRun:
    """Objects of a run, its bundle, and a training step that draws random numbers."""

    def __init__(self, seed: int = 0, width: int = 4, custom: Any = None) -> None:
        torch.manual_seed(seed)
        self.width = width
        self.model = Tied(width)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: 1 / (step + 1)
        )
        self.registered = Registered(custom)

    def bundle(self, **more: Any) -> RunState:
        fields = {
            "models": [PreparedModel(self.model)],
            "optimizers": [PreparedOptimizer(self.optimizer)],
            "schedulers": [self.scheduler],
            "custom": [self.registered],
            **more,
        }
        return RunState(**fields)

    def step(self) -> None:
        self.model(torch.randn(5, self.width)).square().mean().backward()
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()

    def weights(self) -> list[torch.Tensor]:
        return [value.clone() for value in self.model.state_dict().values()]


def same(ours: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return len(ours) == len(others) and all(
        torch.equal(a, b) for a, b in zip(ours, others, strict=True)
    )


@pytest.fixture
def process() -> OneProcess:
    return OneProcess()


@pytest.fixture
def small_run() -> type[SmallRun]:
    return SmallRun


@pytest.fixture
def same_tensors():
    return same
