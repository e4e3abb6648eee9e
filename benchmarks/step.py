# SPDX-License-Identifier: Apache-2.0
"""Overhead of a training step over plain PyTorch: Linear(16, 1), batch 8, SGD and LambdaLR, with `accumulate`.

Also what `resume()` adds to a step, and a deadline for stopping.
"""

from __future__ import annotations

import os
import tempfile
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


def stoppable_loop(
    folder: str, within: str | None = None, resumes: bool = True
) -> Callable[[], None]:
    """A loop over a prepared loader, which may stop on a signal. `within`: seconds from the signal to the end."""
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration

    os.environ.pop("ACCELERATE_STOP_WITHIN", None)
    if within is not None:
        os.environ["ACCELERATE_STOP_WITHIN"] = within
    project = ProjectConfiguration(folder, automatic_checkpoint_naming=True)
    accelerator = Accelerator(cpu=True, project_config=project)
    model, optimizer, scheduler = make_training()
    data = torch.utils.data.TensorDataset(torch.randn(STEPS, 16), torch.randn(STEPS, 1))
    loader = torch.utils.data.DataLoader(data)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    if resumes:
        accelerator.resume()

    def run() -> None:
        for x, y in loader:
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
    from accelerate import Accelerator

    if not hasattr(Accelerator, "resume"):
        return
    with tempfile.TemporaryDirectory() as folder:
        loops = {
            "plain": stoppable_loop(folder, resumes=False),
            "resumed": stoppable_loop(folder),
            "limited": stoppable_loop(folder, within="60"),
        }
        seconds = alternate(loops, rounds=21)
    plain, resumed, limited = (seconds[name] / STEPS for name in loops)
    emit("step after resume", "us", plain, resumed)
    emit("step with a deadline", "us", resumed, limited)


if __name__ == "__main__":
    main()
