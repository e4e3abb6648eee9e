# SPDX-License-Identifier: Apache-2.0
"""A model inside of torch's DistributedDataParallel: what DDP reduces, and what it would not reduce."""

from __future__ import annotations

import contextlib
from collections.abc import Collection

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ...core.objects import NullContext
from ...precision.base import Precision
from ...torch_internals import ddp
from ...torch_internals.compiled import uncompiled
from ..prepared import PreparedModel


class ReplicatedModel(PreparedModel):
    """A model of which each process has all parameters, inside torch's DDP if any of them trains.

    `element_size` is the size in bytes of a gradient's element that a communication hook sends; None without a hook.
    """

    def __init__(
        self, module: torch.nn.Module, precision: Precision, element_size: int | None = None
    ) -> None:
        super().__init__(module, precision)
        self.element_size = element_size
        self.has_run = False  # whether there was a backward
        # Parameters, by name, that DDP reduces, and the others, which were frozen when it was made.
        # Empty for a model that was prepared for evaluation.
        self.reduced: dict[str, torch.nn.Parameter] = {}
        self.frozen: dict[str, torch.nn.Parameter] = {}

    @property
    def inner(self) -> torch.nn.Module:
        """The module inside DDP."""
        replica = replica_of(self.module)
        return self.module if replica is None else replica.module

    @property
    def hooked(self) -> torch.nn.Module:
        """The user's model."""
        return self.inner

    @property
    def is_outgrown(self) -> bool:
        """Whether DDP reduces other parameters than the trainable ones, or there is no DDP although some do."""
        # XLA on one process has no group.
        return dist.is_initialized() and set(map(id, self._trained())) != set(
            map(id, self.reduced.values())
        )

    def watch(self) -> None:
        """Note which parameters DDP reduces, and whether a forward expects a backward."""
        replica = replica_of(self.module)
        ignored: Collection[str] = ()
        if replica is not None:
            ignored = replica.parameters_to_ignore
            replica.expects_backward = replica.syncs_late = False  # type: ignore[assignment]
            replica.register_forward_hook(_expect_backward)
        for name, parameter in self.inner.named_parameters():
            if name in ignored:
                continue
            if parameter.requires_grad:
                self.reduced[name] = parameter
            else:
                self.frozen[name] = parameter

    def _trained(self) -> dict[nn.Parameter, str]:
        """The trainable parameters that DDP does not ignore."""
        replica = replica_of(self.module)
        ignored = () if replica is None else replica.parameters_to_ignore
        return {
            p: name
            for name, p in self.inner.named_parameters()
            if p.requires_grad and name not in ignored
        }

    def new_parameters(self) -> dict[str, nn.Parameter]:
        """Trainable parameters that DDP does not know: it does not average their gradients."""
        if not dist.is_initialized() or not (self.reduced or self.frozen):
            return {}
        known = {id(p) for p in (*self.reduced.values(), *self.frozen.values())}
        return {name: p for p, name in self._trained().items() if id(p) not in known}

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """DDP's own `no_sync`.

        With `static_graph`, the first backward communicates nevertheless: DDP records the graph in it.
        """
        replica = replica_of(self.module)
        if replica is None or (replica.static_graph and not self.has_run):
            return NullContext()
        return replica.no_sync()


def _expect_backward(replica: DistributedDataParallel, *_: object) -> None:
    """A forward hook of DDP: it reduces the gradients of the backward that comes next."""
    if ddp.reduces(replica) and torch.is_grad_enabled():
        replica.expects_backward = True  # type: ignore[assignment]


def replica_of(model: object) -> DistributedDataParallel | None:
    """The DDP wrapper of a prepared model, also inside a compiled one; None where it has none."""
    inner = uncompiled(model)
    if isinstance(inner, DistributedDataParallel):
        return inner
    return None
