# SPDX-License-Identifier: Apache-2.0
"""JSON that others may have written or edited: one kind of error for all that can be wrong with it."""

from __future__ import annotations

import json
import os
from typing import Any

from .files import read_regular

LIMIT = 256 << 20  # bytes of a JSON file

# An object of JSON, whose values are checked by whoever reads them.
JSONObject = dict[str, Any]


class JSONTextError(ValueError):
    """A text that is not JSON, or JSON that has two meanings. The message does not name the file."""


def decode_text(raw: bytes | bytearray) -> str:
    """UTF-8 text, with or without a mark at its start. Raises JSONTextError for any other encoding."""
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise JSONTextError(f"it is not UTF-8: {error}") from None


def parse(raw: bytes | bytearray | str, numbers: bool = False) -> Any:
    """The value of a JSON text. With `numbers`, NaN and the infinities are numbers, as Python's own writer has them.

    Raises JSONTextError for what is not JSON, for a key that stands twice, and for nesting that is too deep.
    """
    text = raw if isinstance(raw, str) else decode_text(raw)
    options: dict[str, Any] = {} if numbers else {"parse_constant": _refuse_constant}
    try:
        return json.loads(text, object_pairs_hook=_object, **options)
    except JSONTextError:
        raise
    except RecursionError:
        raise JSONTextError("it is nested too deep") from None
    except ValueError as error:
        raise JSONTextError(f"it is not JSON: {error}") from None


def read(path: str | os.PathLike[str], limit: int = LIMIT, numbers: bool = False) -> Any:
    """The value in a JSON file. Raises OSError unless it is a regular file of at most `limit` bytes, JSONTextError."""
    return parse(read_regular(path, limit), numbers)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise JSONTextError(f"the key {twice[:80]!r} appears twice")
    return found


def _refuse_constant(name: str) -> Any:
    raise JSONTextError(f"{name} is not a JSON number")
