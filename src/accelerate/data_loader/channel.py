# SPDX-License-Identifier: Apache-2.0
"""Batches from the process that reads them to the others: a short header, then one message for each rank."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.utils.rnn import PackedSequence

from ..collectives import flat, transport
from ..collectives.tensors import TensorInformation, is_tensor_information
from ..core import trees
from ..runtime.calls import Call
from ..runtime.channel import signature

END, PART, FAILED = range(3)
PREFIX = 8
# Bytes of a row on a device that are first copied to the host: its description is usually not longer.
HEAD = 4096
READER = 0
BEGIN = Call("the start of an epoch of a data loader with dispatch_batches")
NEXT = Call("the next batch of a data loader with dispatch_batches")


@dataclass(slots=True)
class BatchMessage:
    """What one shard receives in a step: its batch, and the step's counts and position."""

    batch: Any
    counts: tuple[int, ...] | None
    position: int
    last: bool
    # The reader sends nothing after this.
    final: bool


class BatchChannel:
    """A channel from rank 0 to all ranks of the run.

    Args:
        shard: the shard that this rank receives.
    """

    def __init__(self, shard: int) -> None:
        self.group: dist.ProcessGroup = transport.group_of(None)
        self.device: torch.device = transport.home(self.group)
        shards = transport.all_gather_numbers(
            [shard], self.group, signature(BEGIN.operation), BEGIN
        )
        self.shards: list[int] = [shard for (shard,) in shards]

    def send(self, packed: list[torch.Tensor | None]) -> None:
        """Send each rank the packed message of its shard; None means that the shard has ended."""
        lengths = [row.numel() for row in packed if row is not None]
        self._scatter(PART, [packed[shard] for shard in self.shards], max(lengths, default=0))

    def end(self) -> None:
        """Report to all ranks that there is no next batch."""
        self._header(torch.tensor([END, 0], dtype=torch.int64, device=self.device))

    def fail(self, reason: str) -> None:
        """Report to all ranks why there is no next batch."""
        row = torch.frombuffer(bytearray(reason.encode()), dtype=torch.uint8)
        self._scatter(FAILED, [row] * len(self.shards), row.numel())

    def receive(self) -> BatchMessage | None:
        """The next message from rank 0; None where this rank has none. Raises RuntimeError where rank 0 failed."""
        header = torch.empty(2, dtype=torch.int64, device=self.device)
        self._header(header)
        kind, length = header.tolist()
        if kind == END:
            return None
        row = torch.empty(length, dtype=torch.uint8, device=self.device)
        dist.scatter(row, None, group=self.group, group_src=READER)
        if kind == FAILED:
            reason = bytes(row.tolist()).decode(errors="replace").rstrip("\0")
            raise RuntimeError(
                f"rank {READER}, which reads the data for all ranks, failed: {reason}"
            )
        return unpack(row)

    def _header(self, header: torch.Tensor) -> None:
        transport.checked_broadcast(
            header.view(torch.uint8), READER, self.group, signature(NEXT.operation), NEXT
        )

    def _scatter(self, kind: int, rows: list[torch.Tensor | None], length: int) -> None:
        self._header(torch.tensor([kind, length], dtype=torch.int64, device=self.device))
        padded = [padded_row(row, length).to(self.device) for row in rows]
        dist.scatter(torch.empty_like(padded[READER]), padded, group=self.group, group_src=READER)


def padded_row(row: torch.Tensor | None, length: int) -> torch.Tensor:
    """A row followed by zeros up to `length`. For None it is all zeros, which `unpack` reads as None."""
    if row is None:
        return torch.zeros(length, dtype=torch.uint8)
    if row.numel() == length:
        return row
    return torch.cat([row, torch.zeros(length - row.numel(), dtype=torch.uint8)])


def pack(message: BatchMessage | None) -> torch.Tensor | None:
    """A message as one row of bytes: a description, then the bytes of its tensors. None where there is none."""
    if message is None:
        return None
    tensors: list[torch.Tensor] = []

    def describe(leaf: Any) -> Any:
        if not is_dense(leaf):
            return leaf
        tensors.append(leaf)
        return TensorInformation(leaf.shape, leaf.dtype)

    skeleton = trees.map_leaves(describe, message.batch, _is_one_leaf)
    fields = (skeleton, message.counts, message.position, message.last, message.final)
    description = pickle.dumps(fields, protocol=pickle.HIGHEST_PROTOCOL)
    prefix = len(description).to_bytes(PREFIX, "little")
    row = torch.frombuffer(bytearray(prefix + description), dtype=torch.uint8)
    if tensors:
        content = flat.pack(tensors, torch.device("cpu"))
        row = torch.cat([row, content])
    return row


def _is_one_leaf(value: Any) -> bool:
    # A PackedSequence cannot have anything but tensors: the description contains it.
    return is_dense(value) or isinstance(value, PackedSequence)


def unpack(row: torch.Tensor) -> BatchMessage | None:
    """The message in a row, with tensors on the row's device. None where there is none."""
    head = bytes(row[:HEAD].cpu().numpy())
    start = PREFIX + int.from_bytes(head[:PREFIX], "little")
    if start == PREFIX:
        return None
    if start > len(head):
        head = bytes(row[:start].cpu().numpy())
    skeleton, *fields = pickle.loads(head[PREFIX:start])
    leaves = trees.leaves(skeleton, is_tensor_information)
    specs = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
    tensors: list[torch.Tensor] = []
    if specs:
        sizes = flat.sizes_of(specs)
        stop = start + sum(sizes)
        tensors = flat.unpack(row[start:stop], specs)
    batch = trees.replace_leaves(skeleton, tensors, is_tensor_information)
    return BatchMessage(batch, *fields)


def is_dense(value: Any) -> bool:
    """Whether a value is a plain dense tensor. Any other value is pickled."""
    return type(value) in flat.PLAIN and value.layout is torch.strided and not value.is_nested
