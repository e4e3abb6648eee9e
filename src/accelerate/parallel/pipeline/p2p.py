# SPDX-License-Identifier: Apache-2.0
"""Point-to-point messages between the ranks of a pipeline: tensors, small objects, and the specs of nested tensors."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.utils.rnn import PackedSequence

from ...core import trees
from ...core.errors import PrepareError
from .. import materialize

T = TypeVar("T")


@dataclass(frozen=True)
class TensorSpec:
    """Shape, dtype and `requires_grad` of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSpec:
        """Return the spec of a tensor."""
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)

    def empty(self, device: torch.device) -> torch.Tensor:
        """Return an uninitialized tensor of this shape and dtype."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)

    @property
    def nbytes(self) -> int:
        """The size in bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


_SENT = (
    torch.Tensor, TensorSpec, type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device,
)  # fmt: skip


def is_spec(value: object) -> bool:
    """Whether `value` is a `TensorSpec`."""
    return isinstance(value, TensorSpec)


def specs_in(description: object) -> list[TensorSpec]:
    """The specs in what `describe` returned."""
    return list(trees.leaves(description, is_spec))


def describe(value: object, where: str) -> object:
    """Nested data with a TensorSpec in place of each tensor.

    Raises:
        PrepareError: for data that cannot be sent between ranks; `where` names it.
    """

    def spec(tensor: torch.Tensor) -> TensorSpec:
        if isinstance(tensor, DTensor):
            raise PrepareError(
                f"{where} is sharded over tensor-parallel ranks, and a stage must return complete tensors: use a plan "
                "in which the last layer of a block gathers its output (rowwise)"
            )
        return TensorSpec.of(tensor)

    if trees.first_leaf(value, lambda part: isinstance(part, PackedSequence)) is not None:
        raise PrepareError(
            f"{where} contains a PackedSequence, whose rows are time steps and not samples: return padded sequences"
        )
    described = trees.map_leaves(spec, value)
    foreign = trees.first_leaf(described, is_foreign)
    if foreign is not None:
        raise PrepareError(
            f"{where} contains a {type(foreign).__name__}, which pipeline stages cannot send: return tensors, and "
            "plain values"
        )
    return described


def is_foreign(value: object) -> bool:
    """Whether a value is an object that cannot be sent, such as a cache of keys and values."""
    return trees.children(value) is None and not isinstance(value, _SENT)


def fill(description: object, tensors: Sequence[torch.Tensor]) -> Any:
    """What was described, with these tensors."""
    return trees.replace_leaves(description, tensors, is_spec)


class P2PChannel:
    """Sends and receives within one pipeline group. Peers are ranks of the group.

    Messages between two ranks arrive in the order in which they were sent, so both sides only have to agree on that
    order. Sending tensors does not wait for the peer, so two ranks that send to each other cannot deadlock.

    Fields:
        has_values: whether tensors have values. In a trace of `accelerate plan` they have shapes only.
    """

    has_values: ClassVar[bool] = True

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group = group
        self.device = device
        self.rank: int = dist.get_rank(group)
        self.size: int = dist.get_world_size(group)
        # A tensor must stay alive until it was sent.
        self._pending: list[tuple[dist.Work | None, torch.Tensor]] = []
        # What stages of this rank send each other.
        self._local: deque[Any] = deque()

    def send(self, tensors: Iterable[torch.Tensor], to: int) -> None:
        """Start to send tensors to a rank."""
        if to == self.rank:
            self._local.append([tensor.detach() for tensor in tensors])
            return
        for tensor in tensors:
            message = _as_sent(tensor.detach().contiguous())
            self._pending.append((dist.isend(message, group=self.group, group_dst=to), message))

    def wait_for_sends(self) -> None:
        """Wait for all sends that were started."""
        for work, _ in self._pending:
            if work is not None:
                work.wait()
        self._pending.clear()

    def post_receive(self, specs: Sequence[TensorSpec], sender: int) -> PendingReceive:
        """Start to receive tensors; `wait()` returns them."""
        if sender == self.rank:
            return PendingReceive(specs, self._local.popleft(), [])
        tensors = [spec.empty(self.device) for spec in specs]
        works = [
            dist.irecv(_as_sent(tensor), group=self.group, group_src=sender) for tensor in tensors
        ]
        return PendingReceive(specs, tensors, works)

    def send_object(self, value: object, to: int) -> None:
        """Send a picklable object to a rank."""
        if to == self.rank:
            self._local.append(value)
            return
        dist.send_object_list([value], group=self.group, group_dst=to, device=self.device)

    def receive_object(self, sender: int) -> Any:
        """Receive an object from a rank."""
        if sender == self.rank:
            return self._local.popleft()
        message: list[Any] = [None]
        dist.recv_object_list(message, group=self.group, group_src=sender, device=self.device)
        return message[0]

    def broadcast(self, tensors: Sequence[torch.Tensor], source: int) -> None:
        """Broadcast contiguous tensors in place."""
        pending = [
            dist.broadcast(_as_sent(tensor), group=self.group, group_src=source, async_op=True)
            for tensor in tensors
        ]
        for work in pending:
            work.wait()

    def broadcast_object(self, value: object, source: int) -> Any:
        """Return the object of the rank `source`, on all ranks."""
        message = [value]
        dist.broadcast_object_list(message, group=self.group, group_src=source, device=self.device)
        return message[0]

    def from_first(self, value: T) -> T:
        """Return the object of the run's first rank, on all ranks of the run."""
        return materialize.from_first(value, self.device)

    def from_all(self, value: T) -> list[T]:
        """Return the object of each rank of the group."""
        return materialize.from_all(value, self.group)


class PendingReceive(NamedTuple):
    """Tensors that are being received."""

    specs: Sequence[TensorSpec]
    tensors: list[torch.Tensor]
    works: list[dist.Work | None]

    def wait(self, grad: bool = False) -> list[torch.Tensor]:
        """Wait for the tensors, and return them. With `grad` they require it where the ones that were sent did."""
        for work in self.works:
            if work is not None:
                work.wait()
        if grad:
            for tensor, spec in zip(self.tensors, self.specs, strict=True):
                tensor.requires_grad_(spec.requires_grad)
        return self.tensors


def _as_sent(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as bytes, which every backend sends."""
    return tensor.reshape(-1).view(torch.uint8)
