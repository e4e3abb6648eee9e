# SPDX-License-Identifier: Apache-2.0
"""The public surface against a frozen copy: names, signatures, members, enum values, constants and launcher options.

In `tests/data/api-1.15.json` a signature is a list: `name`, `name=default` (`?`: any default), `*rest`, `**rest`, and
`!name` for a keyword-only parameter. Our own parameters may follow, with defaults.
"""

from __future__ import annotations

import enum
import importlib
import inspect
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import accelerate
from accelerate.core import lazy

FROZEN = json.loads((Path(__file__).parent / "data" / "api-1.15.json").read_text())
MODULES: dict[str, dict[str, Any]] = FROZEN["modules"]


def entries(module: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The frozen entries of a module; one that another module has in the same form is written there only."""
    for name, entry in MODULES[module].items():
        yield name, MODULES[entry["same as"]][name] if "same as" in entry else entry


def shown(value: Any) -> str:
    """A default as the frozen copy writes it; `?` where it has no plain text."""
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    empty = isinstance(value, (list, tuple, dict, set)) and not value
    return (
        repr(value) if value is None or isinstance(value, (bool, int, float, str)) or empty else "?"
    )


def disagreements(recorded: list[str], function: Callable[..., Any]) -> Iterator[str]:
    """In what the function cannot be called as recorded."""
    ours = inspect.signature(function).parameters
    kinds = {parameter.kind for parameter in ours.values()}
    order = {name: place for place, name in enumerate(ours)}
    last, known = -1, {"self"}
    for text in recorded:
        if text.startswith("*"):
            wanted = (
                inspect.Parameter.VAR_KEYWORD
                if text.startswith("**")
                else inspect.Parameter.VAR_POSITIONAL
            )
            if wanted not in kinds:
                yield f"does not take {text}"
            continue
        name, _, default = text.removeprefix("!").partition("=")
        known.add(name)
        if name not in ours:
            if inspect.Parameter.VAR_KEYWORD not in kinds or not (default or text.startswith("!")):
                yield f"lacks {name}"
            continue
        if not text.startswith("!"):
            if ours[name].kind is inspect.Parameter.KEYWORD_ONLY:
                yield f"{name} is keyword-only"
            if order[name] < last:
                yield f"{name} stands in another order"
            last = max(last, order[name])
        if default and ours[name].default is inspect.Parameter.empty:
            yield f"{name} lacks its default {default}"
        elif default and default != "?" and shown(ours[name].default) not in (default, "?"):
            yield f"{name} defaults to {shown(ours[name].default)}, not {default}"
    for name, parameter in ours.items():
        gathers = parameter.kind in (
            inspect.Parameter.VAR_POSITIONAL,
            inspect.Parameter.VAR_KEYWORD,
        )
        if name not in known and not gathers and parameter.default is inspect.Parameter.empty:
            yield f"demands {name}"


def shortcomings(where: str, entry: dict[str, Any], found: Any) -> Iterator[str]:
    """In what a name of ours falls short of its frozen entry."""
    if entry.get("parameters") is not None:
        yield from (f"{where}: {why}" for why in disagreements(entry["parameters"], found))
    if entry["kind"] == "enum":
        members = {name: member.value for name, member in found.__members__.items()}
        yield from (
            f"{where}.{name} is {members.get(name, 'missing')!r}, not {value!r}"
            for name, value in entry["values"].items()
            if members.get(name) != value
        )
    if entry["kind"] == "constant" and found != entry["value"]:
        yield f"{where} is {found!r}, not {entry['value']!r}"
    for name, recorded in entry.get("members", {}).items():
        if not hasattr(found, name) and name not in getattr(found, "__dataclass_fields__", {}):
            yield f"{where}.{name} is missing"
        elif isinstance(recorded, list):
            member = inspect.getattr_static(found, name)
            plain = member.__func__ if isinstance(member, (staticmethod, classmethod)) else member
            yield from (f"{where}.{name}: {why}" for why in disagreements(recorded, plain))


@pytest.mark.parametrize("module", MODULES)
def test_names_and_signatures(module: str) -> None:
    home = importlib.import_module(module)
    short = []
    for name, entry in entries(module):
        if not hasattr(home, name):
            short.append(f"{module}.{name} is missing")
        else:
            short += shortcomings(f"{module}.{name}", entry, getattr(home, name))
    assert not short, "\n".join(short)


def unannotated(function: Callable[..., Any]) -> Iterator[str]:
    """The parameters of a function that have no annotation; `return` for its result."""
    signature = inspect.signature(function)
    for name, parameter in signature.parameters.items():
        if parameter.annotation is inspect.Parameter.empty and name not in ("self", "cls"):
            yield name
    if signature.return_annotation is inspect.Signature.empty:
        yield "return"


@pytest.mark.parametrize("module", MODULES)
def test_parameters_and_results_are_annotated(module: str) -> None:
    """Editors and type checkers know each function of the API, and each public method of its classes."""
    found = []
    for name in MODULES[module]:
        value = getattr(importlib.import_module(module), name)
        functions = {name: value} if inspect.isfunction(value) else {}
        if inspect.isclass(value) and value.__module__.startswith("accelerate."):
            for member, plain in vars(value).items():
                plain = (
                    plain.fget if isinstance(plain, property) else getattr(plain, "__func__", plain)
                )
                if inspect.isfunction(plain) and (
                    member == "__init__" or not member.startswith("_")
                ):
                    functions[f"{name}.{member}"] = plain
        for where, function in functions.items():
            if function.__module__.startswith("accelerate."):
                found += [f"{module}.{where}: {parameter}" for parameter in unannotated(function)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("module", FROZEN["also"])
def test_names_that_other_libraries_import(module: str) -> None:
    home = importlib.import_module(module)
    assert [name for name in FROZEN["also"][module] if not hasattr(home, name)] == []


def test_launcher_options() -> None:
    from accelerate.commands.launch import launch_command_parser

    ours = {flag for action in launch_command_parser()._actions for flag in action.option_strings}
    frozen = [
        [flag for flag in flags if flag.startswith("-")] for flags in FROZEN["commands"]["launch"]
    ]
    assert [flags for flags in frozen if flags and not ours & set(flags)] == []


@pytest.mark.parametrize(
    "module", ["accelerate", *(name for name in MODULES if name.startswith("accelerate.utils"))]
)
def test_every_export_resolves(module: str) -> None:
    exports = importlib.import_module(module).EXPORTS
    lost = []
    for home, names in exports.items():
        found = importlib.import_module(f"{lazy.ROOT}.{home}")
        lost += [f"{home}.{name}" for name in names if not hasattr(found, name)]
    assert not lost, "\n".join(lost)


def test_type_checkers_see_the_same_exports() -> None:
    """The stubs are those that `tools/stubs.py` writes; mypy checks that each name in them exists."""
    project = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, project / "tools" / "stubs.py", "--check"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert accelerate.__all__ == sorted(accelerate.__all__)
