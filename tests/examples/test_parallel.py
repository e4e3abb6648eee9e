# SPDX-License-Identifier: Apache-2.0
"""The parallel example: each of its layouts on 4 ranks, with the model of its own and one of transformers."""

from pathlib import Path

import pytest
from ranks import run_ranks

WORKER = Path(__file__).parents[1] / "distributed" / "workers" / "example_layouts.py"


@pytest.mark.timeout(420)
@pytest.mark.parametrize("model", ["own", pytest.param("transformers", marks=pytest.mark.thorough)])
def test_every_layout_trains_from_one_loop(model, tmp_path):
    if model == "transformers":
        pytest.importorskip("transformers")
    results = run_ranks(WORKER, 4, tmp_path, model, env={"ACCELERATE_USE_CPU": "true"}, timeout=400)
    assert all("all equal" in result.stdout for result in results)
