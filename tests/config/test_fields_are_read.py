# SPDX-License-Identifier: Apache-2.0
"""Every field of every plugin, handler and options object is read by code, handed on to torch, or refused."""

import ast
import dataclasses
import functools
from pathlib import Path

import pytest

import accelerate
from accelerate import utils
from accelerate.core.errors import ConfigurationError

# Most of its fields have no counterpart: a run names them.
EXEMPT = {"MegatronLMPlugin"}


class Own:
    """A value that no default has."""

    def __eq__(self, other):
        return self is other

    def __repr__(self):
        return "a value of its own"


OWN = Own()


def options():
    exported = [getattr(utils, name) for name in dir(utils)]
    kinds = {kind for kind in exported if isinstance(kind, type) and dataclasses.is_dataclass(kind)}
    return [
        pytest.param(kind, field.name, id=f"{kind.__name__}.{field.name}")
        for kind in sorted(kinds, key=lambda kind: kind.__name__)
        for field in dataclasses.fields(kind)
        if kind.__name__ not in EXEMPT
    ]


@functools.cache
def names_that_code_reads():
    names = set()
    for file in Path(accelerate.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                names.add(node.attr)
            elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "getattr":
                argument = node.args[1]
                names.add(argument.value if isinstance(argument, ast.Constant) else None)
    return names


def is_handed_on(kind, name):
    """Whether the object gives the field to torch, or lists it among the sizes of a layout."""
    value = kind(**{name: 3}) if name.endswith("_size") else kind()
    if name.endswith("_size"):
        return 3 in value.sizes.values()
    setattr(value, name, OWN)
    return value.to_kwargs()[name] == OWN


def is_refused(kind, name):
    try:
        kind(**{name: OWN})
    except ConfigurationError as error:
        return name in str(error)
    return False


@pytest.mark.parametrize(("kind", "name"), options())
def test_a_field_is_read(kind, name):
    if name not in names_that_code_reads():
        assert is_refused(kind, name) or is_handed_on(kind, name)
