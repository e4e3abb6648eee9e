# SPDX-License-Identifier: Apache-2.0
"""This rank's gradients in any layout: reduced, multiplied by a number, clamped, unscaled; hooks that they lose."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from ..core.errors import PrepareError

if TYPE_CHECKING:
    from .prepared import CommunicationVolume

_BUCKET = 25 * 1024 * 1024
_REMEDY = "Change `parameter.grad` after `accelerator.backward` instead, where `accelerator.sync_gradients` is True"


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
    listed = [parameters] if isinstance(parameters, torch.Tensor) else parameters
    return [parameter.grad for parameter in listed if parameter.grad is not None]


def by_kind(tensors: Iterable[torch.Tensor]) -> dict[tuple[torch.device, torch.dtype], list[torch.Tensor]]:
    """The local tensors by device and dtype, for fused calls."""
    found: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        shard = local(tensor)
        found.setdefault((shard.device, shard.dtype), []).append(shard)
    return found


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a tensor (the same memory)."""
    shard: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return shard


@torch.no_grad()
def all_reduce(gradients: Iterable[torch.Tensor], group: dist.ProcessGroup | None, average: bool) -> None:
    """Sum or average plain tensors in place over the ranks of a group, in messages of about 25 MB."""
    pending = []
    for bucket in buckets(gradients):
        joined = bucket[0].reshape(-1) if len(bucket) == 1 else torch.cat([one.reshape(-1) for one in bucket])
        pending.append((bucket, joined, dist.all_reduce(joined, group=group, async_op=True)))
    for bucket, joined, work in pending:
        work.wait()
        if average:
            joined.div_(dist.get_world_size(group))
        pieces = joined.split([one.numel() for one in bucket])
        torch._foreach_copy_(bucket, [piece.view_as(one) for piece, one in zip(pieces, bucket, strict=True)])


def buckets(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Tensors by message: of one device and dtype each, in their order."""
    found: list[list[torch.Tensor]] = []
    open_: dict[tuple[torch.device, torch.dtype], tuple[list[torch.Tensor], int]] = {}
    for tensor in tensors:
        kind = (tensor.device, tensor.dtype)
        bucket, size = open_.get(kind, ([], 0))
        if not bucket or size + tensor.nbytes > _BUCKET:
            bucket, size = [], 0
            found.append(bucket)
        bucket.append(tensor)
        open_[kind] = (bucket, size + tensor.nbytes)
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


class AgreeingScaler(torch.amp.GradScaler):
    """Unscales this rank's local gradients; an overflow on one rank is one on all.

    torch's scaler rejects a mixture of plain tensors and DTensors, and combines only the ranks of the first gradient.
    """

    def __init__(self, scaler: torch.amp.GradScaler, device: torch.device) -> None:
        self.__dict__.update(scaler.__dict__)
        self._home = device

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, torch.Tensor]:
        gradients = gradients_of(parameter for group in optimizer.param_groups for parameter in group["params"])
        grouped = by_kind(gradient._values() if gradient.is_sparse else gradient for gradient in gradients)
        if not allow_fp16 and any(dtype is torch.float16 for _, dtype in grouped):
            raise ValueError("Attempting to unscale FP16 gradients.")
        flag = torch.zeros((), dtype=torch.float32, device=self._home)
        for (device, _), listed in grouped.items():
            found = torch.zeros((), dtype=torch.float32, device=device)
            torch._amp_foreach_non_finite_check_and_unscale_(listed, found, inv_scale.to(device))
            flag += found.to(self._home)
        # A rank without gradients of this optimizer takes part as well.
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return {self._home: flag}


def refuse_gradient_hooks(model: nn.Module, layout: str) -> None:
    """Raise PrepareError for parameters with hooks that `layout` would lose with them."""
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise PrepareError(
                f"{name} of {type(model).__name__} has a gradient hook, and {layout} replaces the parameter by its "
                f"shard: nothing would call the hook. {_REMEDY}"
            )


def refuse_later_hooks(parameters: Iterable[torch.Tensor], accumulated: bool = False) -> None:
    """Make `register_hook` of sharded parameters an error: the backward computes gradients of the gathered ones.

    With `accumulated` also `register_post_accumulate_grad_hook`, which FSDP2 calls with the reduced gradients.
    """
    names = ("register_hook", "register_post_accumulate_grad_hook") if accumulated else ("register_hook",)
    for parameter in parameters:
        vars(parameter).update({name: functools.partial(_refuse, name) for name in names})


def _refuse(name: str, hook: object) -> None:
    raise PrepareError(
        f"{name} on a parameter that FSDP shards: a backward computes gradients of the gathered parameter, and "
        f"nothing would call the hook. {_REMEDY}"
    )
