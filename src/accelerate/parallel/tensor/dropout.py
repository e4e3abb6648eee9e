# SPDX-License-Identifier: Apache-2.0
"""Whether a module draws random numbers in training, as far as its rates and its code show."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import CodeType
from typing import Any

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

# Functions that draw, beside those whose names end in "dropout".
_FUNCTIONS = frozenset(
    {"bernoulli", "bernoulli_", "gumbel_softmax", "rand", "rand_like", "randn", "randn_like", "rrelu"}
)


def draws(module: nn.Module) -> bool:
    """Whether a module itself (not its children) drops or draws: a rate above 0, or a function called without one.

    A rate is a number that the module has, or that its code reads of its `config`, under a name with "drop" in it.
    """
    if isinstance(module, _DropoutNd):
        return module.p > 0
    if isinstance(module, nn.RReLU):
        return True
    names = set(_names(type(module)))
    rates = {name: value for name, value in vars(module).items() if "drop" in name}
    config = vars(module).get("config")
    rates |= {name: getattr(config, name) for name in names if "drop" in name and hasattr(config, name)}
    if any(isinstance(value, (int, float)) and value > 0 for value in rates.values()):
        return True
    told = rates.keys() | module._modules.keys()
    # A rate that stands in the code itself.
    written = any(name.endswith("dropout") for name in names) and not any("drop" in name for name in told)
    return written or not names.isdisjoint(_FUNCTIONS)


def _names(kind: type[nn.Module]) -> Iterator[str]:
    """What the methods of a class refer to by name, its initialisers left out."""
    for base in kind.__mro__:
        if base is nn.Module:
            return
        for name, member in vars(base).items():
            if name.lstrip("_").startswith(("init", "reset_")):
                continue
            code: Any = getattr(inspect.unwrap(member), "__code__", None) if callable(member) else None
            if isinstance(code, CodeType):
                yield from _names_in(code)


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    rate = any(isinstance(constant, float) and 0 < constant < 1 for constant in code.co_consts)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)
        elif rate and isinstance(constant, tuple):
            # Of keyword arguments, beside a number that may be one's: dropout_p=0.1.
            yield from (name.removesuffix("_p") for name in constant if isinstance(name, str))
