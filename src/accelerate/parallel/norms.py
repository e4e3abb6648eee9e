# SPDX-License-Identifier: Apache-2.0
"""Norms and clipping of gradients that lie in different layouts: sharded, split, whole, in one model."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Placement, Replicate

from .gradients import by_kind, gradients_of, multiply


@torch.no_grad()
def clip_grad_norm(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    across: Sequence[dist.ProcessGroup] = (),
    device: torch.device | None = None,
    twins: Container[int] = (),
) -> torch.Tensor:
    """Scale gradients so that the norm of all of them together is at most `max_norm`; the norm before, on every rank.

    As `torch.nn.utils.clip_grad_norm_`, for any mixture of plain tensors (the same on each rank) and DTensors of any
    mesh and placement. `across` are groups whose ranks hold other parameters of the same model (pipeline stages), on
    `device`. `twins` are ids of parameters that another rank of these groups counts.
    """
    listed = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    counted = gradients_of(parameter for parameter in listed if id(parameter) not in twins)
    norm = total_norm(counted, norm_type, across, device)
    _scale(gradients_of(listed), norm, max_norm)
    return norm


@torch.no_grad()
def clip_parts_grad_norm(
    parts: Iterable[torch.Tensor],
    whole: Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float,
    group: dist.ProcessGroup,
    device: torch.device,
) -> torch.Tensor:
    """As `clip_grad_norm` where `parts` are plain tensors of which each rank of `group` holds its own, maybe none.

    `whole` are the same on each rank. The norm is in double precision: a rank without any knows no other's dtype.
    """
    norm_type = float(norm_type)
    dtype = torch.float32 if device.type == "mps" else torch.float64
    gradients, rest = gradients_of(parts), gradients_of(whole)
    norm = _reduce(total_norm(gradients, norm_type).to(device=device, dtype=dtype), norm_type, group)
    if rest:
        norm = _together(torch.stack([norm, total_norm(rest, norm_type).to(norm)]), norm_type)
    _scale([*gradients, *rest], norm, max_norm)
    return norm


def _scale(gradients: Sequence[torch.Tensor], norm: torch.Tensor, max_norm: float) -> None:
    multiply(gradients, torch.clamp(max_norm / (norm + 1e-6), max=1.0))


@torch.no_grad()
def clip_grad_value(parameters: torch.Tensor | Iterable[torch.Tensor], clip_value: float) -> None:
    """Clamp every element of every gradient to [-clip_value, clip_value], wherever it lies."""
    for tensors in by_kind(gradients_of(parameters)).values():
        torch._foreach_clamp_min_(tensors, -clip_value)
        torch._foreach_clamp_max_(tensors, clip_value)


@torch.no_grad()
def total_norm(
    gradients: Sequence[torch.Tensor],
    norm_type: float = 2.0,
    across: Sequence[dist.ProcessGroup] = (),
    device: torch.device | None = None,
) -> torch.Tensor:
    """The norm of all gradients as one vector. One scalar is reduced for each mesh dimension they are sharded over.

    `across` groups of ranks that hold others, on `device`, it is in double precision: no rank knows another's dtype.
    """
    norm_type = float(norm_type)
    parts = [_norm_of_layout(key, tensors, norm_type) for key, tensors in _by_layout(gradients).items()]
    if not parts:
        parts = [torch.zeros((), device=device or torch.device("cpu"))]
    norm = _together(torch.stack([part.to(parts[0]) for part in parts]), norm_type)
    if across:
        norm = norm.to(device, torch.float32 if device is not None and device.type == "mps" else torch.float64)
    for group in across:
        norm = _reduce(norm, norm_type, group)
    return norm


Layout = tuple[object, tuple[int, ...], torch.device, torch.dtype]


def _by_layout(gradients: Sequence[torch.Tensor]) -> dict[Layout, list[torch.Tensor]]:
    """Local parts of gradients by (mesh, sharded dimensions, device, dtype); mesh None for plain tensors."""
    found: dict[Layout, list[torch.Tensor]] = {}
    for gradient in gradients:
        mesh: object = None
        sharded: tuple[int, ...] = ()
        if isinstance(gradient, DTensor):
            if any(placement.is_partial() for placement in gradient.placements):
                gradient = gradient.redistribute(placements=[_whole(placement) for placement in gradient.placements])
            mesh = gradient.device_mesh
            sharded = tuple(i for i, placement in enumerate(gradient.placements) if not placement.is_replicate())
            gradient = gradient.to_local()
        found.setdefault((mesh, sharded, gradient.device, gradient.dtype), []).append(gradient)
    return found


def _whole(placement: Placement) -> Placement:
    return Replicate() if placement.is_partial() else placement


def _norm_of_layout(layout: Layout, tensors: list[torch.Tensor], norm_type: float) -> torch.Tensor:
    mesh, sharded, device, dtype = layout
    present = [tensor for tensor in tensors if tensor.numel()]
    if present:
        norm = _together(torch.stack(torch._foreach_norm(present, norm_type)), norm_type)
    else:
        norm = torch.zeros((), device=device, dtype=dtype)
    for dimension in sharded:
        norm = _reduce(norm, norm_type, mesh.get_group(dimension))  # type: ignore[attr-defined]
    return norm


def _together(norms: torch.Tensor, norm_type: float) -> torch.Tensor:
    return torch.linalg.vector_norm(norms, norm_type)


def _reduce(norm: torch.Tensor, norm_type: float, group: dist.ProcessGroup) -> torch.Tensor:
    """The norm over the ranks of a group, from each rank's own."""
    if math.isinf(norm_type):
        dist.all_reduce(norm, op=dist.ReduceOp.MAX, group=group)
        return norm
    powers = norm**norm_type
    dist.all_reduce(powers, group=group)
    return powers ** (1.0 / norm_type)
