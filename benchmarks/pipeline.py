# SPDX-License-Identifier: Apache-2.0
"""Pipeline-parallel steps of a small Llama, compared with the same stages written in plain PyTorch.

The baseline uses one module per stage, torch's `PipelineStage` and `ScheduleGPipe` or `Schedule1F1B`, with the same
stages and micro-batches. The ranks of a gloo group run both in turn. The script prints nothing if the installed
`accelerate` does not support pipelines for training.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from timing import alternate, emit
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "parallel"))
from llama import Llama, LlamaConfig

BATCH, LENGTH, MICROBATCHES = 8, 64, 4
CONFIG = LlamaConfig(vocabulary=512, width=128, hidden=256, layers=4)


def make() -> nn.Module:
    torch.manual_seed(0)
    return Llama(CONFIG)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(
        CONFIG.vocabulary, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(0)
    )
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


class HandStage(nn.Module):
    """A pipeline stage with some of the layers."""

    def __init__(self, model: nn.Module, layers: range, first: bool, last: bool) -> None:
        super().__init__()
        self.embedding = model.embedding if first else None
        self.layers = nn.ModuleList(model.layers[number] for number in layers)
        self.norm, self.head = (model.norm, model.head) if last else (None, None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(LENGTH).expand(x.shape[0], -1)
        if self.embedding is not None:
            x = self.embedding(x)
        for layer in self.layers:
            x = layer(x, positions)
        return x if self.head is None else self.head(self.norm(x))


def by_hand(schedule: str, cut: list[int]) -> Callable[[], None]:
    """`cut` contains the first layer of each stage, then the number of layers."""
    from torch.distributed.pipelining import PipelineStage, schedules

    rank, ranks = dist.get_rank(), dist.get_world_size()
    layers = range(cut[rank], cut[rank + 1])
    module = HandStage(make(), layers, rank == 0, rank == ranks - 1)
    stage = PipelineStage(module, rank, ranks, torch.device("cpu"))
    run = getattr(schedules, schedule)(
        stage,
        MICROBATCHES,
        loss_fn=lambda logits, labels: F.cross_entropy(logits.flatten(0, 1), labels.flatten()),
    )
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    inputs, labels = batch()

    def step() -> None:
        # Broadcast the loss to every rank, as Accelerate does.
        losses: list[torch.Tensor] = []
        if rank == 0:
            run.step(inputs)
        elif rank == ranks - 1:
            run.step(target=labels, losses=losses, return_outputs=False)
        else:
            run.step()
        loss = torch.stack([each.detach() for each in losses]).mean() if losses else torch.zeros(())
        dist.broadcast(loss, src=ranks - 1)
        optimizer.step()
        optimizer.zero_grad()

    return step


def ours(schedule: str) -> tuple[Callable[[], None], list[int]]:
    from accelerate import Accelerator
    from accelerate.config.parallel import PipelineParallelConfig
    from accelerate.parallelism_config import ParallelismConfig
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state()
    handler = PipelineParallelConfig(
        schedule=schedule, num_microbatches=MICROBATCHES, gather_output=False, loss_reduction="mean"
    )
    layout = ParallelismConfig(
        pp_size=dist.get_world_size() if dist.is_initialized() else ranks(), pp_handler=handler
    )
    accelerator = Accelerator(cpu=True, parallelism_config=layout)
    model = make()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    inputs, labels = batch()

    def step() -> None:
        loss = model(inputs, labels=labels)[0]
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()

    stages: list[list[int]] = [[] for _ in range(layout.pp_size)]
    local = sorted(
        {
            int(name.split(".")[1])
            for name, _ in model.named_parameters()
            if name.startswith("layers.")
        }
    )
    dist.all_gather_object(stages, local)
    return step, [*(layers[0] for layers in stages), CONFIG.layers]


def ranks() -> int:
    return int(os.environ["WORLD_SIZE"])


def supports_pipelines() -> bool:
    """Return whether the installed `accelerate` supports pipelines for training."""
    from accelerate.parallelism_config import ParallelismConfig

    return "pp_size" in ParallelismConfig.__dataclass_fields__


def main() -> None:
    if not supports_pipelines():
        return
    torch.set_num_threads(1)
    for name, schedule in (("gpipe", "ScheduleGPipe"), ("1f1b", "Schedule1F1B")):
        own, cut = ours(name)
        seconds = alternate(
            {"raw": by_hand(schedule, cut), "own": own}, rounds=15, repeat=2, warmup=3
        )
        if dist.get_rank() == 0:
            emit(f"pipeline step, {name}, {ranks()} ranks", "ms", seconds["raw"], seconds["own"])
    dist.barrier()
    sys.stdout.flush()
    # A normal exit may abort in gloo's threads.
    os._exit(0)


if __name__ == "__main__":
    main()
