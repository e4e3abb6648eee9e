# SPDX-License-Identifier: Apache-2.0
"""Each public name has a sentence in the reference, and what a loop calls has an example that is valid Python."""

import ast
import inspect
import itertools
import sys
import textwrap
from pathlib import Path
from types import FunctionType

import accelerate
from accelerate import utils

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
import reference

# What a training loop calls, in addition to the methods of `Accelerator`.
IN_A_LOOP = [
    "broadcast",
    "broadcast_object_list",
    "find_executable_batch_size",
    "gather",
    "gather_object",
    "pad_across_processes",
    "reduce",
    "release_memory",
    "send_to_device",
    "set_seed",
    "synchronize_rng_states",
    "tqdm",
]


def documented():
    """Names and objects of the reference: the members of `Accelerator` and what the package and `utils` export."""
    values = {}
    for members in reference.accelerator_sections().values():
        for name, value in members.items():
            values[f"Accelerator.{name}"] = value
    for name in set(accelerate.__all__) - set(accelerate.SUBMODULES) - {"__version__"}:
        values[name] = getattr(accelerate, name)
    for names in utils.EXPORTS.values():
        for name in names:
            values.setdefault(name, getattr(utils, name))
    return {name: value for name, value in values.items() if not is_constant(value)}


def is_constant(value):
    return inspect.getdoc(value) == inspect.getdoc(type(value))


def needs_an_example(name, value):
    if name.startswith("Accelerator."):
        return isinstance(value, FunctionType | staticmethod) and name != "Accelerator.replacement"
    return name in IN_A_LOOP


def example(value):
    """The code below `Example:` in a docstring; empty without one."""
    _, _, text = (inspect.getdoc(value) or "").partition("Example:\n")
    lines = itertools.takewhile(lambda line: not line or line[0] == " ", text.splitlines())
    return textwrap.dedent("\n".join(lines)).replace(">>> ", "").replace("... ", "")


def test_each_name_has_a_sentence():
    names = [
        name for name, value in documented().items() if not reference._sentence(value).endswith(".")
    ]
    assert names == []


def test_what_a_loop_calls_has_an_example():
    names = [
        name
        for name, value in documented().items()
        if needs_an_example(name, value) and not example(value)
    ]
    assert names == []


def test_examples_are_python_and_use_the_name():
    wrong = []
    for name, value in documented().items():
        code = example(value)
        if code:
            nodes = list(ast.walk(ast.parse(code)))
            used = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
            used |= {node.id for node in nodes if isinstance(node, ast.Name)}
            if name.rpartition(".")[2] not in used:
                wrong.append(name)
    assert wrong == []
