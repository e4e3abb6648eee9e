# SPDX-License-Identifier: Apache-2.0
"""Replicated data parallelism: torch's DistributedDataParallel, also over the backend of torch_xla."""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.graph import register_multi_grad_hook
from torch.nn.parallel import DistributedDataParallel

from ...config.training import DistributedDataParallelKwargs
from ...core.enums import DDPCommunicationHookType
from ...core.messages import warn
from ...placement.subclasses import is_quantized_tensor
from ...precision.base import Precision
from ...torch_internals import ddp
from ..base import Strategy, one_shard_each
from ..gradients import average
from ..matrices import share_step, shared_step_of
from . import requirements
from .model import ReplicatedModel, replica_of


class DataParallel(Strategy):
    """Each process has a replica of the model and reads its shard of the data; the backward averages gradients."""

    name = "DistributedDataParallel"
    joins = True
    has_replicas = True
    data_shard = property(one_shard_each)

    def __init__(
        self,
        device: torch.device,
        precision: Precision,
        options: DistributedDataParallelKwargs | None = None,
    ) -> None:
        super().__init__(device, precision)
        self.options: DistributedDataParallelKwargs = options or DistributedDataParallelKwargs()
        self._is_joining = False
        self._shared: list[weakref.ref[torch.optim.Optimizer]] = []

    def prepare_model(self, model: torch.nn.Module, evaluation: bool = False) -> ReplicatedModel:
        """Everything that is done to one model, in its order."""
        model = self.precision.wrap_forward(model)
        model = self.apply_transforms(model, before_layout=True)
        if evaluation or not dist.is_initialized():
            prepared = self.as_prepared(model)
        else:
            self.precision.cast_parameters(model)
            # DDP raises an error for a model without anything to train.
            if any(parameter.requires_grad for parameter in model.parameters()):
                model = self.replicate(model)
            prepared = self.as_prepared(model)
            prepared.watch()
        self.precision.after_layout(prepared.module)
        # Compilation is the last of these.
        prepared.module = self.apply_transforms(prepared.module, before_layout=False)
        return prepared

    def lay_out_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Share the work of an optimizer of matrices."""
        if not self.has_replicas or not dist.is_initialized():
            return
        if share_step(optimizer, dist.group.WORLD, self._averages_gradients):
            self._shared.append(weakref.ref(optimizer))

    def _averages_gradients(self) -> bool:
        """Whether all replicas step with equal gradients: neither in `no_sync` nor in `join`."""
        if self._is_joining:
            return False
        replicas = [replica_of(prepared.module) for prepared in self.prepared]
        return all(replica is None or ddp.reduces(replica) for replica in replicas)

    def replicate(self, model: torch.nn.Module) -> DistributedDataParallel:
        """The model inside DDP, with the communication hook and equal master weights."""
        arguments = self.arguments(model)
        if any(is_quantized_tensor(parameter) for parameter in model.parameters()):
            # Imports DTensor.
            from ..materialize import make_equal

            # DDP flattens what it broadcasts, for which torchao's tensors have no operation.
            make_equal((*model.parameters(), *model.buffers()), self.device, None)
            arguments["init_sync"] = False
        replica = DistributedDataParallel(model, **arguments)
        self.options.register_comm_hook(replica)
        for master in self.precision.master_weights(model):
            # DDP broadcasts the parameters of rank 0, but not these.
            dist.broadcast(master.data, src=0)
        return replica

    def as_prepared(self, module: torch.nn.Module) -> ReplicatedModel:
        """A prepared model with the element size of the communication hook."""
        halves = (DDPCommunicationHookType.FP16, DDPCommunicationHookType.BF16)
        element_size = None
        if self.options.comm_hook in halves:
            element_size = 2
        return ReplicatedModel(module, self.precision, element_size)

    def backward(self, loss: torch.Tensor, **kwargs: object) -> None:
        """The backward. DDP reduces the gradients of one backward for each forward; all others are averaged here."""
        synced: list[tuple[ReplicatedModel, DistributedDataParallel]] = []
        for prepared in self.prepared:
            if not isinstance(prepared, ReplicatedModel):
                continue
            prepared.has_run = True
            replica = replica_of(prepared.module)
            if replica is None:
                if prepared.frozen:
                    requirements.check_frozen(prepared.inner)
            elif hasattr(replica, "expects_backward") and ddp.reduces(replica):
                synced.append((prepared, replica))
        reached: list[DistributedDataParallel] = []
        # Two models may share parameters.
        reduced: set[int] = set()
        if not all(replica.expects_backward for _, replica in synced):
            for prepared, replica in synced:
                if replica.expects_backward:
                    reduced.update(map(id, prepared.reduced.values()))
        # By the replica: what DDP does not reduce in this backward.
        unreduced: dict[DistributedDataParallel, list[torch.nn.Parameter]] = {}
        with contextlib.ExitStack() as stack:
            for prepared, replica in synced:
                if replica.syncs_late and replica.find_unused_parameters:
                    ddp.expect_backward(replica, [loss])
                unfrozen = [p for p in prepared.frozen.values() if p.requires_grad]
                unreduced[replica] = unfrozen
                if replica.expects_backward and len(synced) == 1:
                    reached.append(replica)
                    continue
                trained = [p for p in prepared.reduced.values() if p.requires_grad]
                if not replica.expects_backward:
                    trained = [p for p in trained if id(p) not in reduced]
                    unreduced[replica] = unfrozen + trained
                reach = functools.partial(_reach, replica, reached)
                hook = register_multi_grad_hook([*trained, *unfrozen], reach, mode="any")
                stack.callback(hook.remove)
            super().backward(loss, **kwargs)
        for replica in reached:
            replica.expects_backward = False  # type: ignore[assignment]
            if unreduced[replica]:
                if self._is_joining:
                    raise requirements.unanswered(replica.module)
                average(unreduced[replica], self.device)

    def arguments(self, model: torch.nn.Module) -> dict[str, Any]:
        """The arguments of DDP besides the model."""
        arguments: dict[str, Any] = self.options.to_kwargs()
        # With device_placement=False the model may be elsewhere, and stays there.
        placed = all(parameter.device == self.device for parameter in model.parameters())
        if placed and self.device.type not in ("cpu", "mps", "hpu"):
            arguments.update(device_ids=[self.device.index], output_device=self.device.index)
        return arguments

    @contextlib.contextmanager
    def join(
        self, joinables: Sequence[object], loaders: Sequence[object], even_batches: bool | None
    ) -> Iterator[None]:
        """Torch's `Join` around the models, with `even_batches` set on the loaders for its time."""
        from torch.distributed.algorithms.join import Join

        joined: list[Any] = [replica_of(item) or item for item in joinables]
        with contextlib.ExitStack() as stack:
            if even_batches is not None:
                for sampler in _map_style_samplers(loaders):
                    stack.callback(setattr, sampler, "even_batches", sampler.even_batches)
                    sampler.even_batches = even_batches
            if len(joined) > 1:
                check = functools.partial(requirements.check_turn, joined, itertools.cycle(joined))
                for replica in joined:
                    if isinstance(replica, DistributedDataParallel):
                        stack.callback(replica.register_forward_pre_hook(check).remove)
            stack.enter_context(Join(joined))
            stack.callback(setattr, self, "_is_joining", self._is_joining)
            self._is_joining = True
            # Later, some of the processes step alone.
            for reference in self._shared:
                optimizer = reference()
                shared = shared_step_of(optimizer)
                if shared is not None:
                    shared.plan(optimizer)
            yield


def _reach(
    replica: DistributedDataParallel, reached: list[DistributedDataParallel], _: torch.Tensor
) -> None:
    """A hook of the first gradient of a model in a backward."""
    reached.append(replica)


@contextlib.contextmanager
def sync_in_backward(model: torch.nn.Module) -> Iterator[None]:
    """A block whose backward synchronizes gradients although the forward of the prepared model ran under `no_sync`."""
    replica = replica_of(model)
    if replica is None:
        # Imports FSDP2.
        from ...torch_internals.fsdp2 import reduces_gradients

        if not reduces_gradients(model):
            raise requirements.late_sync()
        yield
        return
    with ddp.reducing(replica):
        replica.expects_backward = replica.syncs_late = True  # type: ignore[assignment]
        try:
            yield
        finally:
            replica.syncs_late = False  # type: ignore[assignment]


def _map_style_samplers(loaders: Sequence[object]) -> list[Any]:
    """The batch samplers with `even_batches`; warns about loaders of iterable data, which have none."""
    found = []
    for loader in loaders:
        sampler = getattr(loader, "batch_sampler", None)
        if hasattr(sampler, "even_batches"):
            found.append(sampler)
        else:
            warn(
                "Overriding even_batches is only supported for map-style datasets; other loaders are left as they are."
            )
    return found


class XlaDataParallel(DataParallel):
    """Operations on these devices are traced lazily; after each optimizer step the trace is executed."""

    name = "DistributedDataParallel on XLA"
    has_replicas = False

    def __init__(
        self,
        device: torch.device,
        precision: Precision,
        options: DistributedDataParallelKwargs | None = None,
    ) -> None:
        super().__init__(device, precision, options)
        import torch_xla

        self.after_step: tuple[Callable[[], None], ...] = (torch_xla.sync,)

    @property
    def data_shard(self) -> tuple[int, int]:
        """One shard for each process; all data without a process group."""
        if dist.is_initialized():
            return one_shard_each(self)
        return (0, 1)

    def arguments(self, model: torch.nn.Module) -> dict[str, Any]:
        """The arguments of DDP besides the model."""
        # No device ids, and the xla backend reduces in the buckets' own memory only.
        return {**self.options.to_kwargs(), "gradient_as_bucket_view": True}
