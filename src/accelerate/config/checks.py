# SPDX-License-Identifier: Apache-2.0
"""The base of options objects, and what their fields may hold.

Each check returns the value, or raises ConfigurationError with field and value.
"""

from __future__ import annotations

import copy
import dataclasses
import numbers
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeVar

from ..core import env
from ..core.enums import SHORT_DTYPES
from ..core.errors import ConfigurationError, suggestion

if TYPE_CHECKING:
    import torch

E = TypeVar("E", bound=Enum)


class KwargsHandler:
    """Base of the API's `...Kwargs` objects, which are dataclasses."""

    def to_dict(self) -> dict[str, Any]:
        """All fields and their values (copies)."""
        return copy.deepcopy(self.__dict__)

    def to_kwargs(self) -> dict[str, Any]:
        """The fields whose values differ from the defaults: what has to be handed on to torch."""
        values = self.to_dict()
        changed = {}
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            default = field.default
            if field.default_factory is not dataclasses.MISSING:
                default = field.default_factory()
            value = values.get(field.name, default)
            if value != default:
                changed[field.name] = value
        return changed


def truth(field: str, value: Any) -> bool:
    """True or False, given as such, as 1 or 0, or as a word (yes, no, true, false, on, off)."""
    if isinstance(value, str):
        return env.parse_bool(value, where=field)
    # NumPy's truth values are no Python bool.
    if (isinstance(value, (bool, int)) or type(value).__name__ == "bool") and value in (0, 1):
        return bool(value)
    raise ConfigurationError(f"{field}={value!r}: use True or False")


def fields_of(options: Any) -> None:
    """Check the fields of a dataclass that are annotated as truth values and numbers, and that are not None.

    A truth value that is given as a word becomes True or False: any text that is not empty is true in Python.
    """
    for field in dataclasses.fields(options):
        kind = str(field.type).removesuffix(" | None")
        value = getattr(options, field.name)
        name = f"{type(options).__name__}.{field.name}"
        if value is None:
            continue
        if kind == "bool":
            setattr(options, field.name, truth(name, value))
        elif kind in ("int", "float") and (
            isinstance(value, bool) or not isinstance(value, numbers.Real)
        ):
            raise ConfigurationError(f"{name}={value!r} must be a number")


def value_or(value: Any, variable: str, default: Any = None) -> Any:
    """The value; None takes the variable, else the default."""
    if value is None:
        value = env.value(variable)
    if value is None:
        return default
    return value


def truth_or(field: str, value: Any, variable: str, default: bool = False) -> bool:
    """A truth value; None takes the variable, else the default."""
    return truth(field, value_or(value, variable, default))


def integer(field: str, value: Any, least: int = 1) -> int:
    """An integer of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigurationError(f"{field}={value!r} must be an integer of at least {least}")
    return value


def texts(field: str, value: Any, what: str = "names") -> list[str]:
    """Several texts, none of them empty; one alone may stand for itself."""
    if isinstance(value, str):
        value = [value]
    if isinstance(value, Mapping) or not isinstance(value, Iterable):
        raise ConfigurationError(f"{field}={value!r}: use a list of {what}")
    listed = list(value)
    for entry in listed:
        if not isinstance(entry, str) or not entry.strip():
            raise ConfigurationError(f"{field} contains {entry!r}: use a list of {what}")
    return listed


def word(field: str, value: Any, choices: Iterable[str]) -> str:
    """One of `choices`, written in any case."""
    words = list(choices)
    if isinstance(value, str):
        chosen = {choice.lower(): choice for choice in words}.get(value.lower())
    else:
        chosen = None
    if chosen is None:
        raise ConfigurationError(
            f"{field}={value!r}: use one of {', '.join(words)}{suggestion(value, words)}"
        )
    return chosen


def member(field: str, value: Any, kind: type[E]) -> E:
    """The member of an enum, given as such or by its value."""
    try:
        return kind(value)
    except ValueError:
        values = ", ".join(str(entry.value).lower() for entry in kind)
        raise ConfigurationError(f"{field}={value!r} is unknown: use one of {values}") from None


def dtype(field: str, value: Any) -> torch.dtype | None:
    """A floating-point dtype of torch, given as such or by its name (float16 or fp16); None stays None."""
    import torch

    if isinstance(value, str):
        name = value.removeprefix("torch.")
        value = getattr(torch, SHORT_DTYPES.get(name, name), value)
    if value is not None and not (isinstance(value, torch.dtype) and value.is_floating_point):
        raise ConfigurationError(
            f"{field}={value!r} is not a floating-point dtype: use one of {', '.join(SHORT_DTYPES)}"
        )
    return value
