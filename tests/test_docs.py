# SPDX-License-Identifier: Apache-2.0
"""The documents keep their word: whole programs in them run, links lead somewhere, names exist."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from rank_pool import Ranks
from ranks import run_script

PROJECT = Path(__file__).parents[1]
DOCUMENTS = [
    path
    for path in sorted(PROJECT.rglob("*.md"))
    if not {".venv", ".venv-peer", "results", "node_modules"} & set(path.relative_to(PROJECT).parts)
]


def blocks(path: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL)


# A block that begins with an import of torch is a whole program; the others are parts of one.
PROGRAMS = [
    pytest.param(block, id=f"{path.name}-{number}")
    for path in DOCUMENTS
    for number, block in enumerate(blocks(path))
    if block.startswith("import torch\n")
]


@pytest.mark.parametrize("program", PROGRAMS)
def test_programs_run(
    program: str, ranks: Callable[[int], Ranks], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text(program)
    monkeypatch.chdir(tmp_path)
    ranks(1).run(run_script, tmp_path / "train.py")


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(PROJECT)))
def test_links_lead_to_files(path: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", path.read_text())
    lost = [target for target in targets if "://" not in target and not (path.parent / target).exists()]
    assert lost == []


def test_imported_names_exist() -> None:
    lost = []
    for path in DOCUMENTS:
        for block in blocks(path):
            for line in re.findall(r"^\s*(from accelerate\S* import [\w, ]+)$", block, re.MULTILINE):
                statement = ast.parse(line.strip()).body[0]
                assert isinstance(statement, ast.ImportFrom) and statement.module
                home = importlib.import_module(statement.module)
                lost += [f"{path.name}: {line}" for alias in statement.names if not hasattr(home, alias.name)]
    assert lost == []


CHANGES = re.findall(r"^```diff\n(diff --git .*?|--- .*?)^```", (PROJECT / "CONTRIBUTING.md").read_text(), re.M | re.S)


@pytest.mark.parametrize("change", CHANGES, ids=range(len(CHANGES)))
def test_changes_shown_to_contributors_apply(change: str, tmp_path: Path) -> None:
    """The diffs fit the sources as they are now, so that a reader can try them."""
    (tmp_path / "change.diff").write_text(change)
    command = ["git", "apply", "--check", str(tmp_path / "change.diff")]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_four_changes_are_shown() -> None:
    assert len(CHANGES) == 4
