# SPDX-License-Identifier: Apache-2.0
"""Parametrised cases of which some are left to `make test-all`."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable
from typing import Any

import pytest


def cases(values: Iterable[Any], thorough: Collection[Any]) -> list[Any]:
    """The values for `pytest.mark.parametrize`; those in `thorough` take a path that the others take as well."""
    return [
        pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.thorough)
        if value in thorough
        else value
        for value in values
    ]


def pairs(
    first: Iterable[Any], second: Iterable[Any], usual: Collection[tuple[Any, Any]]
) -> list[Any]:
    """All pairs of two parameters' values; those that are not in `usual` are marked `thorough`."""
    return [
        pytest.param(*pair, marks=() if pair in usual else pytest.mark.thorough)
        for pair in itertools.product(first, second)
    ]
