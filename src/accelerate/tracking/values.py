# SPDX-License-Identifier: Apache-2.0
"""Conversion of logged values: one-element tensors and arrays to numbers, nested mappings to flat ones."""

from __future__ import annotations

import dataclasses
import enum
import math
import numbers
from collections.abc import Iterator, Mapping
from typing import Any

_TOO_LARGE = 2**1023


def number(value: Any) -> int | float | None:
    """Convert a number, a NumPy scalar, or a tensor or array of one element to a Python number; None for others.

    An integer that no float can hold is infinite: the clients store floats.
    """
    if isinstance(value, (bool, float)):
        return value
    if isinstance(value, numbers.Integral):
        integer = int(value)
        if abs(integer) < _TOO_LARGE:
            return integer
        return math.copysign(math.inf, integer > 0 or -1)
    if isinstance(value, numbers.Real):
        return float(value)
    # torch has numel(), numpy an int
    size = getattr(value, "numel", None) or getattr(value, "size", None)
    count = size() if callable(size) else size
    if count != 1 or not hasattr(value, "item") or getattr(value, "is_meta", False):
        return None
    item = value.item()
    if isinstance(item, (bool, int, float)):
        return item
    return None


def text(value: Any) -> str:
    """Any value as text that UTF-8 can encode: bytes of file names that are no text are escaped."""
    return str(value).encode("utf-8", "backslashreplace").decode()


def plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the numbers of possibly nested mappings to Python numbers; other values are returned unchanged."""
    converted = {}
    for key, value in values.items():
        scalar = plain(value) if isinstance(value, Mapping) else number(value)
        converted[key] = value if scalar is None else scalar
    return converted


def flat(values: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested mappings and dataclasses, with names joined by `/`, in order."""
    for key, value in values.items():
        name = f"{prefix}{key}"
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            value = _fields(value)
        if isinstance(value, Mapping):
            yield from flat(value, prefix=f"{name}/")
        else:
            yield name, value


def configuration(values: Mapping[Any, Any]) -> dict[str, Any]:
    """Convert a configuration to nested dicts and lists of numbers, booleans, text and None.

    Other values are converted to text: the clients refuse them, or store only that an object was there.
    """
    return {str(key): _stored(value) for key, value in values.items()}


def _stored(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        value = value.value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = _fields(value)
    if isinstance(value, Mapping):
        return configuration(value)
    if isinstance(value, (list, tuple)):
        return [_stored(item) for item in value]
    if value is None or isinstance(value, str):
        return value
    scalar = number(value)
    if scalar is None:
        return str(value)
    return scalar


def _fields(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def hyperparameters(values: Mapping[str, Any]) -> dict[str, bool | int | float | str]:
    """Flatten a configuration to numbers, booleans and text; other values are converted to text."""
    flattened: dict[str, bool | int | float | str] = {}
    for name, value in flat(values):
        if isinstance(value, enum.Enum):
            value = value.value
        as_number = None if isinstance(value, str) else number(value)
        if as_number is None:
            flattened[text(name)] = text(value)
        else:
            flattened[text(name)] = as_number
    return flattened
