# SPDX-License-Identifier: Apache-2.0
"""The training core on 1, 2 and 4 processes."""

from pathlib import Path

import pytest
from ranks import run_ranks

WORKERS = Path(__file__).parent / "workers"


@pytest.mark.parametrize("world", [1, 2, 4])
def test_training_core(world, tmp_path):
    results = run_ranks(WORKERS / "training.py", world, world, tmp_path, timeout=150)
    assert all(result.stdout.count(" ok") >= 15 for result in results)
