# SPDX-License-Identifier: Apache-2.0
"""bf16 parameters with fp32 masters: data parallel, sharded, tensor, pipeline, context parallel, and compositions."""

from pathlib import Path

import pytest
from ranks import run_ranks

WORKER = Path(__file__).parent / "workers" / "master_weights.py"


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.thorough)])
def test_masters_in_every_layout_and_from_one_to_another(ranks, tmp_path):
    results = run_ranks(WORKER, ranks, tmp_path, "train", timeout=240)
    assert all("all equal" in result.stdout for result in results)
    run_ranks(WORKER, 1, tmp_path, "load", timeout=60)
