# SPDX-License-Identifier: Apache-2.0
"""Replicated data parallelism: torch's DistributedDataParallel."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from ...config.training import DistributedDataParallelKwargs
from ...core.enums import DDPCommunicationHookType
from ...precision.base import Precision
from ..base import Strategy
from ..prepared import CommunicationVolume, PreparedModel
from ..report import memory


class ReplicatedModel(PreparedModel):
    """A model that each process holds completely, inside torch's DDP where it has something to train.

    `element_size`: the bytes of a gradient's element as a communication hook sends it; None where no hook changes it.
    """

    def __init__(self, module: torch.nn.Module, precision: Precision, element_size: int | None = None) -> None:
        super().__init__(module, precision)
        self.element_size = element_size

    @property
    def inner(self) -> torch.nn.Module:
        replica = replica_of(self.module)
        return self.module if replica is None else replica.module

    def no_sync(self) -> contextlib.AbstractContextManager[Any]:
        replica = replica_of(self.module)
        return contextlib.nullcontext() if replica is None else replica.no_sync()

    def communication_volume(self, backwards: int) -> list[CommunicationVolume]:
        replica = replica_of(self.module)
        trained = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        if replica is None or not trained:
            return []
        sent = sum(parameter.numel() * (self.element_size or parameter.dtype.itemsize) for parameter in trained)
        buckets = max(1, -(-sent // replica.bucket_bytes_cap))
        return [CommunicationVolume("all-reduce of gradients", buckets, sent, about=True)]

    def memory_usage(self, windows: bool, seen: set[int] | None = None) -> dict[str, int]:
        found = super().memory_usage(windows, seen)
        replica = replica_of(self.module)
        if replica is not None and not replica.gradient_as_bucket_view:
            found[memory.BUCKETS] = found[memory.GRADIENTS]
        return found


class DataParallel(Strategy):
    """Each process holds the whole model and reads its shard of the data; gradients are averaged in the backward."""

    name = "DistributedDataParallel"

    def __init__(
        self,
        device: torch.device,
        precision: Precision,
        options: DistributedDataParallelKwargs | None = None,
    ) -> None:
        super().__init__(device, precision)
        self.options = options or DistributedDataParallelKwargs()

    @property
    def data_shard(self) -> tuple[int, int]:
        return dist.get_rank(), dist.get_world_size()

    def wrap_model(self, model: torch.nn.Module) -> torch.nn.Module:
        self.precision.cast_parameters(model)
        if not any(parameter.requires_grad for parameter in model.parameters()):
            # DDP refuses a model without anything to train; there is nothing to average either.
            return model
        wrapped = DistributedDataParallel(model, **self.arguments())
        self.options.register_comm_hook(wrapped)
        for master in self.precision.master_weights(model):
            # DDP gives every rank the first one's parameters, and knows nothing of these.
            dist.broadcast(master.data, src=0)
        return wrapped

    def as_prepared(self, module: torch.nn.Module) -> ReplicatedModel:
        return ReplicatedModel(module, self.precision, _sent_as(self.options.comm_hook))

    def arguments(self) -> dict[str, Any]:
        """What DDP is made with, beside the model."""
        arguments: dict[str, Any] = self.options.to_kwargs()
        if self.device.type not in ("cpu", "mps", "hpu"):
            arguments.update(device_ids=[self.device.index], output_device=self.device.index)
        return arguments

    @contextlib.contextmanager
    def join(self, joinables: list[Any], loaders: list[Any], even_batches: bool | None) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if even_batches is not None:
                for sampler in _map_style_samplers(loaders):
                    stack.callback(setattr, sampler, "even_batches", sampler.even_batches)
                    sampler.even_batches = even_batches
            stack.enter_context(Join([replica_of(item) or item for item in joinables]))
            yield

    def reduce_items(self, count: torch.Tensor) -> Any:
        return dist.all_reduce(count, async_op=True)


def replica_of(model: torch.nn.Module) -> DistributedDataParallel | None:
    """The DDP wrapper of a prepared model, also inside a compiled one; None where it has none."""
    inner = getattr(model, "_orig_mod", model)
    return inner if isinstance(inner, DistributedDataParallel) else None


def _sent_as(hook: DDPCommunicationHookType) -> int | None:
    """Bytes of an element on its way, where a hook changes it."""
    halves = (DDPCommunicationHookType.FP16, DDPCommunicationHookType.BF16)
    return 2 if hook in halves else None


@contextlib.contextmanager
def sync_in_backward(model: torch.nn.Module) -> Iterator[None]:
    """A block whose backward synchronizes gradients although the forward of the prepared model ran under `no_sync`."""
    replica = replica_of(model)
    if replica is None:
        yield
        return
    before = replica.require_backward_grad_sync, replica.require_forward_param_sync
    replica.require_backward_grad_sync = replica.require_forward_param_sync = True
    # What the forward would have done outside `no_sync`: make the reducer expect this backward's gradients.
    replica.reducer.prepare_for_backward([])
    try:
        yield
    finally:
        replica.require_backward_grad_sync, replica.require_forward_param_sync = before


def _map_style_samplers(loaders: list[Any]) -> list[Any]:
    """The batch samplers that can be even or not; loaders of iterable data cannot, which is said once."""
    found = []
    for loader in loaders:
        sampler = getattr(loader, "batch_sampler", None)
        if hasattr(sampler, "even_batches"):
            found.append(sampler)
        else:
            warnings.warn(
                "Overriding even_batches is only supported for map-style datasets; it is left as it is there."
            )
    return found
