# SPDX-License-Identifier: Apache-2.0
"""The collectives of this package as data: the ledger of this process, and in which words two ranks' calls differ.

The ledger is on the path of a step: an entry costs about a microsecond. What is compared with other ranks is read only
when a run stands still (`hang_watch.py`). Collectives of torch itself are in torch's flight recorder.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import EllipsisType
from typing import Any, NamedTuple

import torch

from ..core import trees
from ..core.objects import ranks_in_words
from ..core.stacks import line_in_words, user_frame, user_line

# What is compared, in this order: the first difference is reported.
ASPECTS = ("operation", "options", "structure", "dtypes", "dimensions", "shapes")
# How many tensors of a call are listed in a message.
LISTED = 4


class Call(NamedTuple):
    """A collective as the user called it. Sizes along `free_dim` (`...`: along all) may differ between the ranks."""

    operation: str
    data: Any = None
    options: str = ""
    free_dim: int | EllipsisType | None = None


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
        return line_in_words(self.file, self.line)


class CollectiveLedger:
    """The last collectives, and the number of all."""

    def __init__(self) -> None:
        self.count: int = 0
        self.entries: deque[Entry] = deque(maxlen=64)

    def enter(self, call: Call) -> Entry:
        """Note that this process begins a collective. Set the entry's `left` at its end."""
        data: Any = None
        if isinstance(call.data, torch.Tensor):
            if not call.data.is_nested:
                data = call.data.dtype, call.data.shape
        elif call.data is not None:
            data = type(call.data)
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


def record(call: Call) -> dict[str, Any]:
    """The call in plain JSON data, and the user's line that made it."""
    shapes: dict[str, list[int]] = {}
    dtypes = {}
    listed = []
    size = 0
    for name, tensor in _named(call.data, ""):
        shapes[name] = []
        if not tensor.is_nested:
            shapes[name] = list(tensor.shape)
            size += tensor.numel() * tensor.element_size()
        dtypes[name] = str(tensor.dtype).removeprefix("torch.")
        listed.append(f"{dtypes[name]} {shapes[name]}")
    if len(listed) > LISTED:
        listed[LISTED:] = [f"{len(listed) - LISTED} more"]
    summary = _called(call.operation)
    if listed:
        summary += f" of {', '.join(listed)}: {size} bytes"
    dimensions = {name: len(shape) for name, shape in shapes.items()}
    for shape in shapes.values():
        if call.free_dim is ...:
            shape[:] = [-1] * len(shape)
        elif call.free_dim is not None and -len(shape) <= call.free_dim < len(shape):
            shape[call.free_dim] = -1
    return {
        "operation": call.operation,
        "options": call.options,
        "structure": _outline(call.data),
        "dtypes": dtypes,
        "dimensions": dimensions,
        "shapes": shapes,
        "summary": summary,
        "at": user_line(),
    }


def _called(operation: str) -> str:
    """The operation as the user knows it: a function of this package, or what else it is in words."""
    if operation.isidentifier():
        return f"`accelerate.{operation}`"
    return operation


def _children(data: Any) -> list[tuple[str, Any]] | None:
    """The named elements of a container, in the order of packing; None for anything else."""
    fields: Iterable[str] = ()
    if trees.is_namedtuple(data):
        fields = data._fields
    elif isinstance(data, (list, tuple)):
        return [(f"[{index}]", value) for index, value in enumerate(data)]
    elif isinstance(data, Mapping):
        return [(f"[{key!r}]", value) for key, value in data.items()]
    elif trees.is_dataclass_instance(data):
        fields = data.__dataclass_fields__
    else:
        return None
    return [(f".{field}", getattr(data, field)) for field in fields]


def _named(data: Any, path: str) -> list[tuple[str, torch.Tensor]]:
    if trees.is_tensor(data):
        return [(path or "tensor", data)]
    tensors = []
    for name, value in _children(data) or []:
        tensors += _named(value, path + name)
    return tensors


def _outline(data: object) -> str:
    if trees.is_tensor(data):
        return "tensor"
    children = _children(data)
    if children is None:
        return type(data).__qualname__
    parts = [f"{name}: {_outline(value)}" for name, value in children]
    return f"{type(data).__qualname__}({', '.join(parts)})"


def difference(records: dict[int, dict[str, Any]]) -> str | None:
    """What the ranks that have shown their records differ in, or None."""
    for aspect in ASPECTS:
        values = {rank: record[aspect] for rank, record in records.items()}
        listed = list(values.values())
        reference = listed[0]
        if listed.count(reference) == len(listed):
            continue
        if isinstance(reference, dict):
            return _tensor_difference(aspect, listed, records)
        if aspect == "operation":
            values = {rank: _called(value) for rank, value in values.items()}
        return _message(f"the ranks disagree on the {aspect}", aspect, values, records)
    return None


def mismatch(records: dict[int, dict[str, Any]]) -> str:
    """The message for ranks whose calls are known to differ."""
    text = difference(records)
    if text is not None:
        return text
    lines = ["Cannot apply the desired operation: the ranks' calls differ.", "", "Calls:"]
    for rank, record in records.items():
        lines.append(f"  - Process {rank}: {record['summary']}  (at {record['at']})")
    return "\n".join(lines)


def _tensor_difference(
    aspect: str, values: list[dict[str, Any]], records: dict[int, dict[str, Any]]
) -> str:
    reference = values[0]
    for name, expected in reference.items():
        if any(value.get(name) != expected for value in values):
            break
    if aspect == "dimensions":
        # What the user thinks in is the shape.
        aspect = "shapes"
    texts = {}
    for rank, record in records.items():
        texts[rank] = str(record[aspect][name]).replace("-1", "any")
    what = f"the ranks disagree on the {aspect[:-1]}"
    if name != "tensor":
        what += f" of data{name}"
    return _message(what, aspect, texts, records)


def _message(
    what: str, aspect: str, texts: dict[int, str], records: dict[int, dict[str, Any]]
) -> str:
    operations = sorted({record["operation"] for record in records.values()})
    lines = [
        f"Cannot apply the desired operation: {what}; {_minority(texts)}.",
        "",
        f"Operation: {' or '.join(_called(name) for name in operations)}",
        f"Input {aspect}:",
    ]
    for rank, text in texts.items():
        lines.append(f"  - Process {rank}: {text}  (at {records[rank]['at']})")
    if aspect != "shapes" or len(operations) > 1:
        lines.append("Calls:")
        for rank, record in records.items():
            lines.append(f"  - Process {rank}: {record['summary']}")
    return "\n".join(lines)


def _minority(texts: dict[int, str]) -> str:
    """Which ranks stand against most of the others (against rank 0's side when both are equally many)."""
    sides: dict[str, list[int]] = {}
    for rank, text in texts.items():
        sides.setdefault(text, []).append(rank)
    most = max(sides.values(), key=len)
    odd = [rank for rank in texts if rank not in most]
    verb = "differ"
    if len(odd) == 1:
        verb = "differs"
    return f"{ranks_in_words(odd)} {verb} from {ranks_in_words(most)}"
