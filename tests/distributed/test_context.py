# SPDX-License-Identifier: Apache-2.0
"""One sequence over 2 and 4 ranks: torch's own attention to 1e-10, and the parameters of the plain loop to 1e-8."""

from pathlib import Path

import pytest
from ranks import run_ranks

WORKERS = Path(__file__).parent / "workers"


@pytest.mark.parametrize("ranks", [2, 4])
def test_attention(ranks):
    results = run_ranks(WORKERS / "context_attention.py", ranks, timeout=170)
    assert all("all equal" in result.stdout for result in results)
