# SPDX-License-Identifier: Apache-2.0
"""The scripts that docs/exactness.md links: each is certified in the layouts that it names."""

from __future__ import annotations

import functools
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import certified
import pytest

from accelerate.certify.certificate import CODES

SCRIPTS = Path(__file__).parent / "scripts"
PAGE = Path(__file__).parents[2] / "docs" / "exactness.md"
LINK = re.compile(r"certify/scripts/(\w+)\.py")
# The columns of its table, with the layout in which their scripts are certified.
COLUMNS = {
    "DDP": "ddp:2",
    "FSDP2": "fsdp:2",
    "FSDP1": "fsdp1:2",
    "tensor parallel": "tp:2",
    "pipeline": "pp:2",
    "context parallel": "cp:2",
}


def named_layouts() -> dict[str, list[str]]:
    """Layout -> the names of the scripts that are certified in it."""
    layouts: dict[str, list[str]] = {}
    for path in sorted(SCRIPTS.glob("*.py")):
        stated = re.search(r"Certified in (.*)\.\n", path.read_text())
        for layout in stated[1].split() if stated else ():
            layouts.setdefault(layout, []).append(path.stem)
    return layouts


LAYOUTS = named_layouts()


def record(names: list[str], folder: Path, runs: dict[str, dict[str, Any]]) -> None:
    """Run on each rank."""
    sys.path.insert(0, str(SCRIPTS))
    programs = [certified.repetition(name, program_of) for name in names]
    certified.record(programs, folder, runs)


def program_of(name: str) -> Callable[[], Any]:
    """The script of this name."""
    return functools.partial(runpy.run_path, str(SCRIPTS / f"{name}.py"), run_name="__main__")


def test_each_script_of_the_page_names_its_layouts() -> None:
    linked = set(LINK.findall(PAGE.read_text()))
    assert linked == set().union(*LAYOUTS.values())


def test_each_exact_cell_has_a_script_that_is_certified() -> None:
    """Each row links scripts, of which one is certified in the layout of each column whose cell says exact."""
    text = PAGE.read_text()
    table = text.partition("| | DDP |")
    header, _, *rows = "".join(table[1:]).splitlines()
    names = [name.strip() for name in header.strip("|").split("|")]
    assert set(COLUMNS) < set(names)
    missing, cells = [], 0
    for row in rows:
        if row.count("|") != header.count("|"):
            break
        texts = dict(zip(names, row.strip("|").split("|"), strict=True))
        # The list below the table begins each item with the name of its row.
        listed = [line for line in text.splitlines() if line.startswith(f"- {texts[''].strip()}: ")]
        scripts = set(LINK.findall("".join(listed)))
        for column, layout in COLUMNS.items():
            if not texts[column].strip().startswith("exact"):
                continue
            cells += 1
            if scripts.isdisjoint(LAYOUTS.get(layout, ())):
                missing.append(f"{texts['']}: {column}")
    assert cells > 50
    assert not missing, "\n".join(missing)


@pytest.mark.thorough
@pytest.mark.timeout(900)
@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_scripts_are_equal(ranks: Any, tmp_path: Path, layout: str) -> None:
    names = certified.repetitions(LAYOUTS[layout])
    rows = certified.verdicts(ranks, record, names, layout, tmp_path, 4)
    alarms = [f"{name}: {row.text()}" for name, row in rows.items() if CODES[row.verdict]]
    assert not alarms, "\n".join(alarms)
