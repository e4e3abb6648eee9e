# SPDX-License-Identifier: Apache-2.0
"""Any picklable objects between ranks: a small one travels as one message, a large one as two."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

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
    everywhere = gather_each(object)
    for rank, elements in enumerate(everywhere):
        if not hasattr(elements, "__iter__") and not hasattr(elements, "__getitem__"):
            kind = type(elements).__qualname__
            raise TypeError(
                f"gather_object joins iterables; rank {rank} passed a {kind}: put it in a list"
            )
        joined.extend(elements)
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
    sign = signature(operation, options)
    firsts, capacity = _first_messages(content, length, group, sign, call)
    lengths = []
    for rank, (length, view) in enumerate(firsts):
        lengths.append(_checked_length(length, view, rank))
    longest = max(lengths)
    if longest <= capacity:
        return [pickle.loads(view) for _, view in firsts]
    device = transport.home(group)
    row = _as_row(content, longest, device)
    with Collective(call):
        rows = transport.all_gather(row, group)
    values = []
    for row, size in zip(rows.cpu(), lengths, strict=True):
        view = _view(row)[:size]
        values.append(pickle.loads(view))
    return values


def broadcast_object_list(object_list: list[Any], from_process: int = 0) -> list[Any]:
    """Replace the elements of a list in place with those of one rank.

    Args:
        object_list: the list.
        from_process: the rank whose elements are sent.

    Returns:
        `object_list` itself.

    Raises:
        TypeError: on every rank, an element cannot be pickled.
        ConfigurationError: there is no rank `from_process`.

    Example:
        names = [sorted(os.listdir("data"))] if accelerator.is_main_process else [None]
        broadcast_object_list(names)
        names[0]  # the list of rank 0, on every rank
    """
    state = PartialState()
    if not state.use_distributed:
        return object_list
    transport.check_source("broadcast_object_list", from_process, state.num_processes)
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
    _checked_length(length, view, source)
    if length > capacity:
        device = transport.home(group)
        row = _as_row(content, length, device)
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
    device = transport.home(group)
    row = _first(content, length, device)
    if source is None:
        rows = transport.all_gather(row, group)
        return [_parsed(first) for first in rows.cpu()], CAPACITY
    transport.broadcast(row, source, group)
    return [_parsed(row)], CAPACITY


def _pickled(value: object) -> tuple[io.BytesIO, int]:
    """The pickle of `value` and its length; where it cannot be pickled, why (as text) and a negative length.

    The failure is sent like a value: the other ranks are in the message already and must hear of it.
    """
    content = io.BytesIO()
    pickler = pickle.Pickler(content, protocol=pickle.HIGHEST_PROTOCOL)
    try:
        pickler.dump(value)
    except Exception as error:
        kind = type(value).__qualname__
        reason = f"{kind} cannot be pickled: {type(error).__name__}: {error}"
        text = reason.encode()[:CAPACITY]
        return io.BytesIO(text), -len(text)
    return content, content.getbuffer().nbytes


def _first(content: io.BytesIO, length: int, device: torch.device) -> Tensor:
    row = bytearray(FIRST)
    row[:PREFIX] = length.to_bytes(PREFIX, "little", signed=True)
    size = abs(length)
    if size <= CAPACITY:
        row[PREFIX : PREFIX + size] = content.getbuffer()
    return torch.frombuffer(row, dtype=torch.uint8).to(device)


def _view(row: Tensor) -> memoryview:
    return memoryview(row.cpu().numpy())  # type: ignore[arg-type]


def _parsed(row: Tensor) -> tuple[int, memoryview]:
    """The length and the content of a first message."""
    view = _view(row)
    length = int.from_bytes(view[:PREFIX], "little", signed=True)
    stop = PREFIX + abs(length)
    return length, view[PREFIX:stop]


def _checked_length(length: int, content: memoryview, rank: int) -> int:
    """The length of a rank's pickle; TypeError where its content is instead why there is none."""
    if length < 0:
        reason = bytes(content).decode(errors="replace")
        raise TypeError(f"rank {rank}: a {reason}")
    return length


def _as_row(content: io.BytesIO, length: int, device: torch.device) -> Tensor:
    """The pickle in a row of `length` bytes, without a copy on the host."""
    content.truncate(length)
    end = content.seek(0, io.SEEK_END)
    padding = bytes(length - end)
    content.write(padding)
    return torch.frombuffer(content.getbuffer(), dtype=torch.uint8).to(device)
