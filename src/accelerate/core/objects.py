# SPDX-License-Identifier: Apache-2.0
"""Plain Python objects: their names, attributes by path, nested dictionaries, sizes in words."""

from __future__ import annotations

import functools
from typing import Any


def convert_bytes(size: float) -> str:
    """A number of bytes in words, in steps of 1024: `1.18 MB`."""
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


def get_pretty_name(obj: Any) -> str:
    """A name to show for an object: its own qualified name where it has one, else that of its class."""
    if not (hasattr(obj, "__qualname__") or hasattr(obj, "__name__")):
        obj = getattr(obj, "__class__", obj)
    return str(getattr(obj, "__qualname__", None) or getattr(obj, "__name__", None) or obj)
