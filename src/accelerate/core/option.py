# SPDX-License-Identifier: Apache-2.0
"""One option: its flag, type, choices, default, key in a configuration file and environment variable."""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from .errors import ConfigurationError, suggestion

_TRUE = frozenset({"y", "yes", "t", "true", "on", "1"})
_FALSE = frozenset({"n", "no", "f", "false", "off", "0"})

# Values of `Option.when` that name no switch.
ALWAYS = ("always",)
SET = ("set",)
NEVER = ("never",)


def parse_bool(text: str, where: str = "value") -> bool:
    """The truth value of a word. ConfigurationError, naming `where`, for any other text."""
    word = text.strip().lower()
    if word in _TRUE:
        return True
    if word in _FALSE:
        return False
    shown = text if len(text) <= 100 else f"{text[:100]}..."
    raise ConfigurationError(
        f"{where}={shown!r} is not a truth value: use one of true, false, yes, no, on, off, 1, 0"
    )


def as_text(value: object) -> str:
    """A value as an environment variable holds it."""
    if isinstance(value, bool):
        if value:
            return "true"
        return "false"
    return str(value)


# The records on the path of `accelerate launch` are named tuples: the import of dataclasses takes 8 ms.
class Option(NamedTuple):
    """One option of a launch, or one environment variable that no flag sets.

    Fields:
        name: of the value in the settings of a launch, and of the flag.
        kind: text, int, float, count (a number or "all"), truth ("true" or "false" given as a word), switch (a flag
            without a value) or list (may be given several times).
        choices: the words that are accepted, in any case.
        aliases: other spellings of the choices.
        extra_choices: words that installed packages add.
        check: for a text that neither is free nor has a list of choices; raises ConfigurationError.
        least, greatest: limits of a number.
        variable: the environment variable that the launcher and the started processes read.
        variable_words: words that only the variable may hold, besides what fits the type.
        when: the switches and sizes that must be on for the variable to be published; without one, the option
            itself. SET publishes what was set, also if it is off, ALWAYS also a default. NEVER leaves it to the
            launcher.
        to_variable: the text of the variable.
        key: where a configuration file holds the value, dotted, if not under the name; "" where a file cannot hold it.
        bare: the value of the flag when it is given without one; a value is then given as --flag=VALUE only, so that
            the next word of a command line is never taken for it.
        flags: the spellings of the flag with underscores, where they are not the name.
        question: the question of `accelerate config`.
        engine: the engine that uses it, or several with "or" between, if it is not for all.
    """

    name: str
    kind: str
    help: str = ""
    default: Any = None
    choices: tuple[str, ...] = ()
    aliases: Mapping[str, str] = types.MappingProxyType({})
    extra_choices: Callable[[], list[str]] | None = None
    check: Callable[[str, str], None] | None = None
    least: int | None = None
    greatest: int | None = None
    variable: str = ""
    variable_words: tuple[str, ...] = ()
    when: tuple[str, ...] = ()
    to_variable: Callable[[Any], str] = as_text
    key: str | None = None
    flags: tuple[str, ...] = ()
    bare: str = ""
    question: str = ""
    engine: str = ""

    @property
    def is_published(self) -> bool:
        """Whether the variable is given to the processes of a run."""
        return bool(self.variable) and self.when != NEVER

    @property
    def file_key(self) -> str:
        """The key in a configuration file; empty where a file cannot hold the value."""
        if self.key is None:
            return self.name
        return self.key

    @property
    def spellings(self) -> tuple[str, ...]:
        """All spellings of the flag."""
        names = self.flags or (f"--{self.name}",)
        return tuple(dict.fromkeys(one for name in names for one in (name, name.replace("_", "-"))))

    @property
    def flag(self) -> str:
        """The flag as messages and documentation show it."""
        return next(name for name in self.spellings if name.startswith("--"))

    def read(self, text: str) -> Any:
        """The value of the variable's text. ConfigurationError for what it cannot hold."""
        if text in self.variable_words:
            return text
        # OMP_NUM_THREADS may name a number for each nesting level; the first one is this process's.
        return self.convert(
            text.split(",")[0] if self.variable == "OMP_NUM_THREADS" else text, self.variable
        )

    def convert(self, value: Any, where: str) -> Any:
        """The value in the option's type. ConfigurationError, naming `where`, for one that does not fit."""
        if value is None:
            return None
        if self.kind in ("switch", "truth"):
            if isinstance(value, bool):
                return value
            return parse_bool(str(value), where)
        if self.kind == "list":
            items = value if isinstance(value, (list, tuple)) else [value]
            return [self._text(item, where) for item in items]
        if self.kind == "count" and isinstance(value, str) and value.strip().lower() == "all":
            return "all"
        if self.kind in ("int", "float", "count"):
            number = self._number(value, where)
            if self.kind == "count" and number == -1:
                return None  # so files of the API write "not chosen"
            if self.least is not None and not self.least <= number <= (self.greatest or math.inf):
                raise ConfigurationError(
                    f"{where}={brief(number)} is out of range: use {self.accepted}"
                )
            return number
        text = self._text(value, where)
        if self.check is not None:
            self.check(text, where)
        return text

    @property
    def accepted(self) -> str:
        """The numbers within the limits, in words."""
        if self.least is None:
            return "a number"
        if self.greatest is None:
            return f"{self.least} or more"
        return f"{self.least} to {self.greatest}"

    def _number(self, value: Any, where: str) -> int | float:
        convert, what = (float, "a number") if self.kind == "float" else (int, "an integer")
        if not isinstance(value, bool):
            try:
                number = convert(str(value).strip())
            except ValueError:
                pass
            else:
                if isinstance(number, int) or math.isfinite(number):
                    return number
                what = "a finite number"
        hint = "" if self.least is None else f": use {self.accepted}"
        raise ConfigurationError(f"{where}={brief(value)} is not {what}{hint}")

    def _text(self, value: Any, where: str) -> str:
        # YAML reads a bare `no` as False; the options that have a "no" mean that word.
        negative = next((choice for choice in self.choices if choice.lower() == "no"), None)
        if (
            isinstance(value, (list, tuple))
            and not self.choices
            and not any(_is_nested(item) for item in value)
        ):
            value = ",".join(as_text(item) for item in value)
        if _is_nested(value):
            raise ConfigurationError(f"{where} must be a single value, not {brief(value)}")
        text = negative if value is False and negative else str(value)
        if self.choices:
            return self._choice(text, where)
        return text

    def _choice(self, text: str, where: str) -> str:
        if text in self.choices:
            return text
        word = text.strip().lower()
        known = {choice.lower(): choice for choice in self.choices} | dict(self.aliases)
        if word in known:
            return known[word]
        choices = [*self.choices, *(self.extra_choices() if self.extra_choices else ())]
        if text in choices:
            return text
        raise ConfigurationError(
            f"{where}={brief(text)} is not one of {', '.join(choices)}{suggestion(text, choices)}"
        )


class Group(NamedTuple):
    """Options of one subject, in their order: a topic of the help. `usual`: the ones in the short help."""

    title: str
    help: str
    options: tuple[Option, ...]
    usual: tuple[str, ...] = ()


def brief(value: Any) -> str:
    """A value as messages show it, cut where it is long."""
    text = repr(value)
    if len(text) <= 120:
        return text
    return f"{text[:100]}... ({len(text)} characters)"


def _is_nested(value: Any) -> bool:
    return isinstance(value, (dict, list, tuple, set))
