# SPDX-License-Identifier: Apache-2.0
"""The tools that measure the source."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[1] / "tools"
# Each line of it that is a use ends in the kind of the use.
SOURCE = """
from collections import _tuplegetter  # import
import importlib._bootstrap  # import
from json import JSONEncoder

HOOKS = "_hooks"


class Ours(JSONEncoder):
    _count = 0

    def __init__(self, module, unit, _x):
        self._module = module
        self._x = unit._asdict()
        module._children  # attribute
        module._module
        unit._parameters  # masked
        unit.sharded_param  # undocumented
        getattr(module, "_secret")  # string
        getattr(module, HOOKS)  # string
        vars(module)["_secret"]  # string
        module.__dict__.pop("_secret")  # string
        module.__dict__["weight"] = self._private = super()._anything
"""


@pytest.fixture
def private_uses(monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.syspath_prepend(TOOLS)
    return importlib.import_module("private_uses")


def test_private_uses(private_uses, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "measured"
    (package / "torch_internals").mkdir(parents=True)
    (package / "__init__.py").write_text("_parameters = {}\n")
    (package / "torch_internals" / "__init__.py").write_text("import os\n\nKIND = os._Environ\n")
    (package / "uses.py").write_text(SOURCE)
    (package / "base.py").write_text(
        "import logging\n\nclass Handler(logging.Handler):\n    def _at_fork_reinit(self): ...\n"
        "class Filter(logging.Filter):\n    def _mine(self): ...\n"
        "class Inner(Filter):\n    def _mine(self): ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    outside, inside = private_uses.find(package)
    expected = [
        f"uses.py:{number}: {line.partition('  # ')[2]}"
        for number, line in enumerate(SOURCE.splitlines(), 1)
        if "  # " in line
    ]
    expected.append("measured.base: override")
    assert [": ".join(use.split(": ")[:2]) for use in outside] == expected
    assert outside[-1] == "measured.base: override: Handler._at_fork_reinit of logging"
    assert inside == ["torch_internals/__init__.py:3: attribute: os._Environ"]


def test_limits(private_uses, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    budgets = importlib.import_module("budgets")
    source = tmp_path / "src" / "accelerate"
    (source / "core").mkdir(parents=True)
    (source / "core" / "one.py").write_text(
        '"""No token."""\nif x:  # a comment\n    x = [1,\n2]\n'
    )
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    for name, value in (
        ("ROOT", tmp_path),
        ("SOURCE", source),
        ("CONFIGURATION", tmp_path / "pyproject.toml"),
    ):
        monkeypatch.setattr(budgets, name, value)
    monkeypatch.setattr(private_uses, "find", lambda source: (["a use"], []))
    assert budgets.main(["--update"]) == 0
    assert "core = [10, 3.3, 33.3]\n" in (tmp_path / "pyproject.toml").read_text()
    assert budgets.main([]) == 0
    monkeypatch.setattr(private_uses, "find", lambda source: (["a use", "another"], []))
    (source / "core" / "two.py").write_text("y = 1\n" * 10)
    capsys.readouterr()
    assert budgets.main([]) == 1
    problems = capsys.readouterr().err
    assert "core: 40 tokens" in problems and "private uses: 2, limit 1" in problems
    assert "tokens a line" not in problems
