# SPDX-License-Identifier: Apache-2.0
"""Norms of gradients in different layouts (sharded, split, replicated) of one model, and clipping by the norm."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from .gradients import gradients_of, multiply


@torch.no_grad()
def clip_grad_norm(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    across: Sequence[dist.ProcessGroup] = (),
    device: torch.device | None = None,
    twins: Container[int] = (),
) -> torch.Tensor:
    """Scale gradients so that their total norm is at most `max_norm`; returns the norm before, on every rank.

    As `torch.nn.utils.clip_grad_norm_`, for any mixture of plain tensors (the same on each rank) and DTensors of any
    mesh and placement. `across` are groups whose ranks have other parameters of the same model (pipeline stages, flat
    shards), on `device`. `twins` are ids of parameters that another rank of these groups counts.
    """
    if isinstance(parameters, torch.Tensor):
        listed = [parameters]
    else:
        listed = list(parameters)
    counted = gradients_of(parameter for parameter in listed if id(parameter) not in twins)
    norm = total_norm(counted, norm_type, across, device)
    multiply(gradients_of(listed), torch.clamp(max_norm / (norm + 1e-6), max=1.0))
    return norm


@torch.no_grad()
def total_norm(
    gradients: Sequence[torch.Tensor],
    norm_type: float = 2.0,
    across: Sequence[dist.ProcessGroup] = (),
    device: torch.device | None = None,
) -> torch.Tensor:
    """The norm of all gradients as one vector. One scalar is reduced for each mesh dimension they are sharded over.

    With `across` (groups whose ranks have other gradients) the norm is on `device` in double precision, as no rank
    knows the dtype of the others.
    """
    norm_type = float(norm_type)
    partial_norms = []
    for (mesh, sharded, kind, dtype), tensors in _by_layout(gradients).items():
        present = [tensor for tensor in tensors if tensor.numel()]
        if present:
            one = torch.nn.utils.get_total_norm(present, norm_type)
        else:
            one = torch.zeros((), device=kind, dtype=dtype)
        for dimension in sharded:
            one = _reduce(one, norm_type, mesh.get_group(dimension))  # type: ignore[union-attr]
        partial_norms.append(one)
    if not partial_norms:
        partial_norms = [torch.zeros((), device=device or torch.device("cpu"))]
    partial = torch.stack([one.to(partial_norms[0]) for one in partial_norms])
    norm: torch.Tensor = torch.linalg.vector_norm(partial, norm_type)
    if across:
        norm = norm.to(
            device, torch.float32 if device is not None and device.type == "mps" else torch.float64
        )
    for group in across:
        norm = _reduce(norm, norm_type, group)
    return norm


Layout = tuple[dist.DeviceMesh | None, tuple[int, ...], torch.device, torch.dtype]


def _by_layout(gradients: Sequence[torch.Tensor]) -> dict[Layout, list[torch.Tensor]]:
    """Local gradients by (mesh, sharded dimensions, device, dtype); mesh None for plain tensors."""
    found: dict[Layout, list[torch.Tensor]] = {}
    for gradient in gradients:
        mesh: dist.DeviceMesh | None = None
        sharded: tuple[int, ...] = ()
        if isinstance(gradient, DTensor):
            if any(placement.is_partial() for placement in gradient.placements):
                reduced = [
                    Replicate() if placement.is_partial() else placement
                    for placement in gradient.placements
                ]
                gradient = gradient.redistribute(placements=reduced)
            mesh = gradient.device_mesh
            sharded = tuple(
                i for i, placement in enumerate(gradient.placements) if not placement.is_replicate()
            )
            gradient = gradient.to_local()
        found.setdefault((mesh, sharded, gradient.device, gradient.dtype), []).append(gradient)
    return found


def _reduce(norm: torch.Tensor, norm_type: float, group: dist.ProcessGroup) -> torch.Tensor:
    """The norm over the ranks of a group, from each rank's own."""
    if math.isinf(norm_type):
        dist.all_reduce(norm, op=dist.ReduceOp.MAX, group=group)
        return norm
    powers = norm**norm_type
    dist.all_reduce(powers, group=group)
    return powers ** (1.0 / norm_type)
