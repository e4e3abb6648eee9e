# SPDX-License-Identifier: Apache-2.0
"""Plain Python objects: their names, attributes by path, nested dictionaries, sizes in words, spans of numbers."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable
from typing import Any


def convert_bytes(size: float) -> str:
    """Return a number of bytes as text with a unit. 1 KB is 1024 bytes.

    Args:
        size: number of bytes.

    Example:
        >>> convert_bytes(1_236_992)
        '1.18 MB'
    """
    for unit in ("bytes", "KB", "MB", "GB", "TB"):
        if size < 1024.0:
            return f"{round(size, 2)} {unit}"
        size /= 1024.0
    return f"{round(size, 2)} PB"


def merge_dicts(source: dict[Any, Any], destination: dict[Any, Any]) -> dict[Any, Any]:
    """`destination`, with `source` merged into it: nested dictionaries are joined, other values of `source` win."""
    for key, value in source.items():
        if isinstance(value, dict):
            below = destination.get(key)
            if not isinstance(below, dict):
                below = destination[key] = {}
            merge_dicts(value, below)
        else:
            destination[key] = value
    return destination


def recursive_getattr(obj: Any, attr: str) -> Any:
    """The attribute at a dotted path: `recursive_getattr(model, "layers.0.weight")`."""
    return functools.reduce(getattr, attr.split("."), obj)


def forwarded(path: str, doc: str, settable: bool = False) -> Any:
    """A property that stands for an attribute of a part of its object: `forwarded("state.device", "The device.")`.

    Args:
        path: dotted, from the object that has the property.
        doc: the docstring of the property.
        settable: whether the attribute may be assigned through the property.

    Returns:
        The property. Declare the type of the attribute where it is assigned.
    """

    def assign(self: Any, value: object) -> None:
        owner, _, name = path.rpartition(".")
        setattr(recursive_getattr(self, owner), name, value)

    return property(operator.attrgetter(path), assign if settable else None, doc=doc)


def get_pretty_name(obj: Any) -> str:
    """A name to show for an object: its own qualified name where it has one, else that of its class."""
    if not (hasattr(obj, "__qualname__") or hasattr(obj, "__name__")):
        obj = getattr(obj, "__class__", obj)
    return str(getattr(obj, "__qualname__", None) or getattr(obj, "__name__", None) or obj)


def spans(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """The first and the last of each run of neighbours: 0, 1, 2, 5 are (0, 2) and (5, 5)."""
    found: list[tuple[int, int]] = []
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1] = (found[-1][0], number)
        else:
            found.append((number, number))
    return found
