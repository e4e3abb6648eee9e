# SPDX-License-Identifier: Apache-2.0
"""Names, paths, nested dictionaries and sizes of plain objects."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from accelerate.core.objects import convert_bytes, get_pretty_name, merge_dicts, recursive_getattr


@pytest.mark.parametrize(
    ("size", "words"),
    [
        (12, "12 bytes"),
        (2048, "2.0 KB"),
        (1234567, "1.18 MB"),
        (3 * 2**30, "3.0 GB"),
        (5.5e15, "4.88 PB"),
    ],
)
def test_convert_bytes(size: float, words: str) -> None:
    assert convert_bytes(size) == words


def test_merge_dicts_joins_nested_ones_in_place() -> None:
    destination = {"a": {"z": 3, "y": 0}, "b": 1}
    merged = merge_dicts({"a": {"y": 1, "deep": {"k": 2}}, "c": 4, "b": {"now": 5}}, destination)
    assert merged is destination
    assert merged == {"a": {"z": 3, "y": 1, "deep": {"k": 2}}, "b": {"now": 5}, "c": 4}


def test_recursive_getattr() -> None:
    thing = SimpleNamespace(a=SimpleNamespace(b=SimpleNamespace(c=7)))
    assert recursive_getattr(thing, "a.b.c") == 7
    with pytest.raises(AttributeError):
        recursive_getattr(thing, "a.x.c")


def test_get_pretty_name() -> None:
    class Inner:
        pass

    wanted = "test_get_pretty_name.<locals>.Inner"
    assert get_pretty_name(Inner) == get_pretty_name(Inner()) == wanted
    assert get_pretty_name(len) == "len"
    assert get_pretty_name(3) == "int"
