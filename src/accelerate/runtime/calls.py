# SPDX-License-Identifier: Apache-2.0
"""What a rank is about to do in a collective, as data; and in which words two ranks' calls differ."""

from __future__ import annotations

from collections.abc import Mapping
from types import EllipsisType
from typing import Any, NamedTuple

import torch

from ..core import trees
from ..core.objects import ranks_in_words
from ..core.stacks import user_line

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


def record(call: Call) -> dict[str, Any]:
    """The call in plain JSON data, and the user's line that made it."""
    tensors = dict(_named(call.data, ""))
    shapes = {
        name: list(tensor.shape) if not tensor.is_nested else [] for name, tensor in tensors.items()
    }
    dtypes = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in tensors.items()}
    listed = [f"{dtypes[name]} {shapes[name]}" for name in list(shapes)[:LISTED]]
    if len(shapes) > LISTED:
        listed.append(f"{len(shapes) - LISTED} more")
    size = sum(
        tensor.numel() * tensor.element_size()
        for tensor in tensors.values()
        if not tensor.is_nested
    )
    summary = f"{_called(call.operation)}"
    if tensors:
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
    if trees.is_namedtuple(data):
        return [(f".{field}", value) for field, value in zip(data._fields, data, strict=True)]
    if isinstance(data, (list, tuple)):
        return [(f"[{index}]", value) for index, value in enumerate(data)]
    if isinstance(data, Mapping):
        return [(f"[{key!r}]", value) for key, value in data.items()]
    if trees.is_dataclass_instance(data):
        return [(f".{field}", getattr(data, field)) for field in data.__dataclass_fields__]
    return None


def _named(data: Any, path: str) -> list[tuple[str, torch.Tensor]]:
    if trees.is_tensor(data):
        return [(path or "tensor", data)]
    found = []
    for name, value in _children(data) or []:
        found += _named(value, path + name)
    return found


def _outline(data: object) -> str:
    if trees.is_tensor(data):
        return "tensor"
    children = _children(data)
    if children is None:
        return type(data).__qualname__
    return f"{type(data).__qualname__}({', '.join(name + ': ' + _outline(value) for name, value in children)})"


def difference(found: dict[int, dict[str, Any]]) -> str | None:
    """What the ranks that have shown their records differ in, or None."""
    for aspect in ASPECTS:
        values = {rank: record[aspect] for rank, record in found.items()}
        reference = next(iter(values.values()))
        if all(value == reference for value in values.values()):
            continue
        if isinstance(reference, dict):
            return _tensor_difference(aspect, values, found)
        shown = {
            rank: value if aspect != "operation" else _called(value)
            for rank, value in values.items()
        }
        return _message(f"the ranks disagree on the {aspect}", aspect, shown, found)
    return None


def mismatch(found: dict[int, dict[str, Any]]) -> str:
    """The message for ranks whose calls are known to differ."""
    return difference(found) or "\n".join(
        ["Cannot apply the desired operation: the ranks' calls differ.", "", "Calls:"]
        + [
            f"  - Process {rank}: {record['summary']}  (at {record['at']})"
            for rank, record in found.items()
        ]
    )


def _tensor_difference(
    aspect: str, values: dict[int, dict[str, Any]], found: dict[int, dict[str, Any]]
) -> str:
    reference = next(iter(values.values()))
    name = next(
        name
        for name in reference
        if any(value.get(name) != reference[name] for value in values.values())
    )
    # What the user thinks in is the shape, also where only the number of dimensions differs.
    shown = "shapes" if aspect == "dimensions" else aspect
    texts = {rank: str(record[shown][name]).replace("-1", "any") for rank, record in found.items()}
    where = "" if name == "tensor" else f" of data{name}"
    return _message(f"the ranks disagree on the {shown[:-1]}{where}", shown, texts, found)


def _message(
    what: str, aspect: str, texts: dict[int, str], found: dict[int, dict[str, Any]]
) -> str:
    operations = sorted({record["operation"] for record in found.values()})
    lines = [
        f"Cannot apply the desired operation: {what}; {_minority(texts)}.",
        "",
        f"Operation: {' or '.join(_called(name) for name in operations)}",
        f"Input {aspect}:",
    ]
    lines += [
        f"  - Process {rank}: {text}  (at {found[rank]['at']})" for rank, text in texts.items()
    ]
    if aspect != "shapes" or len(operations) > 1:
        lines += [
            "Calls:",
            *(f"  - Process {rank}: {record['summary']}" for rank, record in found.items()),
        ]
    return "\n".join(lines)


def _minority(texts: dict[int, str]) -> str:
    """Which ranks stand against most of the others (against rank 0's side when both are equally many)."""
    sides: dict[str, list[int]] = {}
    for rank, text in texts.items():
        sides.setdefault(text, []).append(rank)
    most = max(sides.values(), key=len)
    odd = [rank for rank in texts if rank not in most]
    return f"{ranks_in_words(odd)} differ{'s' if len(odd) == 1 else ''} from {ranks_in_words(most)}"
