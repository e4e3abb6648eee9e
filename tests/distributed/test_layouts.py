# SPDX-License-Identifier: Apache-2.0
"""The share of one rank of many, on a fake process group."""

import json
from pathlib import Path

import pytest
from ranks import run_ranks


@pytest.mark.parametrize(
    "layout",
    [pytest.param("--tp 4", marks=pytest.mark.thorough), "--tp 2 --copies 4", "--tp 2 --pp 2"],
)
def test_the_first_of_many_ranks_holds_its_share(layout):
    """On a fake group, whose other ranks do not exist."""
    script = Path(__file__).parents[2] / "benchmarks" / "scale.py"
    arguments = ["--ranks", 64, "--width", 64, "--layers", 2, *layout.split()]
    (result,) = run_ranks(script, 1, *arguments, timeout=60)
    found = json.loads(result.stdout)
    # Norms are whole on tensor-parallel ranks; a tensor whose rows do not divide by its shards ends in a smaller one.
    assert 0 < found["local parameters"] <= found["even share"] + 6 * found["largest row"], found
    assert found["parameters"] == 2 * (4 * 64**2 + 3 * 64 * 256 + 2 * 64) + 64 + 2 * 1024 * 64
