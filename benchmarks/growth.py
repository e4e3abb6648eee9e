# SPDX-License-Identifier: Apache-2.0
"""How cost grows: a step with the number of parameters, a loader with that of samples, a gather with that of tensors.

The gathers need two ranks, the others one process: `run.py` starts this script both ways.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
import torch.distributed as dist
from timing import alternate, emit
from torch.utils.data import DataLoader, TensorDataset

PARAMETERS = (10, 100, 1000)
SAMPLES = (1_000, 10_000, 100_000)
TENSORS = (1, 10, 100)
STEPS = 10


def step(
    count: int, prepare: Callable[..., tuple], backward: Callable[[torch.Tensor], None]
) -> Callable[[], None]:
    """Return a loop that trains a model with `count` small parameters."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4, bias=False) for _ in range(count)))
    model, optimizer = prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    x = torch.randn(8, 4)

    def run() -> None:
        for _ in range(STEPS):
            backward(model(x).sum())
            optimizer.step()
            optimizer.zero_grad()

    return run


def one_process() -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    for count in PARAMETERS:
        own = step(count, accelerator.prepare, accelerator.backward)
        raw = step(count, lambda *objects: objects, torch.Tensor.backward)
        seconds = alternate({"raw": raw, "own": own}, rounds=15)
        emit(
            f"growth: step, {count} parameters",
            "us",
            seconds["raw"] / STEPS,
            seconds["own"] / STEPS,
        )
    for count in SAMPLES:
        raw_loader = DataLoader(TensorDataset(torch.zeros(count, 4)), batch_size=64, shuffle=True)
        own_loader = accelerator.prepare(raw_loader)
        # The first batch: the order of the epoch is drawn before it.
        seconds = alternate(
            {"raw": lambda x=raw_loader: next(iter(x)), "own": lambda x=own_loader: next(iter(x))}
        )
        emit(f"growth: first batch, {count} samples", "us", seconds["raw"], seconds["own"])


def two_ranks() -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    for count in TENSORS:
        tensors = [torch.zeros(16, 4) for _ in range(count)]

        def raw(tensors: list[torch.Tensor] = tensors) -> None:
            for tensor in tensors:
                dist.all_gather(
                    [torch.empty_like(tensor) for _ in range(dist.get_world_size())], tensor
                )

        seconds = alternate({"raw": raw, "own": lambda x=tensors: accelerator.gather(x)}, rounds=15)
        if accelerator.is_main_process:
            emit(f"growth: gather, {count} tensors", "us", seconds["raw"], seconds["own"])
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    two_ranks() if int(os.environ.get("WORLD_SIZE", "1")) > 1 else one_process()
