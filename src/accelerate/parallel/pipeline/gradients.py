# SPDX-License-Identifier: Apache-2.0
"""Gradients after a pipeline's backward: FSDP2 shards reduced, tied parameters summed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from ..fsdp import units
from ..gradients import local


@dataclass(frozen=True)
class _TiedParameter:
    """A parameter at `owner.name` on several ranks. `maybe_unused`: then it gets no gradient, as in a plain model."""

    owner: nn.Module
    name: str
    ranks: tuple[int, ...]
    maybe_unused: bool

    @property
    def parameter(self) -> nn.Parameter:
        found = self.owner._parameters[self.name]
        assert found is not None
        return found


class TiedParameters:
    """Parameters on stages of several ranks, each gradient the sum over them. The first rank counts it in norms."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank: int = dist.get_rank(group)
        self._tied: list[_TiedParameter] = []
        self._summed: list[torch.Tensor | None] = []

    def add(self, owner: nn.Module, name: str, ranks: Iterable[int], maybe_unused: bool = False) -> None:
        """The parameter at `owner.name`, now or later, is on these ranks of the group."""
        self._tied.append(_TiedParameter(owner, name, tuple(sorted(ranks)), maybe_unused))
        self._summed.append(None)

    def parameters(self) -> list[nn.Parameter]:
        """Return the tied parameters of this rank."""
        return [tied.parameter for tied in self._tied]

    def counted_elsewhere(self) -> set[int]:
        """Return the ids of the parameters that another rank counts."""
        return {id(tied.parameter) for tied in self._tied if tied.ranks[0] != self.rank}

    def before_backward(self) -> None:
        """Only the first rank keeps a sum to accumulate on; the others start from zero."""
        for number, tied in enumerate(self._tied):
            gradient = tied.parameter.grad
            if gradient is not None and gradient is self._summed[number] and tied.ranks[0] != self.rank:
                local(gradient).zero_()
            self._summed[number] = None

    def sum(self) -> None:
        """Sum the gradients of each tied parameter over its ranks."""
        for number, tied in enumerate(self._tied):
            parameter = tied.parameter
            if not parameter.requires_grad or (tied.maybe_unused and not self._any_used(parameter, tied.ranks)):
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            self._sum(local(parameter.grad), tied.ranks)
            self._summed[number] = parameter.grad

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


def defer_reduction(stages: Iterable[nn.Module]) -> None:
    """Have FSDP2 keep parameters and gradients of the stages unsharded from one micro-batch to the next."""
    for stage in stages:
        if isinstance(stage, FSDPModule):
            stage.set_is_last_backward(False)
            stage.set_reshard_after_backward(False)
            stage.set_requires_gradient_sync(False)


def reduce_shards(stages: Iterable[nn.Module]) -> None:
    """Reduce-scatter the accumulated gradients of stages that FSDP2 shards, and reshard their parameters.

    As torch's pipeline schedules do at the end of a step (torch 2.13, `perform_reduce_grad`).
    """
    for stage in stages:
        if not isinstance(stage, FSDPModule):
            continue
        stage.set_is_last_backward(True)
        stage.set_reshard_after_backward(True)
        stage.set_requires_gradient_sync(True)
        root = stage._get_fsdp_state()
        for state in root._state_ctx.all_states:
            for group in units.groups(state):
                group.post_backward()
        # From torch 2.15 on this is None where the backward reached no unit: a frozen stage has nothing to finish.
        if getattr(root._state_ctx, "manual_backward_finalization_active", False) is not None:
            root._root_post_backward_final_callback()
