# SPDX-License-Identifier: Apache-2.0
"""This rank's gradients in any layout: grouped for fused calls, multiplied by a number, clamped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch


def gradients_of(parameters: torch.Tensor | Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The gradients of those parameters that have one."""
    listed = [parameters] if isinstance(parameters, torch.Tensor) else parameters
    return [parameter.grad for parameter in listed if parameter.grad is not None]


def by_kind(tensors: Iterable[torch.Tensor]) -> dict[tuple[torch.device, torch.dtype], list[torch.Tensor]]:
    """The local tensors by device and dtype, for fused calls."""
    found: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        found.setdefault((local.device, local.dtype), []).append(local)
    return found


@torch.no_grad()
def multiply(tensors: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply tensors in place by a number (a tensor of one element), in one fused call for each kind of them."""
    # What is on the host costs nothing to look at.
    if factor.device.type == "cpu" and factor.item() == 1:
        return
    for (device, dtype), found in by_kind(tensors).items():
        torch._foreach_mul_(found, factor.to(device=device, dtype=dtype))


@torch.no_grad()
def clip_values(tensors: Iterable[torch.Tensor], limit: float) -> None:
    """Clamp every element of tensors in place to [-limit, limit], in fused calls."""
    for found in by_kind(tensors).values():
        torch._foreach_clamp_min_(found, -limit)
        torch._foreach_clamp_max_(found, limit)
