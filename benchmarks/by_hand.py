# SPDX-License-Identifier: Apache-2.0
"""Minimal tensor parallelism for the small Llama: plain tensors and two autograd functions."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn


class AllReduceBackward(torch.autograd.Function):
    """Identity in the forward pass, all-reduce of the gradient in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)
        return gradient


class AllReduceForward(torch.autograd.Function):
    """All-reduce in the forward pass, identity in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def split(model: nn.Module) -> nn.Module:
    """Replace the matrices of each block of `examples/parallel/llama.py` by the shards of this rank, in place."""
    size = dist.get_world_size()
    for layer in model.layers:
        layer.attention.num_heads //= size
        layer.attention.num_kv_heads //= size
        _split(layer.attention, ("q_proj", "k_proj", "v_proj"), "o_proj")
        _split(layer.mlp, ("gate_proj", "up_proj"), "down_proj")
    return model


def _split(module: nn.Module, columns: tuple[str, ...], row: str) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for name, dimension in (*((name, 0) for name in columns), (row, 1)):
        linear = getattr(module, name)
        linear.weight = nn.Parameter(linear.weight.detach().chunk(size, dimension)[rank].clone())
    module.register_forward_pre_hook(lambda _, args: (AllReduceBackward.apply(args[0]), *args[1:]))
    getattr(module, row).register_forward_hook(
        lambda _, args, output: AllReduceForward.apply(output)
    )
