# SPDX-License-Identifier: Apache-2.0
"""What becomes of gradients after a pipeline's backward: shards reduced, copies averaged, tied parameters summed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from ..fsdp import units

_BUCKET = 25 * 1024 * 1024


def local(tensor: Any) -> torch.Tensor:
    """This rank's part of a tensor (the same memory)."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def average(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Average gradients over copies of a stage, in messages of some 25 MB."""
    gradients = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    ranks = dist.get_world_size(group)
    flat, pending = [], []
    for bucket in _buckets(gradients):
        joined = (
            bucket[0].reshape(-1) if len(bucket) == 1 else torch.cat([gradient.reshape(-1) for gradient in bucket])
        )
        pending.append(dist.all_reduce(joined, group=group, async_op=True))
        flat.append((bucket, joined))
    for work, (bucket, joined) in zip(pending, flat, strict=True):
        work.wait()
        joined.div_(ranks)
        pieces = joined.split([gradient.numel() for gradient in bucket])
        torch._foreach_copy_(bucket, [piece.view_as(g) for piece, g in zip(pieces, bucket, strict=True)])


def _buckets(gradients: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Gradients of one device and dtype each, in their order."""
    found: list[list[torch.Tensor]] = []
    open_: dict[tuple[torch.device, torch.dtype], tuple[list[torch.Tensor], int]] = {}
    for gradient in gradients:
        kind = (gradient.device, gradient.dtype)
        bucket, size = open_.get(kind, ([], 0))
        if not bucket or size + gradient.nbytes > _BUCKET:
            bucket, size = [], 0
            found.append(bucket)
        bucket.append(gradient)
        open_[kind] = (bucket, size + gradient.nbytes)
    return found


class Ties:
    """Parameters that several stages hold: each gradient is the sum of theirs. The first of the ranks counts it."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self._held: list[tuple[nn.Module, str, tuple[int, ...]]] = []
        # Of those that perhaps no stage uses: owner and name.
        self._unsure: set[tuple[int, str]] = set()
        self._summed: dict[tuple[int, str], torch.Tensor] = {}

    def add(self, owner: nn.Module, name: str, ranks: Iterable[int], unsure: bool = False) -> None:
        """The parameter that stands at `owner.name`, now or later, is held by these ranks of the group.

        `unsure`: perhaps no stage uses it. Then it gets no gradient, as in a whole model.
        """
        if unsure:
            self._unsure.add((id(owner), name))
        self._held.append((owner, name, tuple(sorted(ranks))))

    def __len__(self) -> int:
        return len(self._held)

    def parameters(self) -> list[torch.Tensor]:
        return [owner._parameters[name] for owner, name, _ in self._held]  # type: ignore[misc]

    def twins(self) -> set[int]:
        """ids of the parameters that another rank counts."""
        return {id(owner._parameters[name]) for owner, name, ranks in self._held if ranks[0] != self.rank}

    def before(self) -> None:
        """A sum is carried on by the first of the ranks alone: the others begin anew."""
        for owner, name, ranks in self._held:
            gradient = owner._parameters[name].grad  # type: ignore[union-attr]
            if gradient is not None and gradient is self._summed.get((id(owner), name)) and ranks[0] != self.rank:
                local(gradient).zero_()
        self._summed.clear()

    def sum(self) -> None:
        for owner, name, ranks in self._held:
            parameter: Any = owner._parameters[name]
            if not parameter.requires_grad:
                continue
            if (id(owner), name) in self._unsure and not self._any_used(parameter, ranks):
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            self._sum(local(parameter.grad), ranks)
            self._summed[id(owner), name] = parameter.grad

    def _any_used(self, parameter: nn.Parameter, ranks: tuple[int, ...]) -> bool:
        """Whether the parameter has a gradient on one of the ranks."""
        flag = torch.tensor([parameter.grad is not None], dtype=torch.uint8, device=local(parameter).device)
        self._sum(flag, ranks)
        return bool(flag.item())

    def _sum(self, gradient: torch.Tensor, ranks: tuple[int, ...]) -> None:
        first = ranks[0]
        if self.rank != first:
            dist.send(gradient.contiguous(), group=self.group, group_dst=first)
            arrived = torch.empty_like(gradient, memory_format=torch.contiguous_format)
            dist.recv(arrived, group=self.group, group_src=first)
            gradient.copy_(arrived)
            return
        arrived = torch.empty_like(gradient, memory_format=torch.contiguous_format)
        for other in ranks[1:]:
            dist.recv(arrived, group=self.group, group_src=other)
            gradient.add_(arrived)
        total = gradient.contiguous()
        for other in ranks[1:]:
            dist.send(total, group=self.group, group_dst=other)


def hold_shards(stages: Iterable[nn.Module]) -> None:
    """Have sharded stages keep parameters whole, and gradients to themselves, from one part to the next."""
    for stage in stages:
        if isinstance(stage, FSDPModule):
            stage.set_is_last_backward(False)
            stage.set_reshard_after_backward(False)
            stage.set_requires_gradient_sync(False)


def reduce_shards(stages: Iterable[nn.Module]) -> None:
    """Reduce what sharded stages have accumulated, and give back the memory of their whole parameters.

    As torch's own pipeline schedules do at the end of a step (torch 2.13, `perform_reduce_grad`).
    """
    for stage in stages:
        if not isinstance(stage, FSDPModule):
            continue
        stage.set_is_last_backward(True)
        stage.set_reshard_after_backward(True)
        stage.set_requires_gradient_sync(True)
        root: Any = fully_shard.state(stage)  # type: ignore[attr-defined]
        for state in root._state_ctx.all_states:
            for group in units.groups(state):
                group.post_backward()
        # From torch 2.15 on this is None where the backward reached no unit: a frozen stage has nothing to finish.
        if getattr(root._state_ctx, "manual_backward_finalization_active", False) is not None:
            root._root_post_backward_final_callback()
