# SPDX-License-Identifier: Apache-2.0
"""The data path on several processes whose random numbers differ."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import run_ranks

WORKER = Path(__file__).parent / "workers" / "data_loader.py"


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_agree_on_what_each_of_them_reads(world):
    for result in run_ranks(WORKER, world, timeout=150):
        assert "all checks passed" in result.stdout
