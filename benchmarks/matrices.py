# SPDX-License-Identifier: Apache-2.0
"""A step of Muon under DDP. In the raw loop, which is torch's own, every rank computes the updates of all matrices."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
import torch.distributed as dist
from timing import alternate, emit
from torch import nn

from accelerate import Accelerator

WIDTH, LAYERS, BATCH = 384, 8, 8


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    return model, torch.optim.Muon(model.parameters(), lr=0.01)


def step_of(
    model: nn.Module, optimizer: torch.optim.Optimizer, backward: Callable[[torch.Tensor], None]
) -> Callable[[], None]:
    x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))

    def run() -> None:
        backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        dist.barrier()

    return run


def main() -> None:
    torch.set_num_threads(1)
    # The other package has no such function.
    with contextlib.suppress(ImportError):
        from accelerate.utils import register_matrix_optimizer

        register_matrix_optimizer(torch.optim.Muon)
    accelerator = Accelerator(cpu=True)
    model, optimizer = build()
    model = nn.parallel.DistributedDataParallel(model)
    raw = step_of(model, optimizer, torch.Tensor.backward)
    own = step_of(*accelerator.prepare(*build()), accelerator.backward)
    seconds = alternate({"raw": raw, "own": own}, rounds=15)
    if dist.get_rank() == 0:
        emit("muon step", "ms", seconds["raw"], seconds["own"])


if __name__ == "__main__":
    main()
