# SPDX-License-Identifier: Apache-2.0
"""Replicated data parallelism: torch's DistributedDataParallel, also over the backend of torch_xla."""

from __future__ import annotations

import contextlib
import functools
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.distributed.algorithms.join import Join, Joinable
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from ...config.training import DistributedDataParallelKwargs
from ...core import trees
from ...core.enums import DDPCommunicationHookType
from ...core.errors import PrepareError
from ...precision.base import Precision
from ..base import Strategy, one_shard_each
from ..prepared import CommunicationVolume, PreparedModel
from ..report import memory

# torch's errors, with the indices of parameters.
_NO_GRADIENT = re.compile(r"which did not receive grad for rank \d+: ([\d ]+)")
_READY_TWICE = re.compile(r"(?:with name |Parameter at )(\S+|index \d+) has been marked as ready twice")


class ReplicatedModel(PreparedModel):
    """A model of which each process has all parameters, inside torch's DDP if any of them trains.

    `element_size` is the size in bytes of a gradient's element that a communication hook sends; None without a hook.
    """

    def __init__(self, module: torch.nn.Module, precision: Precision, element_size: int | None = None) -> None:
        super().__init__(module, precision)
        self.element_size = element_size
        self.forwards: Forwards | None = None
        # Parameters, by name, that DDP reduces, and the others, which were frozen when it was made.
        # Empty for a model that was prepared for evaluation.
        self.reduced: dict[str, torch.nn.Parameter] = {}
        self.frozen: dict[str, torch.nn.Parameter] = {}

    @property
    def inner(self) -> torch.nn.Module:
        """The module inside of DDP."""
        replica = replica_of(self.module)
        return self.module if replica is None else replica.module

    @property
    def is_outgrown(self) -> bool:
        """Whether DDP reduces other parameters than the trainable ones, or there is no DDP although some do."""
        # XLA on one process has no group.
        return dist.is_initialized() and set(map(id, self._trained())) != set(map(id, self.reduced.values()))

    def _trained(self) -> dict[nn.Parameter, str]:
        """The trainable parameters that DDP does not ignore."""
        replica = replica_of(self.module)
        ignored = () if replica is None else replica.parameters_to_ignore
        return {p: name for name, p in self.inner.named_parameters() if p.requires_grad and name not in ignored}

    def new_parameters(self) -> dict[str, nn.Parameter]:
        """Trainable parameters that DDP does not know: it does not average their gradients."""
        if not dist.is_initialized() or not (self.reduced or self.frozen):
            return {}
        known = {id(p) for p in (*self.reduced.values(), *self.frozen.values())}
        return {name: p for p, name in self._trained().items() if id(p) not in known}

    def added_parameter(self, name: str) -> PrepareError:
        """The error for a parameter of `new_parameters`."""
        return PrepareError(
            f"{name} was added or replaced after {type(self.inner).__name__} was prepared, and DDP does not average "
            "its gradient. Add adapters and replace layers before prepare, or prepare model and optimizer again"
        )

    def check_trained(self, replica: DistributedDataParallel | None) -> None:
        """Raise PrepareError where the parameters that train are not the ones that DDP reduces, before a backward.

        Gradients would not be averaged, and torch's error comes a step later, if at all.
        """
        if (name := next((name for name, p in self.frozen.items() if p.requires_grad), None)) is not None:
            raise PrepareError(
                f"{name} was frozen when {type(self.inner).__name__} was prepared, and DDP would not average its "
                "gradient. Unfreeze it before prepare and freeze it again after (with find_unused_parameters=True of "
                "DistributedDataParallelKwargs), or prepare the model and its optimizer again"
            )
        name = next((name for name, p in self.reduced.items() if not p.requires_grad), None)
        if name is None or replica is None or replica.find_unused_parameters:
            return
        if not any(parameter.requires_grad for parameter in self.reduced.values()):
            # DDP waits once it has a gradient: not where the entire model is frozen, as a GAN's discriminator is.
            return
        raise PrepareError(
            f"{name} was frozen after {type(self.inner).__name__} was prepared, and DDP waits for its gradient. Set "
            "find_unused_parameters=True (DistributedDataParallelKwargs), or prepare the model and its optimizer again"
        )

    def check_reduced(self, replica: DistributedDataParallel) -> None:
        """Raise PrepareError where a backward has left gradients out for which DDP waits.

        torch raises its error in the next forward: after the step, and not at all where no forward follows.
        """
        try:
            replica.reducer._check_reducer_finalized()
        except RuntimeError as error:
            if (found := _NO_GRADIENT.search(str(error))) is None:
                raise
            names = list(self.reduced)
            left_out = [names[int(index)] for index in found[1].split()]
            more = f" and {len(left_out) - 5} more parameters" if len(left_out) > 5 else ""
            missing = ", ".join(left_out[:5]) + more
            raise PrepareError(
                f"the loss does not depend on {missing} of {type(self.inner).__name__}, and DDP waits for the "
                "gradient. Set find_unused_parameters=True (DistributedDataParallelKwargs), freeze what is not "
                "trained before prepare, or add a term that uses it to the loss"
            ) from error

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """DDP's own `no_sync`.

        With `static_graph`, the first backward communicates nevertheless: DDP records the graph in it.
        """
        replica = replica_of(self.module)
        if replica is None or (replica.static_graph and not replica._static_graph_delay_allreduce_enqueued):
            return contextlib.nullcontext()
        return replica.no_sync()

    def communication_volume(self, backwards: int) -> list[CommunicationVolume]:
        """The gradients, in about as many messages as DDP has buckets."""
        replica = replica_of(self.module)
        trained = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        if replica is None or not trained:
            return []
        sent = sum(parameter.numel() * (self.element_size or parameter.dtype.itemsize) for parameter in trained)
        buckets = max(1, -(-sent // replica.bucket_bytes_cap))
        return [CommunicationVolume("all-reduce of gradients", buckets, sent, about=True)]

    def memory_usage(self, windows: bool, seen: set[int] | None = None) -> dict[str, int]:
        """As the base class, with the buckets unless gradients are views of them."""
        found = super().memory_usage(windows, seen)
        replica = replica_of(self.module)
        if replica is not None and not replica.gradient_as_bucket_view:
            found[memory.BUCKETS] = found[memory.GRADIENTS]
        return found


class Forwards:
    """A forward hook of a DDP wrapper: whether a forward has made it ready to reduce the gradients of a backward."""

    ready: bool = False
    has_run: bool = False  # whether there was a backward

    def __call__(self, replica: DistributedDataParallel, *_: object) -> None:
        """Called after a forward."""
        if replica.require_backward_grad_sync and torch.is_grad_enabled():
            self.ready = True


class DataParallel(Strategy):
    """Each process has a replica of the model and reads its shard of the data; the backward averages gradients."""

    name = "DistributedDataParallel"
    data_shard = property(one_shard_each)

    def __init__(
        self,
        device: torch.device,
        precision: Precision,
        options: DistributedDataParallelKwargs | None = None,
    ) -> None:
        super().__init__(device, precision)
        self.options: DistributedDataParallelKwargs = options or DistributedDataParallelKwargs()

    def wrap_model(self, model: torch.nn.Module) -> torch.nn.Module:
        """The model inside of DDP, with the communication hook and equal master weights."""
        self.precision.cast_parameters(model)
        if not any(parameter.requires_grad for parameter in model.parameters()):
            # DDP raises an error for a model without anything to train.
            return model
        # Empty for a group that is written in Python.
        kinds = {device.type for device in dist.group.WORLD._device_types}  # type: ignore[union-attr]
        left = next((p.device for p in model.parameters() if p.device.type not in {*kinds, "meta"}), None)
        if kinds and left is not None:
            raise PrepareError(
                f"{type(model).__name__} is on {left}, and the processes of this run communicate on "
                f"{', '.join(sorted(kinds))} devices: move it to accelerator.device before prepare, or leave out "
                "device_placement=False. With cpu=True the run is on the CPU."
            )
        wrapped = DistributedDataParallel(model, **self.arguments(model))
        if self.options.static_graph:
            _refuse_hidden_outputs(model)
        self.options.register_comm_hook(wrapped)
        for master in self.precision.master_weights(model):
            # DDP broadcasts the parameters of rank 0, but not these.
            dist.broadcast(master.data, src=0)
        return wrapped

    def as_prepared(self, module: torch.nn.Module) -> ReplicatedModel:
        """A prepared model with the element size of the communication hook."""
        halves = self.options.comm_hook in (DDPCommunicationHookType.FP16, DDPCommunicationHookType.BF16)
        return ReplicatedModel(module, self.precision, 2 if halves else None)

    def lay_out(self, model: torch.nn.Module) -> PreparedModel:
        """Wrap one model, and watch its forwards."""
        prepared = super().lay_out(model)
        if isinstance(prepared, ReplicatedModel) and dist.is_initialized():
            replica = replica_of(prepared.module)
            if replica is not None:
                prepared.forwards = Forwards()
                replica.register_forward_hook(prepared.forwards)
            skipped = () if replica is None else replica.parameters_to_ignore
            for name, parameter in prepared.inner.named_parameters():
                if name not in skipped:
                    (prepared.reduced if parameter.requires_grad else prepared.frozen)[name] = parameter
        return prepared

    def backward(self, loss: torch.Tensor, **kwargs: object) -> None:
        """The backward. DDP reduces one backward for each forward; it is made ready for the second one, too."""
        synced = []
        for prepared in self.prepared:
            if not isinstance(prepared, ReplicatedModel):
                continue
            replica, forwards = replica_of(prepared.module), prepared.forwards
            if replica is None or forwards is None:
                prepared.check_trained(None)
                continue
            if replica.static_graph and not forwards.has_run and replica._static_graph_delay_allreduce_enqueued:
                raise PrepareError(
                    "static_graph=True: DDP's first backward of this model was one of torch.autograd.grad, and DDP "
                    "does not reduce the gradients of this one. Leave static_graph out"
                )
            forwards.has_run = True
            if not replica.require_backward_grad_sync:
                continue
            synced.append((prepared, replica, forwards))
            if forwards.ready:
                prepared.check_trained(replica)
                if replica.find_unused_parameters and not replica.static_graph:
                    # DDP has looked for unused parameters in the outputs; the loss may use others, as in a penalty.
                    replica.reducer.prepare_for_backward([loss])
        with contextlib.ExitStack() as stack:
            for prepared, replica, forwards in synced:
                if not forwards.ready:
                    # Only if the backward reaches the model: DDP would expect gradients of the next one otherwise.
                    trained = [parameter for parameter in prepared.reduced.values() if parameter.requires_grad]
                    expect = functools.partial(_expect_backward, replica, loss)
                    stack.callback(register_multi_grad_hook(trained, expect, mode="any").remove)
            try:
                super().backward(loss, **kwargs)
            except RuntimeError as error:
                if (found := _READY_TWICE.search(str(error))) is None:
                    raise
                raise PrepareError(
                    f"{found[1]} received a gradient twice in one backward, and DDP had reduced the first. Activation "
                    "checkpointing with use_reentrant=True has this effect with find_unused_parameters=True, and "
                    "where several segments use one parameter: set use_reentrant=False"
                ) from error
        for prepared, replica, forwards in synced:
            forwards.ready = False
            prepared.check_reduced(replica)

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
        """The `Join` of torch around the models, with `even_batches` set on the loaders for its time."""
        if not isinstance(joinables, list | tuple):
            raise PrepareError(f"join_uneven_inputs takes a list of models, not {type(joinables).__name__}")
        joined: list[Joinable] = []
        for item in (replica_of(item) or item for item in joinables):
            if not isinstance(item, Joinable):
                raise PrepareError(
                    f"join_uneven_inputs takes prepared models, and this {type(item).__name__} is not one"
                )
            joined.append(item)
        with contextlib.ExitStack() as stack:
            if even_batches is not None:
                for sampler in _map_style_samplers(loaders):
                    stack.callback(setattr, sampler, "even_batches", sampler.even_batches)
                    sampler.even_batches = even_batches
            stack.enter_context(Join(joined))
            yield


def replica_of(model: object) -> DistributedDataParallel | None:
    """The DDP wrapper of a prepared model, also inside a compiled one; None where it has none."""
    inner = getattr(model, "_orig_mod", model)
    return inner if isinstance(inner, DistributedDataParallel) else None


def _refuse_hidden_outputs(model: torch.nn.Module) -> None:
    """Make the first forward that trains raise PrepareError for outputs in which `static_graph` finds no tensors.

    DDP would never reduce the gradients of that model, without an error.
    """

    def check(_: torch.nn.Module, args: object, output: object) -> None:
        if not torch.is_grad_enabled():
            return
        handle.remove()
        found = {id(leaf) for leaf in tree_leaves(output)}
        if any(leaf.requires_grad and id(leaf) not in found for leaf in trees.leaves(output)):
            raise PrepareError(
                f"static_graph=True finds no tensors inside of a {type(output).__name__}, which "
                f"{type(model).__name__} returns: DDP would not average its gradients. Return a tuple or a "
                "dict, register the class with "
                "torch.export.register_dataclass, or leave out static_graph"
            )

    handle = model.register_forward_hook(check)


def _expect_backward(replica: DistributedDataParallel, loss: torch.Tensor, _: torch.Tensor) -> None:
    """Make DDP reduce the gradients of a backward without its own forward, when the first gradient is there."""
    if replica._join_config.enable:
        raise PrepareError(
            "join_uneven_inputs: a second backward of one forward. DDP reduces one backward for each forward there: "
            "add the losses, and call backward once"
        )
    # As a forward does, after the first backward.
    replica.reducer._rebuild_buckets()
    replica.reducer.prepare_for_backward([loss] if replica.find_unused_parameters else [])


@contextlib.contextmanager
def sync_in_backward(model: torch.nn.Module) -> Iterator[None]:
    """A block whose backward synchronizes gradients although the forward of the prepared model ran under `no_sync`."""
    replica = replica_of(model)
    if replica is None:
        # Imports FSDP2.
        from ..fsdp.units import shard_groups

        deferred = any(not group.reduce_grads for _, group, _ in shard_groups(model))
        if deferred or any(not getattr(module, "_sync_gradients", True) for module in model.modules()):
            raise PrepareError(
                "trigger_sync_in_backward inside of no_sync works with DDP. FSDP decides in the backward: call "
                "accelerator.backward outside of the no_sync block"
            )
        yield
        return
    before = replica.require_backward_grad_sync, replica.require_forward_param_sync
    replica.require_backward_grad_sync = replica.require_forward_param_sync = True
    # The forward does this outside `no_sync`: it makes the reducer expect this backward's gradients.
    replica.reducer.prepare_for_backward([])
    try:
        yield
    finally:
        replica.require_backward_grad_sync, replica.require_forward_param_sync = before


def _map_style_samplers(loaders: Sequence[object]) -> list[Any]:
    """The batch samplers with `even_batches`; warns about loaders of iterable data, which have none."""
    found = []
    for loader in loaders:
        sampler = getattr(loader, "batch_sampler", None)
        if hasattr(sampler, "even_batches"):
            found.append(sampler)
        else:
            warnings.warn(
                "Overriding even_batches is only supported for map-style datasets; other loaders are left as they are."
            )
    return found


class XlaDataParallel(DataParallel):
    """Operations on these devices are traced lazily; after each optimizer step the trace is executed."""

    name = "DistributedDataParallel on XLA"

    def __init__(
        self, device: torch.device, precision: Precision, options: DistributedDataParallelKwargs | None = None
    ) -> None:
        super().__init__(device, precision, options)
        import torch_xla

        self.after_step: tuple[Callable[[], None], ...] = (torch_xla.sync,)

    @property
    def data_shard(self) -> tuple[int, int]:
        """One shard for each process; all data without a process group."""
        return one_shard_each(self) if dist.is_initialized() else (0, 1)

    def wrap_model(self, model: torch.nn.Module) -> torch.nn.Module:
        """The model inside of DDP if there is a process group."""
        return super().wrap_model(model) if dist.is_initialized() else model

    def arguments(self, model: torch.nn.Module) -> dict[str, Any]:
        """The arguments of DDP besides the model."""
        # No device ids, and the xla backend reduces in the buckets' own memory only.
        return {**self.options.to_kwargs(), "gradient_as_bucket_view": True}
