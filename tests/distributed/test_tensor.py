# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism on 2 and 4 ranks, alone and composed: the parameters of the plain loop, to 1e-8 in float64."""

from pathlib import Path

import pytest
from ranks import run_ranks


@pytest.mark.parametrize("ranks", [2, 4])
def test_parity(ranks):
    results = run_ranks(Path(__file__).parent / "workers" / "tensor_parity.py", ranks, timeout=170)
    assert all("all equal" in result.stdout for result in results)
