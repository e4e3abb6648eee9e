# SPDX-License-Identifier: Apache-2.0
"""Tests are run again after a crash in a native thread, and more than a few of them fail the run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
# Each case crashes in its first attempt.
CASES = """
import pathlib
import pytest
from rank_pool import NATIVE_CRASH

@pytest.mark.parametrize("number", range({count}))
def test_crash(number):
    marker = pathlib.Path(__file__).with_name(str(number))
    if not marker.exists():
        marker.touch()
        pytest.fail(NATIVE_CRASH)
"""


@pytest.mark.parametrize(("count", "workers"), [(3, 0), (4, 1)])
def test_repeats_are_counted(tmp_path: Path, count: int, workers: int) -> None:
    (tmp_path / "test_cases.py").write_text(CASES.format(count=count))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "conftest", "test_cases.py"]
    if workers:
        command += ["-n", str(workers)]
    else:
        command += ["-p", "no:xdist"]
    folders = os.pathsep.join([str(TESTS), str(TESTS / "helpers")])
    env = {**os.environ, "PYTHONPATH": folders}
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True)
    assert f"{count} passed" in done.stdout, done.stdout + done.stderr
    assert f"{count} tests repeated" in done.stdout
    assert done.returncode == (1 if count > 3 else 0)
