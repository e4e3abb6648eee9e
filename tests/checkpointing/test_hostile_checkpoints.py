# SPDX-License-Identifier: Apache-2.0
"""Files that were damaged or edited by hand: a load succeeds, or names the file, in bounded memory and time.

Mutants are made from a seed. They are loaded in one process whose address space is limited.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from cases import cases

FOLDER = Path(__file__).parent


def fuzz(program: str, root: Path, count: int, seed: int, timeout: float) -> None:
    """Run a program of this folder on the mutants of a seed. It fails with what it has found."""
    done = subprocess.run(
        [sys.executable, str(FOLDER / f"fuzz_{program}.py"), str(root), str(count), str(seed)],
        capture_output=True, text=True, timeout=timeout, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


@pytest.mark.parametrize("program, count", cases([("native", 15), ("formats", 40)], thorough=[("formats", 40)]))
def test_mutants_are_loaded_or_named(program, count, tmp_path):
    fuzz(program, tmp_path, count, 1, 170)


@pytest.mark.thorough
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(1, 5))
@pytest.mark.parametrize("program, count", [("native", 600), ("formats", 2000)])
def test_more_mutants(program, count, seed, tmp_path):
    fuzz(program, tmp_path, count, seed, 800)
