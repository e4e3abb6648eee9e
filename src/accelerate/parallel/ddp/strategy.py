# SPDX-License-Identifier: Apache-2.0
"""Replicated data parallelism: torch's DistributedDataParallel."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from ...config.training import DistributedDataParallelKwargs
from ...core.enums import DDPCommunicationHookType
from ...precision.base import Precision
from ..base import Strategy, Traffic
from ..report import memory


class DataParallel(Strategy):
    """Each process holds the whole model and reads its part of the data; gradients are averaged in the backward."""

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
        self.precision.lower(model)
        if not any(parameter.requires_grad for parameter in model.parameters()):
            # DDP refuses a model without anything to train; there is nothing to average either.
            return model
        wrapped = DistributedDataParallel(model, **self.arguments())
        self.options.register_comm_hook(wrapped)
        for master in self.precision.masters(model):
            # DDP gives every rank the first one's parameters, and knows nothing of these.
            dist.broadcast(master.data, src=0)
        return wrapped

    def arguments(self) -> dict[str, Any]:
        """What DDP is made with, beside the model."""
        arguments: dict[str, Any] = self.options.to_kwargs()
        if self.device.type not in ("cpu", "mps", "hpu"):
            arguments.update(device_ids=[self.device.index], output_device=self.device.index)
        return arguments

    def no_sync(self, model: torch.nn.Module) -> contextlib.AbstractContextManager[Any]:
        replica = replica_of(model)
        return contextlib.nullcontext() if replica is None else replica.no_sync()

    def traffic(self, model: torch.nn.Module, backwards: int) -> list[Traffic]:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        size = _sent_as(self.options.comm_hook)
        sent = sum(parameter.numel() * (size or parameter.dtype.itemsize) for parameter in trained)
        if not trained:
            return []
        return [Traffic("all-reduce of gradients", _buckets(replica_of(model), sent), sent, about=True)]

    def held(self, models: Sequence[torch.nn.Module], windows: bool) -> dict[str, int]:
        found = super().held(models, windows)
        if not self.options.gradient_as_bucket_view:
            found[memory.BUCKETS] = found[memory.GRADIENTS]
        return found

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

    def unwrap(self, model: torch.nn.Module) -> torch.nn.Module:
        replica = replica_of(model)
        return model if replica is None else replica.module


def replica_of(model: torch.nn.Module) -> DistributedDataParallel | None:
    """The DDP wrapper of a prepared model, also inside a compiled one; None where it has none."""
    inner = getattr(model, "_orig_mod", model)
    return inner if isinstance(inner, DistributedDataParallel) else None


def _buckets(replica: DistributedDataParallel | None, sent: int) -> int:
    if replica is None:
        return 0
    return max(1, -(-sent // replica.bucket_bytes_cap))


def _sent_as(hook: DDPCommunicationHookType) -> int | None:
    """Bytes of an element on its way, where a hook changes it."""
    halves = (DDPCommunicationHookType.FP16, DDPCommunicationHookType.BF16)
    return 2 if hook in halves else None


def sync_next_backward(model: torch.nn.Module) -> None:
    """Let the next backward of a prepared model communicate although its forward ran under `no_sync`."""
    replica = replica_of(model)
    if replica is None:
        return
    replica.require_backward_grad_sync = True
    replica.require_forward_param_sync = True
    # What the forward would have done outside `no_sync`: make the reducer expect this backward's gradients.
    replica.reducer.prepare_for_backward([])


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
