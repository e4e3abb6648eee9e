# SPDX-License-Identifier: Apache-2.0
"""Plan a device map for models of 5,000 modules: half on the CPU and half on disk, and all on the CPU."""

from __future__ import annotations

import functools

import torch
from timing import alternate, emit
from torch import nn

from accelerate import infer_auto_device_map

ROUNDS = 5


class Block(nn.Module):
    """A block of a transformer: nine modules, with small weights, since only their number counts."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("query", "key", "value", "output"):
            self.add_module(name, nn.Linear(8, 8))
        self.up, self.activation, self.down = nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)
        self.norm1, self.norm2 = nn.LayerNorm(8), nn.LayerNorm(8)


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(500))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 64, bias=False)
        self.head.weight = self.embedding.weight


def group() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))


def main() -> None:
    with torch.device("meta"):
        models: dict[str, tuple[nn.Module, dict[str, list[str]]]] = {
            "transformer": (Transformer(), {"no_split_module_classes": ["Block"]}),
            "transformer, split": (Transformer(), {}),
            "nested": (
                nn.Sequential(*(nn.Sequential(*(group() for _ in range(10))) for _ in range(122))),
                {},
            ),
            "flat": (nn.Sequential(*(nn.Linear(8, 8) for _ in range(5000))), {}),
        }
    for name, (model, options) in models.items():
        size = sum(parameter.nbytes for parameter in model.parameters())
        plan = functools.partial(infer_auto_device_map, model, **options)
        runs = {
            "half": functools.partial(plan, max_memory={"cpu": size // 2}),
            "all": functools.partial(plan, max_memory={"cpu": 2 * size}),
        }
        for part, seconds in alternate(runs, rounds=ROUNDS, warmup=1).items():
            emit(f"device map: {name}, {part}", "ms", None, seconds)


if __name__ == "__main__":
    main()
