# SPDX-License-Identifier: Apache-2.0
"""Small messages between the ranks of a gloo group, each with a header that identifies the call of its sender.

Every collective of this package begins with such a message. Small content is part of it; larger content follows as one
raw message. Every first message is received into a buffer for the largest one, so that first messages of different
calls fit too. Ranks that make different calls detect it from the headers, before data of another size or dtype is
received, for which gloo would abort a process.
"""

from __future__ import annotations

import functools
import hashlib
import json
import weakref
from collections import deque
from typing import Any

import torch
import torch.distributed as dist

from ..core.errors import DistributedOperationException
from . import communication
from .calls import Call, mismatch, record

SIGNATURE = 8
# The signature, and the number of content bytes that this rank has (in this message, or in the one after it).
HEADER = 16
# The largest content of a message in bytes: for one rank, and for all ranks together.
LARGEST = 64 << 10
LARGEST_OVER_ALL = 4 << 20

_DISAGREE = b"\xffdiffer\xff"


@functools.lru_cache(maxsize=512)
def signature(*facts: object) -> bytes:
    """What must be the same on every rank, in 8 bytes. `facts` are hashable, with the same repr in every process."""
    return hashlib.blake2b(repr(facts).encode(), digest_size=SIGNATURE).digest()


class Channel:
    """The buffers of such messages of one group. The group is an argument of each call, so that it is not kept alive.

    `slots[rank]` is the last message of that rank: header and content. This rank writes to its own slot.
    """

    def __init__(self, rank: int, world: int, serves_all: bool) -> None:
        self.rank = rank
        self.world = world
        # gloo sends tensors of all devices, and not only those on the CPU.
        self.serves_all = serves_all
        self.capacity: int = min(LARGEST, LARGEST_OVER_ALL // world) & ~15
        stride = HEADER + self.capacity
        # Tensors made in inference mode could not be written to outside of it.
        with torch.inference_mode(False):
            row = torch.zeros(world * stride, dtype=torch.uint8, device="cpu")
        self.slots: torch.Tensor = row.view(world, stride)
        view = memoryview(row.numpy())  # type: ignore[arg-type]
        self.views: list[memoryview[int]] = []
        for begin in range(0, world * stride, stride):
            self.views.append(view[begin : begin + stride])
        self._headers = [slot[:SIGNATURE] for slot in self.views]
        del self._headers[rank]
        # gloo requires contiguous splits, so this rank's slot is appended to the one before it.
        self._splits = self.splits(stride)
        self._received = row[stride:]
        if rank:
            self._splits[rank - 1] += stride
            self._received = row
        self.memory: dict[Any, Any] = {}
        self._options = dist.distributed_c10d.AllToAllOptions()
        # gloo's thread is done with a message only after the wait has returned. Were it the last to have it, it would
        # free the Python objects of its tensors, which locks CPython's list of threads for a moment, and a worker that
        # a loader forks in this moment never starts (CPython 3.11 before 3.11.10: python/cpython#112275).
        self._recent: deque[dist.Work] = deque(maxlen=4)

    def swap(
        self,
        group: dist.ProcessGroup,
        header: bytes,
        sent: torch.Tensor,
        splits: list[int],
        call: Call,
    ) -> None:
        """Send each other rank its split of `sent` (header and content), and receive theirs into `slots`.

        Raises DistributedOperationException, the same on every rank, where the ranks' signatures differ;
        CommunicationError where another rank is gone or does not come within the group's timeout.
        """
        self._send(group, sent, splits, call)
        expected = header[:SIGNATURE]
        for received in self._headers:
            if received != expected:
                self._complain(group, call)

    def swap_bytes(
        self, group: dist.ProcessGroup, sign: bytes, content: object, length: int, call: Call
    ) -> None:
        """`swap` of any object with a buffer of bytes. `length` is written into the header."""
        header = sign + length.to_bytes(HEADER - SIGNATURE, "little", signed=True)
        sent, splits = self._message(header, content)
        self.swap(group, header, sent, splits, call)

    def _message(self, header: bytes, content: Any = b"") -> tuple[torch.Tensor, list[int]]:
        """A message to each other rank, and to this rank's own slot. Ranks without content send the header too."""
        size = HEADER + len(content)
        slot = self.views[self.rank]
        slot[:HEADER] = header
        slot[HEADER:size] = content
        repeated = bytearray(slot[:size]) * (self.world - 1)
        sent = torch.frombuffer(repeated, dtype=torch.uint8)
        return sent, self.splits(size)

    def agree(self, group: dist.ProcessGroup, sign: bytes, call: Call) -> None:
        """Return when every rank is about to make the same call. A message without content."""
        if sign not in self.memory:
            header = sign + bytes(HEADER - SIGNATURE)
            sent, splits = self._message(header)
            self.remember(sign, (header, sent, splits))
        header, sent, splits = self.memory[sign]
        self.swap(group, header, sent, splits, call)

    def splits(self, size: int) -> list[int]:
        """Return the split sizes of an all-to-all that sends `size` bytes to each other rank."""
        sizes = [size] * self.world
        sizes[self.rank] = 0
        return sizes

    def remember(self, key: object, value: object, kept: int = 16) -> Any:
        """Keep what a message needs for the next one like it; the oldest is forgotten."""
        while len(self.memory) >= kept:
            del self.memory[next(iter(self.memory))]
        self.memory[key] = value
        return value

    def length(self, rank: int) -> int:
        """The number that `rank` has put into its header."""
        return int.from_bytes(self.views[rank][SIGNATURE:HEADER], "little", signed=True)

    def content(self, rank: int) -> memoryview:
        """The bytes that `rank` has sent. Use them before the next message: they are overwritten."""
        return self.views[rank][HEADER : HEADER + abs(self.length(rank))]

    def rows(self, length: int) -> torch.Tensor:
        """What every rank has sent, equally long: shape `[ranks, length]`. A view, overwritten by the next message."""
        return self.slots[:, HEADER : HEADER + length]

    def _send(
        self, group: dist.ProcessGroup, sent: torch.Tensor, splits: list[int], call: Call
    ) -> None:
        work = group.alltoall_base(self._received, sent, self._splits, splits, self._options)
        with communication.Collective(call):
            self.finish(work)

    def finish(self, work: dist.Work) -> None:
        """Wait for a small message of the group, and keep its tensors until others have followed."""
        work.wait()
        self._recent.append(work)

    def _complain(self, group: dist.ProcessGroup, call: Call) -> None:
        """Raise an error for calls that differ. Every rank has detected it, so all exchange their calls first."""
        mine = record(call)
        text = json.dumps(mine).encode()
        if len(text) > self.capacity:
            # The words, shortened, without the tensors.
            shortened: dict[str, Any] = {}
            for name, value in mine.items():
                shortened[name] = {}
                if not isinstance(value, dict):
                    shortened[name] = str(value)[:200]
            text = json.dumps(shortened).encode()
        length = len(text).to_bytes(HEADER - SIGNATURE, "little", signed=True)
        header = _DISAGREE + length
        sent, splits = self._message(header, text)
        self._send(group, sent, splits, call)
        members = dist.get_process_group_ranks(group)
        records = {}
        for rank in sorted(members):
            content = self.content(members.index(rank))
            records[rank] = json.loads(bytes(content))
        raise DistributedOperationException(mismatch(records))


_channels: weakref.WeakKeyDictionary[dist.ProcessGroup, Channel | None] = (
    weakref.WeakKeyDictionary()
)
_backends: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, str]] = (
    weakref.WeakKeyDictionary()
)


def channel_of(group: dist.ProcessGroup) -> Channel | None:
    """The channel of a group for tensors on the CPU; None where gloo does not serve it, or it has one rank."""
    if group in _channels:
        return _channels[group]
    channel = None
    backends = backends_of(group)
    if group.size() > 1 and backends.get("cpu") == "gloo":
        is_only = set(backends.values()) == {"gloo"}
        channel = Channel(group.rank(), group.size(), is_only)
    _channels[group] = channel
    return channel


def backends_of(group: dist.ProcessGroup) -> dict[str, str]:
    """Type of device -> the backend that serves it, of a group."""
    backends = _backends.get(group)
    if backends is None:
        backends = {}
        for pair in dist.get_backend_config(group).split(","):
            kind, backend = pair.split(":")
            backends[kind] = backend
        _backends[group] = backends
    return backends


def barrier(operation: str, device: torch.device, backend: str | None, error: str = "") -> None:
    """Return when every rank of the run has called this. If one passes an `error`, the others raise it.

    On gloo the call is checked against what the others call. Elsewhere it is torch's own barrier.
    """
    group = dist.group.WORLD
    assert group is not None
    channel = channel_of(group)
    on_cpu = device.type in ("cpu", "mps") or backend == "gloo"
    call = Call(operation)
    if channel is None or not on_cpu:
        devices = None
        if not on_cpu:
            devices = [device.index]
        with communication.Collective(call):
            dist.barrier(device_ids=devices)
        return
    content = error.encode()[: channel.capacity]
    channel.swap_bytes(group, signature(operation), content, len(content), call)
    for rank in range(channel.world):
        if rank != channel.rank and channel.length(rank):
            reason = bytes(channel.content(rank)).decode(errors="replace")
            raise DistributedOperationException(
                f"rank {rank} failed in the block of `{operation}`: {reason}"
            )
