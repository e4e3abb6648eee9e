# SPDX-License-Identifier: Apache-2.0
"""A model on fake tensors: a copy without memory, and the loss among its outputs."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn


def fake_copy(model: nn.Module) -> nn.Module:
    """A copy of a model with fake tensors on the CPU; ties stay. Call it in a fake mode."""
    memo: dict[int, Any] = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        if id(tensor) in memo:
            continue
        value: Any = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
        if isinstance(tensor, nn.Parameter):
            value = nn.Parameter(value, requires_grad=tensor.requires_grad)
        memo[id(tensor)] = value
    return copy.deepcopy(model, memo)


def loss_of(outputs: Any) -> torch.Tensor:
    """The loss among a model's outputs; the mean of its first output if there is none."""
    loss = outputs.get("loss") if isinstance(outputs, dict) else getattr(outputs, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    while not isinstance(outputs, torch.Tensor):
        outputs = next(iter(outputs.values() if isinstance(outputs, dict) else outputs))
    return outputs if outputs.dim() == 0 else outputs.float().mean()
