# SPDX-License-Identifier: Apache-2.0
"""The small llama split over tensor-parallel ranks by hand: two autograd functions and plain tensors, nothing else."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn


class SumBack(torch.autograd.Function):
    """What enters a split: the same on every rank; its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)
        return gradient


class Sum(torch.autograd.Function):
    """What leaves a split: the sum over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def split(model: nn.Module) -> nn.Module:
    """The model of `examples/parallel/llama.py` with this rank's part of each block's matrices, in place."""
    size = dist.get_world_size()
    for layer in model.layers:
        layer.attention.num_heads //= size
        layer.attention.num_kv_heads //= size
        _split(layer.attention, ("q_proj", "k_proj", "v_proj"), "o_proj")
        _split(layer.mlp, ("gate_proj", "up_proj"), "down_proj")
    return model


def _split(part: nn.Module, columns: tuple[str, ...], row: str) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for name, dimension in (*((name, 0) for name in columns), (row, 1)):
        linear = getattr(part, name)
        linear.weight = nn.Parameter(linear.weight.detach().chunk(size, dimension)[rank].clone())
    part.register_forward_pre_hook(lambda module, args: (SumBack.apply(args[0]), *args[1:]))
    getattr(part, row).register_forward_hook(lambda module, args, output: Sum.apply(output))
