# SPDX-License-Identifier: Apache-2.0
"""The ledger of this process: its last collectives of this package, each with the user's line and its times.

It is on the path of a step: an entry costs about a microsecond. What is compared with other ranks is read only when
a run stands still (`hang_watch.py`). Collectives of torch itself are in torch's flight recorder.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch

from ..core.stacks import user_frame
from .calls import Call


@dataclass(slots=True)
class Entry:
    """One collective. `left` is None as long as this process is in it.

    Fields:
        operation: what the user has called.
        data: dtype and shape of the tensor, or the type of other data; None for none.
        file, line: the user's code.
        entered, left: seconds of `time.monotonic`.
    """

    operation: str
    data: Any
    file: str
    line: int
    entered: float
    left: float | None = None

    def data_in_words(self) -> str:
        """The data, as `float32 [4, 8]`; empty where it is not known."""
        if isinstance(self.data, tuple):
            return f"{str(self.data[0]).removeprefix('torch.')} {list(self.data[1])}"
        if self.data is None:
            return ""
        return str(self.data.__name__)

    def place(self) -> str:
        """The user's file and line."""
        return f"{self.file}:{self.line}"


class CollectiveLedger:
    """The last collectives, and the number of all."""

    def __init__(self) -> None:
        self.count: int = 0
        self.entries: deque[Entry] = deque(maxlen=64)

    def enter(self, call: Call) -> Entry:
        """Note that this process begins a collective. Set the entry's `left` at its end."""
        data: Any = call.data
        if isinstance(data, torch.Tensor):
            data = None if data.is_nested else (data.dtype, data.shape)
        elif data is not None:
            data = type(data)
        frame = user_frame()
        entry = Entry(
            call.operation, data, frame.f_code.co_filename, frame.f_lineno, time.monotonic()
        )
        # In this order: another thread reads the number before the last entry.
        self.entries.append(entry)
        self.count += 1
        return entry

    def current(self) -> Entry | None:
        """The collective in which this process is."""
        if self.entries and self.entries[-1].left is None:
            return self.entries[-1]
        return None

    def ended(self, number: int) -> list[str]:
        """The most recent ones that have ended, with their lines, the oldest first."""
        ended = [entry for entry in list(self.entries) if entry.left is not None]
        return [f"{entry.operation} ({entry.place()})" for entry in ended[-number:]]


# That of this process.
LEDGER = CollectiveLedger()
