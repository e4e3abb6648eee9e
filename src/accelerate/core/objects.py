# SPDX-License-Identifier: Apache-2.0
"""Plain Python objects: their names, attributes by path, nested dictionaries, sizes in words, spans of numbers."""

from __future__ import annotations

import contextlib
import functools
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set, ValuesView
from typing import Any

_BINARY_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


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
    """Merge `source` into `destination` and return it.

    Nested dictionaries are merged; other values of `source` take precedence.
    """
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
        setattr(recursive_getattr(self, owner) if owner else self, name, value)

    return property(operator.attrgetter(path), assign if settable else None, doc=doc)


def computed(compute: Callable[[Any], Any], doc: str) -> Any:
    """An attribute with a computed value, until another one is assigned to it.

    Args:
        compute: gives the value, from the object that has the attribute.
        doc: the docstring of the attribute.

    Returns:
        The attribute. Declare its type where it is assigned.
    """
    return _Computed(compute, doc)


class _Computed:
    def __init__(self, compute: Callable[[Any], Any], doc: str) -> None:
        self.compute = compute
        self.__doc__ = doc

    # Without `__set__`, an assigned value is in the object's own attributes, which come first.
    def __get__(self, obj: Any, owner: type) -> Any:
        if obj is None:
            return self
        return self.compute(obj)


class NullContext(contextlib.nullcontext[None], contextlib.ContextDecorator):
    """A context without effect, also as the decorator of a function."""


def get_pretty_name(obj: Any) -> str:
    """A name for an object: its own qualified name if it has one, otherwise that of its class."""
    if not (hasattr(obj, "__qualname__") or hasattr(obj, "__name__")):
        obj = getattr(obj, "__class__", obj)
    return str(getattr(obj, "__qualname__", None) or getattr(obj, "__name__", None) or obj)


def spans(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """The first and the last of each run of neighbors: 0, 1, 2, 5 are (0, 2) and (5, 5)."""
    found: list[tuple[int, int]] = []
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1] = (found[-1][0], number)
        else:
            found.append((number, number))
    return found


def ranks_in_words(ranks: Iterable[int], noun: str = "rank") -> str:
    """`rank 3`, `ranks 1, 2` or `ranks 0-2, 5`; of very many the first ones. `noun`: what is numbered."""
    ordered = sorted(ranks)
    words = []
    for low, high in spans(ordered):
        if low == high:
            words.append(str(low))
        elif high == low + 1:
            words.append(f"{low}, {high}")
        else:
            words.append(f"{low}-{high}")
    if len(words) > 16:
        words[16:] = ["..."]
    plural = "s" * (len(ordered) != 1)
    return f"{noun}{plural} {', '.join(words)}"


def counted(number: int, noun: str) -> str:
    """A number of things in words: `1 process`, `2 processes`, `3 machines`."""
    if number == 1:
        return f"1 {noun}"
    if noun.endswith("s"):
        noun += "e"
    return f"{number} {noun}s"


def by_text(values: Mapping[int, object]) -> list[tuple[str, str]]:
    """The ranks of each value, in words, and the value as text."""
    ranks: dict[str, list[int]] = {}
    for rank, value in values.items():
        ranks.setdefault(str(value), []).append(rank)
    return [(ranks_in_words(members), text) for text, members in ranks.items()]


def values_in_words(values: Mapping[int, object]) -> str:
    """The values of ranks, each once: `ranks 0, 2: save; rank 1: load`; of very many the first ones."""
    groups = by_text(values)
    words = [f"{ranks}: {text}" for ranks, text in groups[:8]]
    if len(groups) > 8:
        words.append(f"and {len(groups) - 8} more")
    return "; ".join(words)


def flat_list(values: Any) -> list[Any]:
    """The values of an option as a list: None, one value, or nested lists, tuples, sets and iterators of them."""
    if values is None:
        return []
    if isinstance(values, str) or not isinstance(values, (Sequence, Set, ValuesView, Iterator)):
        return [values]
    return [value for container in values for value in flat_list(container)]


def is_secret(name: str) -> bool:
    """Whether a name is that of a token, key or password."""
    return (
        re.search(r"token(?!iz|s)|secret|password|(access|api)_?key", name, re.IGNORECASE)
        is not None
    )


def masked(data: Any) -> Any:
    """Nested data with `***` in place of secrets: in `{NAME: value}`, `NAME=value`, and as the password of a URL."""
    if isinstance(data, dict):
        return {
            key: "***" if value and is_secret(str(key)) else masked(value)
            for key, value in data.items()
        }
    if isinstance(data, list):
        return [masked(item) for item in data]
    if not isinstance(data, str):
        return data
    name, equals, _ = data.partition("=")
    if equals and is_secret(name):
        return f"{name}=***"
    return re.sub(r"(://[^/@:\s]*):[^/\s]+@", r"\1:***@", data)


def size_of(count: float) -> str:
    """A number of bytes with its unit: `1.50 MiB`."""
    power = 0
    while count >= 1024 and power < len(_BINARY_UNITS) - 1:
        count, power = count / 1024, power + 1
    if power == 0:
        return f"{count:.0f} B"
    return f"{count:.2f} {_BINARY_UNITS[power]}"


def names_in_words(names: Sequence[str]) -> str:
    """The first entries of a list, and how many more there are."""
    text = ", ".join(name[:300] for name in names[:20])
    if len(names) > 20:
        return f"{text}, and {len(names) - 20} more"
    return text
