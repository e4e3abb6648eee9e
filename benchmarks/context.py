# SPDX-License-Identifier: Apache-2.0
"""A step over one long sequence: on one process, and split over the ranks. Includes the communication volume.

Run `torchrun --nproc-per-node 2 benchmarks/context.py [length]`. Each process uses one thread.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from timing import alternate, emit

from accelerate import Accelerator
from accelerate.config.parallel import TorchContextParallelConfig
from accelerate.parallelism_config import ParallelismConfig
from accelerate.state import AcceleratorState

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "parallel"))
from llama import Llama, LlamaConfig

MODEL = LlamaConfig(vocabulary=256, width=256, hidden=512, layers=2, heads=8, kv_heads=2)


def build() -> tuple[Llama, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Llama(MODEL)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def plain_step(tokens: torch.Tensor) -> Callable[[], None]:
    """Train on rank 0 while the other ranks wait."""
    model, optimizer = build()

    def run() -> None:
        if dist.get_rank() == 0:
            F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
        dist.barrier()

    return run


def split_step(tokens: torch.Tensor, accelerator: Accelerator) -> Callable[[], None]:
    model, optimizer = accelerator.prepare(*build())

    def run() -> None:
        ids, labels = tokens[:, :-1].clone(), tokens[:, 1:].clone()
        with accelerator.maybe_context_parallel(
            [ids, labels], [1, 1], no_restore_buffers={ids, labels}
        ):
            accelerator.backward(F.cross_entropy(model(ids).flatten(0, 1), labels.flatten()))
        optimizer.step()
        optimizer.zero_grad()
        dist.barrier()

    return run


def layouts(ranks: int) -> dict[str, ParallelismConfig]:
    def context(strategy: str) -> ParallelismConfig:
        return ParallelismConfig(cp_size=ranks, cp_handler=TorchContextParallelConfig(strategy))

    return {
        "context, all-gather": context("allgather"),
        "context, ring": context("alltoall"),
        "sequence, all-to-all": ParallelismConfig(sp_size=ranks),
    }


def main() -> None:
    torch.set_num_threads(1)
    length = int(sys.argv[1]) if len(sys.argv) > 1 else 4096
    Accelerator(cpu=True)
    tokens = torch.randint(256, (1, length + 1), generator=torch.Generator().manual_seed(1))
    steps = {"plain": plain_step(tokens)}
    accelerators = {}
    for name, layout in layouts(dist.get_world_size()).items():
        AcceleratorState._reset_state()
        accelerators[name] = Accelerator(cpu=True, parallelism_config=layout)
        steps[name] = split_step(tokens, accelerators[name])
    seconds = alternate(steps, rounds=5, warmup=1)
    if dist.get_rank():
        return
    for name, accelerator in accelerators.items():
        volumes = accelerator.strategy.sequence.communication_volume(1)
        sent = {
            "messages": sum(each.messages for each in volumes),
            "bytes": sum(each.sent for each in volumes),
        }
        emit(f"{name}, {length} tokens", "ms", seconds["plain"], seconds[name], **sent)


if __name__ == "__main__":
    main()
