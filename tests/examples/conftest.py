# SPDX-License-Identifier: Apache-2.0
"""The examples as modules, for what can be tested without a process of its own."""

import importlib.util
import sys
from pathlib import Path

import pytest
from ranks import output_of

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
        assert not [
            line
            for output in outputs
            for line in output.stderr.splitlines()
            if line.startswith("[RANK ")
        ]

    return check


@pytest.fixture
def printed(ranks, script, logs_no_mistake):
    """A function that runs an example on ranks, and returns the lines that rank 0 printed; the others print none."""

    def run(name, nproc, *arguments, function=output_of, env=None):
        case = ranks(nproc)
        outputs = case.run(
            function, script(name), *arguments, env={"ACCELERATE_USE_CPU": "true", **(env or {})}
        )
        logs_no_mistake(case.outputs)
        assert not any(outputs[1:])
        return outputs[0].splitlines()

    return run
