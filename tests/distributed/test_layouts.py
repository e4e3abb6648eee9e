# SPDX-License-Identifier: Apache-2.0
"""Layouts behind one loop, on 4 ranks, and a run that goes from one to another."""

import json
from pathlib import Path

import pytest
from ranks import run_ranks

WORKERS = Path(__file__).parent / "workers"


@pytest.mark.timeout(420)
def test_one_run_through_seven_layouts(tmp_path):
    for ranks in (4, 1):
        results = run_ranks(WORKERS / "chain.py", ranks, tmp_path, timeout=200)
        assert all("all equal" in result.stdout for result in results)


@pytest.mark.parametrize(
    "layout", [pytest.param("--tp 4", marks=pytest.mark.thorough), "--tp 2 --copies 4", "--tp 2 --pp 2"]
)
def test_the_first_of_many_ranks_holds_its_share(layout):
    """On a fake group, whose other ranks do not exist."""
    script = Path(__file__).parents[2] / "benchmarks" / "scale.py"
    arguments = ["--ranks", 64, "--width", 64, "--layers", 2, *layout.split()]
    (result,) = run_ranks(script, 1, *arguments, timeout=60)
    found = json.loads(result.stdout)
    # Norms are whole on tensor-parallel ranks; a tensor whose rows do not divide by its shards ends in a smaller one.
    assert 0 < found["held"] <= found["its share"] + 6 * found["largest row"], found
    assert found["parameters"] == 2 * (4 * 64**2 + 3 * 64 * 256 + 2 * 64) + 64 + 2 * 1024 * 64
