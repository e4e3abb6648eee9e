# SPDX-License-Identifier: Apache-2.0
"""Gradients in any layout: reduced, multiplied by a number, clamped, unscaled, and their norms."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..optimizer import parameters_of
from ..torch_internals import foreach
from ..torch_internals.grad_scaler import UnscalingScaler
from .report.figures import CommunicationVolume

_BUCKET = 25 * 1024 * 1024

Kind = tuple[torch.device, torch.dtype]
# The mesh, its dimensions over which tensors are sharded, device and dtype. Some builds of torch have no meshes.
Layout = tuple[Any, tuple[int, ...], torch.device, torch.dtype]


class GradientReducer:
    """Reduces gradients of a model that the backward itself leaves unreduced.

    `is_deferred`: the backward is not the last one of its accumulation window.
    """

    is_deferred = False

    def finish(self) -> None:
        """Reduce what has accumulated, after each backward that is not deferred."""

    def communication_volume(self) -> list[CommunicationVolume]:
        """What this sends in an optimizer step."""
        return []


class UnreducedGradients(GradientReducer):
    """Averages gradients that no backward reduces over `group` (None: all), as of parameters FSDP does not shard."""

    def __init__(
        self, group: dist.ProcessGroup | None, parameters: Iterable[nn.Parameter] = ()
    ) -> None:
        self.group = group
        self.parameters: list[nn.Parameter] = list(parameters)

    def communication_volume(self) -> list[CommunicationVolume]:
        """What averaging sends in an optimizer step."""
        trained = [parameter for parameter in self.parameters if parameter.requires_grad]
        if not trained:
            return []
        shards = list(map(local, trained))
        sent = sum(shard.nbytes for shard in shards)
        what = "all-reduce of gradients of unsharded parameters"
        return [CommunicationVolume(what, len(buckets(shards)), sent)]

    def finish(self) -> None:
        """Average the gradients over the group."""
        if dist.get_world_size(self.group) > 1:
            shards = map(local, gradients_of(self.parameters))
            all_reduce(shards, self.group, average=True)


@contextlib.contextmanager
def deferred(reducers: Iterable[GradientReducer]) -> Iterator[None]:
    """A block whose backwards leave gradients to a later one; blocks may be nested."""
    before = [(reducer, reducer.is_deferred) for reducer in reducers]
    for reducer, _ in before:
        reducer.is_deferred = True
    try:
        yield
    finally:
        for reducer, was_deferred in before:
            reducer.is_deferred = was_deferred


def finish(reducers: Iterable[GradientReducer]) -> None:
    """Reduce the gradients of a backward, unless they are deferred."""
    for reducer in reducers:
        if not reducer.is_deferred:
            reducer.finish()


def gradients_of(parameters: torch.Tensor | Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The gradients of those parameters that have one."""
    if isinstance(parameters, torch.Tensor):
        parameters = [parameters]
    gradients = []
    for parameter in parameters:
        if parameter.grad is not None:
            gradients.append(parameter.grad)
    return gradients


def by_kind(tensors: Iterable[torch.Tensor]) -> dict[Kind, list[torch.Tensor]]:
    """The local tensors by device and dtype, for fused calls."""
    shards: dict[Kind, list[torch.Tensor]] = {}
    for tensor in tensors:
        shard = local(tensor)
        kind = (shard.device, shard.dtype)
        shards.setdefault(kind, []).append(shard)
    return shards


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a tensor (the same memory)."""
    if hasattr(tensor, "to_local"):
        shard: torch.Tensor = tensor.to_local()
        return shard
    return tensor


@torch.no_grad()
def all_reduce(
    gradients: Iterable[torch.Tensor], group: dist.ProcessGroup | None, average: bool
) -> None:
    """Sum or average plain tensors in place over the ranks of a group, in messages of about 25 MiB."""
    pending = []
    for bucket in buckets(gradients):
        if len(bucket) == 1:
            joined = bucket[0].reshape(-1)
        else:
            joined = torch.cat([gradient.reshape(-1) for gradient in bucket])
        work = dist.all_reduce(joined, group=group, async_op=True)
        pending.append((bucket, joined, work))
    for bucket, joined, work in pending:
        work.wait()
        if average:
            joined.div_(dist.get_world_size(group))
        pieces = joined.split([gradient.numel() for gradient in bucket])
        reduced = list(map(torch.Tensor.view_as, pieces, bucket))
        foreach.copy_(bucket, reduced)


@torch.no_grad()
def average(parameters: Sequence[nn.Parameter], device: torch.device) -> None:
    """Average gradients over all ranks. Where some ranks have no gradient of a parameter, theirs counts as zero."""
    has_gradient = [parameter.grad is not None for parameter in parameters]
    ranks_with_gradient = torch.tensor(has_gradient, dtype=torch.int32, device=device)
    dist.all_reduce(ranks_with_gradient)
    for parameter, count in zip(parameters, ranks_with_gradient.tolist(), strict=True):
        if count and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    all_reduce(gradients_of(parameters), None, average=True)


def buckets(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Tensors by message: of one device and dtype each, in their order."""
    messages: list[list[torch.Tensor]] = []
    for listed in by_kind(tensors).values():
        size = math.inf
        for tensor in listed:
            size += tensor.nbytes
            if size > _BUCKET:
                messages.append([])
                size = tensor.nbytes
            messages[-1].append(tensor)
    return messages


@torch.no_grad()
def multiply(tensors: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply tensors in place by a number (a tensor of one element), in one fused call for each kind of them."""
    # What is on the host costs nothing to look at.
    if factor.device.type == "cpu" and factor.item() == 1:
        return
    for (device, dtype), shards in by_kind(tensors).items():
        foreach.mul_(shards, factor.to(device=device, dtype=dtype))


@torch.no_grad()
def clip_grad_norm(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    across: Sequence[dist.ProcessGroup] = (),
    device: torch.device | None = None,
    twins: Collection[int] = (),
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
    gradients = gradients_of(listed)
    counted = gradients
    if twins:
        counted = gradients_of(parameter for parameter in listed if id(parameter) not in twins)
    norm = total_norm(counted, norm_type, across, device)
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    multiply(gradients, factor)
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
        partial = torch.zeros((), device=kind, dtype=dtype)
        if present:
            partial = torch.nn.utils.get_total_norm(present, norm_type)
        for dimension in sharded:
            group = mesh.get_group(dimension)
            partial = _reduce_norm(partial, norm_type, group)
        partial_norms.append(partial)
    if not partial_norms:
        partial_norms.append(torch.zeros((), device=device or "cpu"))
    first = partial_norms[0]
    stacked = torch.stack([partial.to(first) for partial in partial_norms])
    norm: torch.Tensor = torch.linalg.vector_norm(stacked, norm_type)
    if across:
        dtype = torch.float64
        if device is not None and device.type == "mps":
            dtype = torch.float32
        norm = norm.to(device, dtype)
    for group in across:
        norm = _reduce_norm(norm, norm_type, group)
    return norm


def _by_layout(gradients: Sequence[torch.Tensor]) -> dict[Layout, list[torch.Tensor]]:
    """Local gradients by (mesh, sharded dimensions, device, dtype); mesh None for plain tensors."""
    groups: dict[Layout, list[torch.Tensor]] = {}
    for gradient in gradients:
        mesh: dist.DeviceMesh | None = getattr(gradient, "device_mesh", None)
        sharded: list[int] = []
        for dimension, placement in enumerate(getattr(gradient, "placements", ())):
            if placement.is_partial():
                gradient = _reduced(gradient, dimension)
            elif not placement.is_replicate():
                sharded.append(dimension)
        shard = local(gradient)
        layout = (mesh, tuple(sharded), shard.device, shard.dtype)
        groups.setdefault(layout, []).append(shard)
    return groups


def _reduced(gradient: Any, dimension: int) -> Any:
    """A DTensor that is a sum over a dimension of its mesh, with that sum on each rank."""
    from torch.distributed.tensor import Replicate

    placements = list(gradient.placements)
    placements[dimension] = Replicate()
    return gradient.redistribute(placements=placements)


def _reduce_norm(norm: torch.Tensor, norm_type: float, group: dist.ProcessGroup) -> torch.Tensor:
    """The norm over the ranks of a group, from each rank's own."""
    if math.isinf(norm_type):
        dist.all_reduce(norm, op=dist.ReduceOp.MAX, group=group)
        return norm
    powers = norm**norm_type
    dist.all_reduce(powers, group=group)
    return powers ** (1.0 / norm_type)


@torch.no_grad()
def clip_values(tensors: Iterable[torch.Tensor], limit: float) -> None:
    """Clamp every element of tensors in place to [-limit, limit]."""
    for tensor in tensors:
        local(tensor).clamp_(-limit, limit)


def not_finite(gradients: Iterable[torch.Tensor], device: torch.device) -> torch.Tensor:
    """More than 0 if an element of this rank's gradients is not finite: a number on `device`, not waited for."""
    flag = torch.zeros((), dtype=torch.float32, device=device)
    for listed in by_kind(map(_dense, gradients)).values():
        # The largest value is not finite if any is not. A shard without elements has none.
        filled = [tensor for tensor in listed if tensor.numel()]
        if filled:
            largest = torch.nn.utils.get_total_norm(filled, math.inf)
            flag += (~torch.isfinite(largest)).to(device)
    return flag


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    """The elements that a gradient stores."""
    if gradient.is_sparse:
        return gradient.coalesce().values()
    return gradient


class AgreeingScaler(UnscalingScaler):
    """Unscales this rank's local gradients; an overflow on one rank is one on all.

    torch's scaler rejects a mixture of plain tensors and DTensors, and combines only the ranks of the first gradient.
    """

    def __init__(self, scaler: torch.amp.GradScaler, device: torch.device) -> None:
        self.__dict__.update(scaler.__dict__)
        self._home = device

    def unscale_gradients(
        self, optimizer: torch.optim.Optimizer, inverse_scale: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        """Multiply this rank's gradients in place; returns whether some on any rank are not finite."""
        parameters = parameters_of(optimizer)
        for parameter in parameters:
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.coalesce()
        gradients = gradients_of(parameters)
        for (device, dtype), listed in by_kind(map(_dense, gradients)).items():
            if dtype is torch.float16 and not allow_fp16:
                raise ValueError("Attempting to unscale FP16 gradients.")
            foreach.mul_(listed, inverse_scale.to(device))
        flag = not_finite(gradients, self._home)
        # A rank without gradients of this optimizer takes part as well.
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return {self._home: flag}
