# SPDX-License-Identifier: Apache-2.0
"""Trainable parameters that stay whole beside sharded ones: nobody but us averages their gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import nn

from ..base import Traffic


class WholeParameters:
    """By model, the parameters that each rank of a group holds whole: their gradients are averaged by us."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self._held: dict[int, list[nn.Parameter]] = {}
        self._deferred: set[int] = set()

    def add(self, model: nn.Module, parameters: Iterable[nn.Parameter]) -> None:
        self._held[id(model)] = [parameter for parameter in parameters if parameter.requires_grad]

    def traffic(self, model: nn.Module) -> list[Traffic]:
        """What averaging sends for a model in an optimizer step: a message a parameter."""
        held = self._held.get(id(model), [])
        sent = sum(parameter.nbytes for parameter in held)
        return [Traffic("all-reduce of gradients of whole parameters", len(held), sent)] if held else []

    @contextlib.contextmanager
    def deferred(self, model: object) -> Iterator[None]:
        """A block whose backwards leave the gradients of this model's parameters as they are."""
        self._deferred.add(id(model))
        try:
            yield
        finally:
            self._deferred.discard(id(model))

    def average(self) -> None:
        """Average the gradients over the group, but those of models that are deferred."""
        listed = [p for key, held in self._held.items() if key not in self._deferred for p in held]
        gradients = [parameter.grad for parameter in listed if parameter.grad is not None]
        ranks = dist.get_world_size(self.group)
        if not gradients or ranks == 1:
            return
        pending = [dist.all_reduce(gradient, group=self.group, async_op=True) for gradient in gradients]
        for work in pending:
            work.wait()
        torch._foreach_div_(gradients, float(ranks))
