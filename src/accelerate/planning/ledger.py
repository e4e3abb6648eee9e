# SPDX-License-Identifier: Apache-2.0
"""Counts the storages, operations, moved bytes and messages of a block, real or of a model on fake tensors."""

from __future__ import annotations

import contextlib
import copy
import functools
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from ..parallel.gradients import local
from ..torch_internals import tracing

# Kinds of memory, in the order of the table.
WEIGHTS, GRADIENTS, OPTIMIZER, ACTIVATIONS, MESSAGES, ROUNDING = KINDS = (
    "weights",
    "gradients",
    "optimizer",
    "activations",
    "communication",
    "rounding",
)

# Collective -> names of its operations. The bytes are those of its largest tensor.
_COLLECTIVES = {
    "all-reduce": ("allreduce_", "all_reduce", "all_reduce_", "allreduce_coalesced_"),
    "all-gather": (
        "_allgather_base_",
        "allgather_",
        "all_gather_into_tensor",
        "allgather_into_tensor_coalesced_",
    ),
    "reduce-scatter": ("_reduce_scatter_base_", "reduce_scatter_", "reduce_scatter_tensor"),
    "all-to-all": ("alltoall_base_", "alltoall_", "all_to_all_single"),
    "broadcast": ("broadcast_",),
    "point-to-point": ("send",),
}
_KIND_OF_COLLECTIVE = {name: kind for kind, names in _COLLECTIVES.items() for name in names}
_MESSAGE_SPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "fsdp")
_FREE = frozenset(
    {"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::detach"}
)


@dataclass(eq=False)
class Allocation:
    """The life of one storage: from event `born` until before event `freed`, in bytes."""

    size: int
    born: int
    kind: str
    freed: int | None = None


@dataclass
class Work:
    """What the operations of a step do.

    Fields:
        flops: floating point operations of matrix products and attention, by dtype.
        moved: bytes that all other operations read and write.
        operations: their number, and that of matrix products.
        messages: (collective, size of its group) -> (number, bytes).
    """

    flops: Counter[str] = field(default_factory=Counter)
    moved: int = 0
    operations: int = 0
    messages: dict[tuple[str, int], tuple[int, int]] = field(default_factory=dict)

    def send(self, kind: str, ranks: int, size: int, times: int = 1) -> None:
        """Count messages."""
        number, sent = self.messages.get((kind, ranks), (0, 0))
        self.messages[kind, ranks] = number + times, sent + times * size


class Ledger(tracing.OperationMode):
    """A mode that follows every storage, fake or real, from its first tensor to its end.

    Kinds are given to storages at any time, so that a peak can be divided when the step is over.
    """

    def __init__(self, fake: bool = False) -> None:
        super().__init__(fake)
        self.work: Work = Work()
        self.allocations: list[Allocation] = []
        self._alive: dict[int, Allocation] = {}
        self._events = 0
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Ledger:
        resize = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> object:
            done = resize(storage, size)
            self._resized(storage, int(size))
            return done

        # FSDP frees and allocates the gathered weights of a unit so, without any operation.
        self._stack.enter_context(mock.patch.object(torch.UntypedStorage, "resize_", resize_))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._stack.close()

    def ran(
        self,
        operation: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        out: object,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
    ) -> None:
        """Count an operation."""
        tensors = [*inputs, *outputs]
        sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
        space, _, name = operation.name().partition("::")
        if space in _MESSAGE_SPACES:
            for tensor in tensors:
                self._follow(tensor, MESSAGES)
            collective = name.partition(".")[0]
            kind = _KIND_OF_COLLECTIVE.get(collective)
            if kind is not None:
                largest = max(sizes, default=0)
                self.work.send(kind, _group_size(args), largest)
            return
        for tensor in tensors:
            self._follow(tensor, ACTIVATIONS)
        flops = tracing.flops(operation, args, kwargs, out)
        if flops is not None and outputs:
            dtype = str(outputs[0].dtype).removeprefix("torch.")
            self.work.operations += 1
            self.work.flops[dtype] += flops
        elif not operation.is_view and operation.name().partition(".")[0] not in _FREE:
            self.work.operations += 1
            self.work.moved += sum(sizes)

    def _follow(self, tensor: torch.Tensor, kind: str) -> None:
        """Count the storage of a tensor from now on; that of an activation may get another kind."""
        if tensor.is_meta:
            return
        # While the storage lives, it has one Python object.
        storage = tensor.untyped_storage()
        allocation = self._alive.get(id(storage))
        if allocation is None:
            self._begin(storage, storage.nbytes(), kind)
            weakref.finalize(storage, functools.partial(self._end, id(storage))).atexit = False
        elif allocation.kind == ACTIVATIONS:
            allocation.kind = kind

    def _begin(self, storage: torch.UntypedStorage, size: int, kind: str) -> None:
        self._events += 1
        self._alive[id(storage)] = allocation = Allocation(size, self._events, kind)
        self.allocations.append(allocation)

    def _end(self, key: int) -> None:
        allocation = self._alive.pop(key, None)
        if allocation is not None:
            self._events += 1
            allocation.freed = self._events

    def _resized(self, storage: torch.UntypedStorage, size: int) -> None:
        allocation = self._alive.get(id(storage))
        if allocation is not None and allocation.size != size:
            if allocation.kind == ACTIVATIONS:
                allocation.kind = MESSAGES
            self._end(id(storage))
            self._begin(storage, size, MESSAGES)

    def label(self, tensors: Iterable[torch.Tensor], kind: str) -> None:
        """Give the storages behind tensors a kind; storages that no operation has met are counted from now on."""
        for tensor in tensors:
            shard = local(tensor.detach())
            self._follow(shard, kind)
            allocation = self._alive.get(id(shard.untyped_storage()))
            if allocation is not None:
                allocation.kind = kind

    def mark(self) -> int:
        """The current event, to give to `peak`."""
        return self._events

    def peak(self, since: int = 0, granularity: int = 1) -> dict[str, int]:
        """Bytes by kind at the event after `since` at which most are alive, each allocation rounded up."""
        changes = Counter[int]()
        alive = []
        for allocation in self.allocations:
            if allocation.freed is None or allocation.freed > since:
                alive.append(allocation)
        for allocation in alive:
            size = allocation.size + -allocation.size % granularity
            changes[max(allocation.born, since)] += size
            if allocation.freed is not None:
                changes[allocation.freed] -= size
        now = most = 0
        top = since
        for event in sorted(changes):
            now += changes[event]
            if now > most:
                most = now
                top = event
        sizes = dict.fromkeys(KINDS, 0)
        for allocation in alive:
            if allocation.born <= top and (allocation.freed is None or allocation.freed > top):
                sizes[allocation.kind] += allocation.size
                sizes[ROUNDING] += -allocation.size % granularity
        return sizes

    @contextlib.contextmanager
    def fresh_work(self) -> Iterator[Work]:
        """A block whose work is counted by itself."""
        before = self.work
        self.work = Work()
        try:
            yield self.work
        finally:
            self.work = before


def _group_size(args: tuple[object, ...]) -> int:
    """The number of ranks of the group among the arguments of a collective."""
    for argument in args:
        with contextlib.suppress(RuntimeError):
            if isinstance(argument, torch.ScriptObject):
                return int(dist.ProcessGroup.unbox(argument).size())
            if isinstance(argument, str):
                return tracing.ranks_of_group(argument)
    return dist.get_world_size()


def fake_copy(model: nn.Module) -> nn.Module:
    """A copy of a model with fake tensors on the CPU; ties stay. Call it in a fake mode."""
    tensors = [*model.parameters(), *model.buffers()]
    for module in model.modules():
        tensors += [value for value in vars(module).values() if isinstance(value, torch.Tensor)]
    memo: dict[int, Any] = {}
    for tensor in tensors:
        value = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
        if isinstance(tensor, nn.Parameter):
            value = nn.Parameter(value, requires_grad=tensor.requires_grad)
        memo[id(tensor)] = value
    return copy.deepcopy(model, memo)
