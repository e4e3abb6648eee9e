# SPDX-License-Identifier: Apache-2.0
"""Compiled layouts on 2 ranks: the numbers of the plain loop, and no compilation after the first window."""

from pathlib import Path

import pytest
from ranks import run_ranks


def test_ddp_and_fsdp2_compiled():
    results = run_ranks(Path(__file__).parent / "workers" / "compile_worker.py", 2, timeout=150)
    assert all("all equal" in result.stdout for result in results)


@pytest.mark.parametrize("how", ["regional", pytest.param("whole", marks=pytest.mark.thorough)])
def test_other_layouts_compiled(how):
    results = run_ranks(Path(__file__).parent / "workers" / "compile_layouts.py", 2, how, timeout=170)
    assert all("all equal" in result.stdout for result in results)
