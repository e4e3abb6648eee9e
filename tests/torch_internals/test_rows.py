# SPDX-License-Identifier: Apache-2.0
"""The table of what lies below public APIs: each row has a test, and that test fails if the row is off."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from accelerate import torch_internals

PROJECT = Path(__file__).parents[2]
ROWS = torch_internals.rows()


@pytest.mark.parametrize("name", ROWS)
def test_row_is_complete(name: str) -> None:
    row = ROWS[name]
    assert all((row.what, row.versions, row.upstream, row.needed_by, row.without))
    path, _, function = row.test.partition("::")
    assert f"def {function.partition('[')[0].rpartition('::')[2]}(" in (PROJECT / path).read_text()


@pytest.mark.thorough
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ROWS)
def test_row_is_needed(name: str) -> None:
    """The row's test fails without the row."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", ROWS[name].test]
    env = {**os.environ, "ACCELERATE_TORCH_INTERNALS_OFF": name}
    done = subprocess.run(command, env=env, cwd=PROJECT, capture_output=True, text=True)
    if "1 skipped" in done.stdout:
        pytest.skip("this version of torch does not need it")
    assert done.returncode == 1 and " failed" in done.stdout, done.stdout
