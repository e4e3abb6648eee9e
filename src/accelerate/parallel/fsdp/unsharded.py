# SPDX-License-Identifier: Apache-2.0
"""Trainable parameters of a sharded model that each rank holds completely: FSDP does not average their gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import nn

from ..prepared import CommunicationVolume


class UnshardedParameters:
    """The parameters of one model whose gradients are averaged over `group` (None: all ranks) by us."""

    def __init__(self, group: dist.ProcessGroup | None, parameters: Iterable[nn.Parameter] = ()) -> None:
        self.group = group
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._is_deferred = False

    def communication_volume(self) -> list[CommunicationVolume]:
        """What averaging sends in an optimizer step: a message a parameter."""
        if not self.parameters:
            return []
        sent = sum(parameter.nbytes for parameter in self.parameters)
        return [CommunicationVolume("all-reduce of gradients of unsharded parameters", len(self.parameters), sent)]

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """A block whose backwards leave the gradients of these parameters as they are."""
        before, self._is_deferred = self._is_deferred, True
        try:
            yield
        finally:
            self._is_deferred = before

    def average(self) -> None:
        """Average the gradients over the group, unless they are deferred."""
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        if self._is_deferred or not gradients:
            return
        ranks = dist.get_world_size(self.group)
        if ranks == 1:
            return
        pending = [dist.all_reduce(gradient, group=self.group, async_op=True) for gradient in gradients]
        for work in pending:
            work.wait()
        torch._foreach_div_(gradients, float(ranks))
