# SPDX-License-Identifier: Apache-2.0
"""Overhead of a training step over plain PyTorch: Linear(16, 1), batch 8, SGD and LambdaLR, with `accumulate`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from timing import alternate, emit
from torch.nn.functional import mse_loss

STEPS = 300


def make_training() -> tuple[
    torch.nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler
]:
    torch.manual_seed(0)
    model = torch.nn.Linear(16, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)


def raw_loop(x: torch.Tensor, y: torch.Tensor) -> Callable[[], None]:
    model, optimizer, scheduler = make_training()

    def run() -> None:
        for _ in range(STEPS):
            loss = mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

    return run


def own_loop(x: torch.Tensor, y: torch.Tensor) -> Callable[[], None]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model, optimizer, scheduler = accelerator.prepare(*make_training())

    def run() -> None:
        for _ in range(STEPS):
            with accelerator.accumulate(model):
                loss = mse_loss(model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

    return run


def main() -> None:
    torch.set_num_threads(1)
    x, y = torch.randn(8, 16), torch.randn(8, 1)
    seconds = alternate({"raw": raw_loop(x, y), "own": own_loop(x, y)}, rounds=21)
    emit("step", "us", seconds["raw"] / STEPS, seconds["own"] / STEPS)


if __name__ == "__main__":
    main()
