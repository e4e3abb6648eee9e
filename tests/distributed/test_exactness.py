# SPDX-License-Identifier: Apache-2.0
"""exact=True against the plain single-process loop, after every step, for sizes that do not divide."""

from pathlib import Path

import pytest
from ranks import run_ranks

WORKERS = Path(__file__).parent / "workers"


@pytest.mark.parametrize("world", [1, 2, pytest.param(3, marks=pytest.mark.thorough), 4])
def test_every_step_is_that_of_one_process(world):
    run_ranks(WORKERS / "exactness.py", world, world, timeout=150)
