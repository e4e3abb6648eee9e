# SPDX-License-Identifier: Apache-2.0
"""One option of a launch: flag, type, default, place in a configuration file, variable of the started processes."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

from ..core.env import as_text, parse_bool
from ..core.errors import ConfigurationError, nearest


@dataclass(frozen=True)
class Option:
    """One option of a launch.

    kind: text, int, float, count (a number or "all"), truth ("true"/"false" given as a word), switch (a flag without
    a value) or list (may be given several times). key: where a configuration file holds it, dotted. variable: what
    the started processes read. when: the switch that must be on for the variable to be published.
    """

    name: str
    kind: str
    help: str
    default: Any = None
    choices: tuple[str, ...] = ()
    key: str | None = None
    variable: str | None = None
    when: str | None = None
    flags: tuple[str, ...] = ()

    @functools.cached_property
    def spellings(self) -> tuple[str, ...]:
        if self.flags:
            return self.flags
        under = f"--{self.name}"
        return (under, under.replace("_", "-")) if "_" in self.name else (under,)

    def convert(self, value: Any, where: str) -> Any:
        """The value in the option's type. ConfigurationError, naming `where`, for one that cannot be it."""
        if value is None:
            return None
        if self.kind in ("switch", "truth"):
            return value if isinstance(value, bool) else parse_bool(_line(value), where=where)
        if self.kind == "list":
            items = value if isinstance(value, (list, tuple)) else [value]
            return [_passable(self._text(item, where), where) for item in items]
        if self.kind == "count" and isinstance(value, str) and value.strip().lower() == "all":
            return "all"
        if self.kind in ("int", "float", "count"):
            return _number(value, self.kind, where)
        return _passable(self._text(value, where), where)

    def _text(self, value: Any, where: str) -> str:
        # YAML reads a bare `no` as False; the options that have a "no" mean that word.
        negative = next((choice for choice in self.choices if choice.lower() == "no"), None)
        if isinstance(value, (list, tuple)) and not self.choices and not any(_is_nested(item) for item in value):
            value = ",".join(as_text(item) if isinstance(item, bool) else _line(item) for item in value)
        if _is_nested(value):
            raise ConfigurationError(f"{where} must be a single value, not {brief(value)}")
        text = negative if value is False and negative else _line(value)
        if not self.choices or text in self.choices:
            return text
        for choice in self.choices:
            if text.lower() == choice.lower():
                return choice
        near = nearest(text, list(self.choices))
        meant = f" (did you mean {near}?)" if near else ""
        raise ConfigurationError(f"{where}={brief(text)} is not one of {', '.join(self.choices)}{meant}")


def _is_nested(value: Any) -> bool:
    return isinstance(value, (dict, list, tuple, set))


def _line(value: Any) -> str:
    try:
        return str(value)
    except ValueError:  # a whole number of more digits than Python likes to write out
        return brief(value)


def _passable(text: str, where: str) -> str:
    """The text, if a variable or an argument of a process can hold it."""
    try:
        fine = "\0" not in text and text.encode() is not None
    except UnicodeEncodeError:
        fine = False
    if not fine:
        raise ConfigurationError(f"{where}={brief(text)} holds a character that no variable of a process can hold")
    return text


def brief(value: Any) -> str:
    """A value as messages show it: all of it while it is short."""
    try:
        text = repr(value)
    except ValueError:  # a whole number of more digits than Python likes to write out
        text = f"a number of {value.bit_length()} bits"
    return text if len(text) <= 120 else f"{text[:100]}... ({len(text)} characters)"


def _number(value: Any, kind: str, where: str) -> int | float:
    what, convert = ("a whole number", int) if kind != "float" else ("a finite number", float)
    if not isinstance(value, bool):
        try:
            number = convert(str(value).strip())
        except ValueError:
            pass
        else:
            if isinstance(number, int) or math.isfinite(number):
                return number
    raise ConfigurationError(f"{where}={brief(value)} is not {what}")


@dataclass(frozen=True)
class Setting:
    """A value and where it came from: a flag, a variable, a file's line, or the default."""

    value: Any
    origin: str


@dataclass(frozen=True)
class Group:
    title: str
    help: str
    options: tuple[Option, ...]
