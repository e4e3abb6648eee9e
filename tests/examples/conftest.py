# SPDX-License-Identifier: Apache-2.0
"""The examples as modules, for what can be tested without a process of its own."""

import importlib.util
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="session")
def example():
    """A function that imports an example by name."""

    def load(name):
        if name not in sys.modules:
            spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
            sys.modules[name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(sys.modules[name])
        return sys.modules[name]

    return load


@pytest.fixture
def script():
    """A function from an example's name to its path."""
    return lambda name: EXAMPLES / f"{name}.py"


@pytest.fixture
def logs_no_mistake():
    """A function that checks what ranks have printed: none has logged a mistake, as the checks of first steps do."""

    def check(outputs):
        assert not [line for output in outputs for line in output.stderr.splitlines() if line.startswith("[RANK ")]

    return check
