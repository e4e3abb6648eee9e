# SPDX-License-Identifier: Apache-2.0
"""transformers.Trainer with sequences split over 2 ranks."""

from pathlib import Path

import pytest
from ranks import run_ranks

WORKERS = Path(__file__).parent / "workers"


@pytest.mark.thorough
def test_trainer_unchanged(tmp_path):
    pytest.importorskip("transformers")
    for nproc in (1, 2):
        results = run_ranks(WORKERS / "context_trainer.py", nproc, tmp_path, timeout=175)
        assert all("all equal" in result.stdout for result in results)
