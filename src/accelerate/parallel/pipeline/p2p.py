# SPDX-License-Identifier: Apache-2.0
"""Tensors and small objects between the ranks of a pipeline. Nothing waits for a send before the end of a batch."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from .stage import Spec

# What every backend sends as it is; the rest travels as bytes.
_SENT = frozenset({torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8})


class P2PChannel:
    """Sends and receives within one pipeline group. Peers are ranks of the group.

    Messages between two ranks arrive in the order in which they were sent, so both sides only have to agree on that
    order; nobody waits for a peer to take a message, so two ranks that send to each other cannot block each other.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group = group
        self.device = device
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self._pending: list[tuple[Any, torch.Tensor]] = []

    def send(self, tensors: Sequence[torch.Tensor], to: int) -> None:
        for tensor in tensors:
            self._send(_as_sent(tensor.detach().contiguous()), to)

    def _send(self, tensor: torch.Tensor, to: int) -> None:
        # The tensor is held until it has left.
        self._pending.append((dist.isend(tensor, group=self.group, group_dst=to), tensor))

    def settle(self) -> None:
        """Wait until everything that was sent has left."""
        for work, _ in self._pending:
            work.wait()
        self._pending.clear()

    def post(self, specs: Sequence[Spec], sender: int) -> Arriving:
        """Tensors that will come from `sender`: memory is ready for them, `take()` waits."""
        tensors = [spec.empty(self.device) for spec in specs]
        return Arriving(
            tensors, [dist.irecv(_as_sent(tensor), group=self.group, group_src=sender) for tensor in tensors]
        )

    def send_object(self, value: Any, to: int) -> None:
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        self._send(torch.tensor([data.numel()], dtype=torch.int64, device=self.device), to)
        self._send(data.to(self.device), to)

    def receive_object(self, sender: int) -> Any:
        size = torch.empty(1, dtype=torch.int64, device=self.device)
        dist.recv(size, group=self.group, group_src=sender)
        data = torch.empty(int(size), dtype=torch.uint8, device=self.device)
        dist.recv(data, group=self.group, group_src=sender)
        return pickle.loads(data.cpu().numpy().tobytes())

    def broadcast(self, tensors: Sequence[torch.Tensor], source: int) -> None:
        """Fill contiguous tensors on all ranks with what `source` has in them."""
        pending = [
            dist.broadcast(_as_sent(tensor), group=self.group, group_src=source, async_op=True) for tensor in tensors
        ]
        for work in pending:
            work.wait()

    def broadcast_object(self, value: Any, source: int) -> Any:
        held = [value]
        dist.broadcast_object_list(held, group=self.group, group_src=source, device=self.device)
        return held[0]


class Arriving:
    """Tensors on their way."""

    def __init__(self, tensors: list[torch.Tensor], works: list[Any]) -> None:
        self._tensors = tensors
        self._works = works

    def take(self) -> list[torch.Tensor]:
        for work in self._works:
            work.wait()
        return self._tensors


def _as_sent(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory in a dtype that every backend sends."""
    if tensor.dtype in _SENT:
        return tensor
    return tensor.reshape(-1).view(torch.uint8)
