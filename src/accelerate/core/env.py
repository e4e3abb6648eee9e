# SPDX-License-Identifier: Apache-2.0
"""The only module that reads and writes `os.environ`. `core.options` has a row for each variable that is read."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from .errors import ConfigurationError, suggestion
from .messages import warn
from .option import Option
from .option import as_text as as_text
from .option import parse_bool as parse_bool
from .options import checked_variables, variables

T = TypeVar("T")


def get(name: str, default: str | None = None) -> str | None:
    """The text of a variable; an empty one counts as unset.

    A word of a list comes in the list's spelling. LookupError for a variable without a row in `core.options`,
    ConfigurationError for a value that its row does not accept.
    """
    row = _row_of(name)
    text = os.environ.get(name)
    if not text:
        return default
    if row.kind == "text":
        return str(row.read(text))
    return text


def value(name: str) -> Any:
    """The value of a variable in the type of its row; None where it is unset."""
    row = _row_of(name)
    text = os.environ.get(name)
    if text:
        return row.read(text)
    return None


def get_flag(name: str, default: bool = False) -> bool:
    """The truth value of a variable."""
    found = value(name)
    if found is None:
        return default
    return bool(found)


def get_int(name: str) -> int | None:
    """The integer in a variable, None where it is unset."""
    found = value(name)
    if isinstance(found, str):
        raise ConfigurationError(f"{name}={found!r} is not an integer")
    if found is None:
        return None
    return int(found)


def _row_of(variable: str) -> Option:
    """The row of a variable. LookupError for one without a row: a typing error in this package."""
    row = variables().get(variable)
    if row is None:
        meant = suggestion(variable, variables())
        raise LookupError(f"the variable {variable} does not have a row in core/options.py{meant}")
    return row


# The API no longer has it. transformers 4 sets it to "false".
_IPEX = "ACCELERATE_" + "USE_IPEX"


def check_run() -> None:
    """Check the variables of a run. ConfigurationError names the variable, its value and what is accepted.

    Warns of variables with our prefix that nothing reads: they may be typing errors. It does so in the launcher, or on
    rank 0 of a run without one.
    """
    for row in checked_variables():
        text = os.environ.get(row.variable)
        if text:
            row.read(text)
    unknown = [
        name for name in os.environ if name.startswith("ACCELERATE_") and name not in variables()
    ]
    if os.environ.get(_IPEX) == "false":
        unknown.remove(_IPEX)
    for name in () if os.environ.get("ACCELERATE_LAUNCH_TIME") else unknown:
        meant = suggestion(
            name, [known for known in variables() if known.startswith("ACCELERATE_")]
        )
        warn(f"the environment variable {name} is not read{meant}: correct its name or unset it")


def raw(name: str) -> str | None:
    """The text of a variable as it is; None where it is unset."""
    return os.environ.get(_row_of(name).variable)


def all_with_prefix(prefix: str) -> dict[str, str]:
    """Return the variables whose names start with `prefix`."""
    return {name: text for name, text in os.environ.items() if name.startswith(prefix)}


def publish(values: Mapping[str, Any]) -> None:
    """Set variables of this process and its children. None removes one."""
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = as_text(value)


def child_environment(extra: Mapping[str, Any] | None = None) -> dict[str, str]:
    """A copy of this environment with variables changed, for a process to be started. None removes one."""
    changed = {
        name: None if value is None else as_text(value) for name, value in (extra or {}).items()
    }
    return {name: text for name, text in ({**os.environ} | changed).items() if text is not None}


# The API's own helpers, public as accelerate.utils.*


def str_to_bool(value: str, to_bool: bool = False) -> int | bool:
    """Return 1 or 0 (with `to_bool`, True or False) for the common truth words.

    Raises ValueError for any other text.
    """
    found = parse_bool(value)
    if to_bool:
        return found
    return int(found)


def get_int_from_env(env_keys: Sequence[str], default: int) -> int:
    """The first variable of `env_keys` that is a number of at least 0, otherwise `default`."""
    for key in env_keys:
        found = int(os.environ.get(key, -1))
        if found >= 0:
            return found
    return default


def parse_flag_from_env(key: str, default: bool = False) -> bool:
    """The truth value of an environment variable. Raises ValueError for any other text."""
    text = os.environ.get(key)
    if text:
        return parse_bool(text, key)
    return parse_bool(str(default), "default")


def parse_choice_from_env(key: str, default: str = "no") -> str:
    """Return the text of a variable, or `default` if it is not set."""
    return os.environ.get(key, str(default))


def are_libraries_initialized(*library_names: str) -> list[str]:
    """Return those of the named libraries that this process has imported.

    Args:
        *library_names: names of top-level modules.
    """
    import sys

    return [name for name in library_names if name in sys.modules]


def convert_dict_to_env_variables(current_env: Mapping[str, Any]) -> list[str]:
    """Return lines `NAME=value` for an environment file.

    Args:
        current_env: name -> value. Entries that are empty, or have a space, a line break or one of `;<>`, are left
            out with a warning.

    Returns:
        One text for each line, which ends with a line break.
    """
    lines = []
    forbidden = (";", "\n", "<", ">", " ")
    for key, value in current_env.items():
        text = str(value)
        if text and key and not any(char in key + text for char in forbidden):
            lines.append(f"{key}={text}\n")
        else:
            warn(
                f"{key}={text!r} is left out: it contains a character that would break the "
                "environment line"
            )
    return lines


@contextlib.contextmanager
def clear_environment() -> Iterator[None]:
    """Return a context with an empty environment. The previous environment is restored afterward."""
    saved = dict(os.environ)
    os.environ.clear()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(saved)


@contextlib.contextmanager
def patch_environment(**kwargs: Any) -> Iterator[None]:
    """Return a context in which environment variables (in upper case) are set, and restored afterward."""
    names = {key.upper(): str(value) for key, value in kwargs.items()}
    saved = {name: os.environ.get(name) for name in names}
    os.environ.update(names)
    try:
        yield
    finally:
        publish(saved)


def purge_accelerate_environment(func_or_cls: T) -> T:
    """Decorate a function or test class to remove the ACCELERATE_* variables that it sets.

    Of a class, and of those derived from it, the methods whose names start with `test` are decorated.
    """
    import inspect

    if not inspect.isclass(func_or_cls):
        return _purging(func_or_cls)  # type: ignore[arg-type, return-value]
    decorated: Any = func_or_cls

    def decorate_tests(cls: type, /, **kwargs: Any) -> None:
        if cls is not decorated:
            super(decorated, cls).__init_subclass__(**kwargs)
        for name in filter(
            lambda name: name.startswith("test"), dir(cls) if cls is decorated else list(vars(cls))
        ):
            member = inspect.getattr_static(cls, name)
            if isinstance(member, staticmethod | classmethod):
                setattr(cls, name, type(member)(_purging(member.__func__)))
            elif inspect.isfunction(member):
                setattr(cls, name, _purging(member))

    decorate_tests(decorated)
    decorated.__init_subclass__ = classmethod(decorate_tests)
    return func_or_cls


def _purging(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        saved = all_with_prefix("ACCELERATE_")
        try:
            return function(*args, **kwargs)
        finally:
            for name in all_with_prefix("ACCELERATE_"):
                del os.environ[name]
            os.environ.update(saved)

    return wrapper


def env_var_path_add(env_var_name: str, path_to_add: str) -> str:
    """The value of an environment variable that lists paths, with another path appended."""
    return os.pathsep.join(
        [*filter(None, os.environ.get(env_var_name, "").split(os.pathsep)), path_to_add]
    )
