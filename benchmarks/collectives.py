# SPDX-License-Identifier: Apache-2.0
"""Gathers of a tensor, a nested batch and objects between two gloo ranks, compared with one plain collective."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from timing import alternate, emit

ROUNDS = 41
REPEAT = 25

# torch 2.13 renamed all_gather_into_tensor to all_gather_single.
gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def raw_gather(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    def run() -> torch.Tensor:
        out = torch.empty(
            dist.get_world_size() * tensor.shape[0], *tensor.shape[1:], dtype=tensor.dtype
        )
        gather_flat(out, tensor)
        return out

    return run


def raw_gather_object(value: object) -> Callable[[], list[object]]:
    def run() -> list[object]:
        out: list[object] = [None] * dist.get_world_size()
        dist.all_gather_object(out, value)
        return out

    return run


def nested_batch() -> dict[str, object]:
    """Return eight tensors, nested like the output of an evaluation step."""
    return {
        "logits": torch.randn(16, 10),
        "labels": torch.randint(0, 10, (16,)),
        "loss": torch.randn(16),
        "mask": torch.ones(16, 32, dtype=torch.bool),
        "ids": torch.randint(0, 1000, (16, 32)),
        "hidden": [torch.randn(16, 64), torch.randn(16, 64)],
        "weights": torch.randn(16, 4).to(torch.bfloat16),
    }


def total_bytes(data: object) -> int:
    if isinstance(data, torch.Tensor):
        return data.numel() * data.element_size()
    values = data.values() if isinstance(data, dict) else data
    return sum(total_bytes(value) for value in values)  # type: ignore[attr-defined]


def measure(
    name: str, raw: Callable[[], object], own: Callable[[], object], repeat: int = REPEAT
) -> None:
    seconds = alternate({"raw": raw, "own": own}, rounds=ROUNDS, repeat=repeat)
    if dist.get_rank() == 0:
        emit(name, "us", seconds["raw"], seconds["own"])


def main() -> None:
    from accelerate import PartialState
    from accelerate.utils import gather, gather_object

    torch.set_num_threads(1)
    PartialState(cpu=True)
    tensor = torch.randn(32, 128)
    measure("gather", raw_gather(tensor), lambda: gather(tensor))
    large = torch.randn(1024, 1024)
    measure("gather large", raw_gather(large), lambda: gather(large), repeat=3)
    batch = nested_batch()
    same_bytes = torch.zeros(total_bytes(batch), dtype=torch.uint8)
    measure("gather nested", raw_gather(same_bytes), lambda: gather(batch))
    small = [{"id": index, "text": "a short line of text", "score": 0.5} for index in range(8)]
    measure("gather_object", raw_gather_object(small), lambda: gather_object(small))
    long = [
        {"id": index, "text": "a longer line of text " * 20, "score": 0.5} for index in range(500)
    ]
    measure("gather_object large", raw_gather_object(long), lambda: gather_object(long), repeat=5)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
