# SPDX-License-Identifier: Apache-2.0
"""Packages that are imported where a test first uses them: each worker of pytest collects all tests.

peft = package("peft")  # as `pytest.importorskip("peft")`
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import pytest


class _Package:
    """Stands for a module, and imports it when a name of it is first asked for."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            # pytest asks every object of a test module for `__test__` and `_mock_name`.
            raise AttributeError(name)
        return getattr(importlib.import_module(self._name), name)


def package(name: str) -> Any:
    """The module of this name, imported at its first use; the test module is skipped where its package is absent."""
    if importlib.util.find_spec(name.partition(".")[0]) is None:
        pytest.skip(f"{name} is not installed", allow_module_level=True)
    return _Package(name)
