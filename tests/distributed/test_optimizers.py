# SPDX-License-Identifier: Apache-2.0
"""Optimizers and parameters of all kinds in every layout: the plain loop to 1e-8, or one clear refusal."""

from pathlib import Path

import pytest
from ranks import run_ranks

WORKER = Path(__file__).parent / "workers" / "optimizers.py"


@pytest.mark.parametrize(
    ("layout", "ranks"),
    [
        ("fsdp1", 2),
        ("fsdp2", 2),
        pytest.param("fsdp1 flat", 2, marks=pytest.mark.thorough),
        pytest.param("ddp", 2, marks=pytest.mark.thorough),
        pytest.param("tp", 2, marks=pytest.mark.thorough),
        pytest.param("fsdp2 x tp", 4, marks=pytest.mark.thorough),
    ],
)
def test_each_pair_is_equal_or_refused(layout, ranks, tmp_path):
    results = run_ranks(WORKER, ranks, layout, tmp_path, timeout=180)
    assert all("all equal" in result.stdout for result in results)
