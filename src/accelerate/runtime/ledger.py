# SPDX-License-Identifier: Apache-2.0
"""The ledger of this process: its last collectives of this package, each with the user's line and its times.

It is on the path of a step: an entry costs about a microsecond. What is compared with other ranks is read only when
a run stands still (`hang_watch.py`). Collectives of torch itself are in torch's flight recorder (`pending.py`).
"""

from __future__ import annotations

import time
from typing import Any

import torch

from .calls import Call, user_frame

# Entries that are kept.
SIZE = 64


class Entry:
    """One collective. `left` is None as long as this process is in it.

    Fields:
        number: of the collective among those of this process, from 1.
        group: the name of the process group.
        operation: what the user has called.
        data: dtype and shape of the tensor, or of the tensors of a sequence; None for other data.
        file, line: the user's code.
        entered, left: seconds of `time.monotonic`.
    """

    __slots__ = ("data", "entered", "file", "group", "left", "line", "number", "operation")

    def __init__(self) -> None:
        self.number: int = 0
        self.group: str = ""
        self.operation: str = ""
        self.data: Any = None
        self.file: str = ""
        self.line: int = 0
        self.entered: float = 0.0
        self.left: float | None = 0.0


class CollectiveLedger:
    """A ring of entries, which are made once."""

    def __init__(self, size: int = SIZE) -> None:
        self.count: int = 0
        self._entries: list[Entry] = [Entry() for _ in range(size)]

    def enter(self, call: Call, group: str) -> Entry:
        """Note that this process begins a collective. Set the entry's `left` at its end."""
        self.count = number = self.count + 1
        entry = self._entries[number % len(self._entries)]
        entry.number = number
        entry.group = group
        entry.operation = call.operation
        data = call.data
        if data is None:
            entry.data = None
        elif isinstance(data, torch.Tensor):
            entry.data = None if data.is_nested else (data.dtype, data.shape)
        else:
            entry.data = type(data)
        frame = user_frame()
        entry.file = frame.f_code.co_filename
        entry.line = frame.f_lineno
        entry.left = None
        entry.entered = time.monotonic()
        return entry

    def last(self) -> Entry | None:
        """The most recent entry."""
        return self._entries[self.count % len(self._entries)] if self.count else None

    def recent(self, number: int) -> list[Entry]:
        """The most recent entries, the oldest first."""
        first = max(1, self.count - min(number, len(self._entries)) + 1)
        return [self._entries[at % len(self._entries)] for at in range(first, self.count + 1)]

    def ended(self, number: int) -> list[str]:
        """The most recent ones that have ended, with their lines, the oldest first."""
        found = [one for one in self.recent(number + 1) if one.left is not None]
        return [f"{one.operation} ({one.file}:{one.line})" for one in found[-number:]]


def in_words(data: Any) -> str:
    """The `data` of an entry, as `float32 [4, 8]`; empty where it is not known."""
    if isinstance(data, tuple):
        return f"{str(data[0]).removeprefix('torch.')} {list(data[1])}"
    return "" if data is None else data.__name__


# That of this process.
LEDGER = CollectiveLedger()
