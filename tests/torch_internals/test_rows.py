# SPDX-License-Identifier: Apache-2.0
"""The table of what lies below public APIs: each row is needed here, and has a reproduction in plain torch."""

from __future__ import annotations

import ast
import contextlib
import importlib.metadata
import io
import os
import re
import runpy
from collections.abc import Callable
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from rank_pool import Ranks

from accelerate import torch_internals

PROJECT = Path(__file__).parents[2]
UPSTREAM = Path(__file__).with_name("upstream")
ROWS = torch_internals.rows()


def reproduction(name: str) -> Path:
    return UPSTREAM / f"{name}.py"


@pytest.mark.parametrize("name", ROWS)
def test_row_is_complete(name: str) -> None:
    row = ROWS[name]
    assert all((row.what, row.versions, row.upstream, row.needed_by, row.without))
    path, _, function = row.test.partition("::")
    assert f"def {function.partition('[')[0].rpartition('::')[2]}(" in (PROJECT / path).read_text()


@pytest.mark.parametrize("name", ROWS)
def test_reproduction_is_ready_to_be_reported(name: str) -> None:
    """It has at most 25 lines of code, and needs nothing of this package."""
    tree = ast.parse(reproduction(name).read_text())
    assert ast.get_docstring(tree)
    lines = ast.unparse(tree.body[1:]).splitlines()
    assert len(lines) <= 25
    assert "accelerate" not in "\n".join(lines)


def test_each_reproduction_has_a_row() -> None:
    assert {path.stem for path in UPSTREAM.glob("*.py")} == set(ROWS)


def applies(name: str) -> bool:
    """Whether the reproduction is for the installed version of its library."""
    versions = re.search(r"^# (\w+): (.+)$", reproduction(name).read_text(), re.MULTILINE)
    if versions is None:
        return True
    library, specifiers = versions.groups()
    installed = importlib.metadata.version(library).partition("+")[0]
    return installed in SpecifierSet(specifiers, prereleases=True)


def what_is_wrong(path: Path) -> str:
    """What a reproduction says when it is run."""
    try:
        runpy.run_path(str(path), run_name="__main__")
    except SystemExit as end:
        return str(end.code or "")
    return ""


@pytest.mark.parametrize("name", ROWS)
def test_it_is_so(name: str, ranks: Callable[..., Ranks]) -> None:
    """The reproduction finds what is wrong, if it is for the installed version of torch, and only then."""
    (wrong,) = ranks(1).run(what_is_wrong, reproduction(name))
    assert bool(wrong) is applies(name), wrong


def outcome_without(name: str) -> tuple[int, str]:
    """The exit code of pytest for the test of a row that is off, and its report."""
    os.environ["ACCELERATE_TORCH_INTERNALS_OFF"] = name
    # hypothesis's plugin takes as long to import as the test.
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    # This process is forked from one that has read the table.
    object.__setattr__(torch_internals.rows()[name], "is_on", False)
    test = str(PROJECT / ROWS[name].test)
    report = io.StringIO()
    plugins = ["-p", "pytest_timeout", "-p", "no:cacheprovider"]
    with contextlib.redirect_stdout(report):
        code = pytest.main(["-q", *plugins, test])
    return int(code), report.getvalue()


@pytest.mark.parametrize("name", ROWS)
def test_row_is_needed(name: str, ranks: Callable[..., Ranks]) -> None:
    """The row's test fails without the row."""
    if not applies(name):
        pytest.skip("this version of torch does not need it")
    code, report = ranks(1).run(outcome_without, name)[0]
    assert code == pytest.ExitCode.TESTS_FAILED, report
    assert re.search(r"^\d+ failed", report, re.MULTILINE), report
