# SPDX-License-Identifier: Apache-2.0
"""Any picklable objects between ranks: a small one travels as one message, a large one as two."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
import torch.distributed as dist

from ..runtime.calls import Call
from ..runtime.channel import channel_of, signature
from ..runtime.communication import Collective
from ..state import PartialState
from . import transport, verify

# The first message has this many bytes: the pickle's length, and the pickle itself where it fits.
FIRST = 4096
PREFIX = 8
CAPACITY = FIRST - PREFIX


def gather_object(object: object) -> Any:
    """Gather the elements of every rank's iterable, in rank order. Objects are pickled: do not use untrusted data.

    Args:
        object: an iterable. The ranks may have different numbers of elements.

    Returns:
        One list of all elements, on every rank. On one process, the object itself.

    Raises:
        TypeError: on every rank, if the object of a rank cannot be iterated or pickled.

    Example:
        texts = gather_object(texts)
    """
    state = PartialState()
    if not state.use_distributed:
        return object
    if state.debug:
        verify.agree("gather_object", None)
    joined: list[Any] = []
    for rank, elements in enumerate(gather_each(object)):
        if not hasattr(elements, "__iter__") and not hasattr(elements, "__getitem__"):
            kind = type(elements).__qualname__
            raise TypeError(
                f"gather_object joins iterables; rank {rank} passed a {kind}: put it into a list"
            )
        joined += elements
    return joined


def gather_each(
    value: object,
    group: dist.ProcessGroup | None = None,
    operation: str = "gather_object",
    options: str = "",
) -> list[Any]:
    """Every rank's object, in rank order, on every rank of `group`. Raises TypeError for what cannot be pickled."""
    group = transport.group_of(group)
    call = Call(operation, None, options)
    content, length = _pickled(value)
    firsts, capacity = _first_messages(content, length, group, signature(operation, options), call)
    lengths = [_checked_length(*first, rank) for rank, first in enumerate(firsts)]
    longest = max(lengths)
    if longest <= capacity:
        return [pickle.loads(view) for _, view in firsts]
    row = _as_row(content, longest, transport.home(group))
    with Collective(call):
        rows = transport.all_gather(row, group).cpu()
    values = []
    for row, size in zip(rows, lengths, strict=True):
        values.append(pickle.loads(_view(row)[:size]))
    return values


def broadcast_object_list(object_list: list[Any], from_process: int = 0) -> list[Any]:
    """Replace the elements of a list in place with those of one rank.

    Args:
        object_list: the list.
        from_process: the rank whose elements are sent.

    Returns:
        `object_list` itself.

    Raises:
        TypeError: the argument is not a list; or, on every rank, an element cannot be pickled.
        ConfigurationError: there is no rank `from_process`.
    """
    state = PartialState()
    if not state.use_distributed:
        return object_list
    transport.check_source("broadcast_object_list", from_process, state.num_processes)
    if not isinstance(object_list, list):
        raise TypeError(
            f"broadcast_object_list changes a list in place; it was passed a {type(object_list).__qualname__}"
        )
    if state.debug:
        verify.agree("broadcast_object_list", None, options=f"from_process={from_process}")
    received = broadcast_each(object_list, from_process)
    if state.process_index != from_process:
        object_list[:] = received
    return object_list


def broadcast_each(value: object, source: int = 0, operation: str = "broadcast_object_list") -> Any:
    """The object of rank `source`, on every rank; the source gets its own object back."""
    group = transport.group_of(None)
    call = Call(operation, None, f"from_process={source}")
    sends = group.rank() == source
    content, length = io.BytesIO(), 0
    if sends:
        content, length = _pickled(value)
    sign = signature(operation, source)
    firsts, capacity = _first_messages(content, length, group, sign, call, source)
    length, view = firsts[0]
    if _checked_length(length, view, source) > capacity:
        row = _as_row(content, length, transport.home(group))
        with Collective(call):
            transport.broadcast(row, source, group)
        view = _view(row)
    if sends:
        return value
    return pickle.loads(view)


def _first_messages(
    content: io.BytesIO,
    length: int,
    group: dist.ProcessGroup,
    sign: bytes,
    call: Call,
    source: int | None = None,
) -> tuple[list[tuple[int, memoryview]], int]:
    """Send a first message. Returns the length and the content of each rank's (or of `source`), and what one holds."""
    channel = channel_of(group)
    if channel is not None:
        if abs(length) <= channel.capacity:
            # A view that stays referenced would forbid to lengthen the buffer.
            channel.swap_bytes(group, sign, content.getbuffer(), length, call)
        else:
            channel.swap_bytes(group, sign, b"", length, call)
        if source is None:
            ranks = list(range(channel.world))
        else:
            ranks = [source]
        firsts = [(channel.length(rank), channel.content(rank)) for rank in ranks]
        return firsts, channel.capacity
    row = _first(content, length, transport.home(group))
    if source is None:
        rows = transport.all_gather(row, group).cpu()
        return [_parsed(first) for first in rows], CAPACITY
    transport.broadcast(row, source, group)
    return [_parsed(row)], CAPACITY


def _pickled(value: object) -> tuple[io.BytesIO, int]:
    """The pickle of `value` and its length; where it cannot be pickled, why (as text) and a negative length.

    The failure is sent like a value: the other ranks are in the message already and must hear of it.
    """
    content = io.BytesIO()
    try:
        pickle.Pickler(content, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    except Exception as error:
        text = f"{type(value).__qualname__} cannot be pickled: {type(error).__name__}: {error}".encode()[
            :CAPACITY
        ]
        return io.BytesIO(text), -len(text)
    return content, content.getbuffer().nbytes


def _first(content: io.BytesIO, length: int, device: torch.device) -> torch.Tensor:
    row = bytearray(FIRST)
    row[:PREFIX] = length.to_bytes(PREFIX, "little", signed=True)
    if abs(length) <= CAPACITY:
        row[PREFIX : PREFIX + abs(length)] = content.getbuffer()
    return torch.frombuffer(row, dtype=torch.uint8).to(device)


def _view(row: torch.Tensor) -> memoryview:
    return memoryview(row.cpu().numpy())  # type: ignore[arg-type]


def _parsed(row: torch.Tensor) -> tuple[int, memoryview]:
    """The length and the content of a first message."""
    view = _view(row)
    length = int.from_bytes(view[:PREFIX], "little", signed=True)
    return length, view[PREFIX : PREFIX + abs(length)]


def _checked_length(length: int, content: memoryview, rank: int) -> int:
    """The length of a rank's pickle; TypeError where its content is instead why there is none."""
    if length < 0:
        raise TypeError(f"rank {rank}: a {bytes(content).decode(errors='replace')}")
    return length


def _as_row(content: io.BytesIO, length: int, device: torch.device) -> torch.Tensor:
    """The pickle in a row of `length` bytes, without a copy on the host."""
    content.truncate(length)
    have = content.seek(0, io.SEEK_END)
    content.write(bytes(length - have))
    return torch.frombuffer(content.getbuffer(), dtype=torch.uint8).to(device)
