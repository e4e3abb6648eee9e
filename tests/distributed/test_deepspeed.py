# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed engines of every ZeRO stage on 2 ranks, where DeepSpeed is installed."""

from pathlib import Path

import pytest
from ranks import run_ranks

from accelerate.core.imports import is_available


@pytest.mark.slow
@pytest.mark.skipif(not is_available("deepspeed"), reason="deepspeed is not installed")
def test_zero_stages_train_like_the_plain_loop():
    worker = Path(__file__).parent / "workers" / "deepspeed_parity.py"
    results = run_ranks(worker, 2, env={"DS_ACCELERATOR": "cpu"}, timeout=170)
    assert all("all equal" in result.stdout for result in results)
