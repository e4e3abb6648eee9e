# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed engines of every ZeRO stage on 2 ranks, alone and through the Accelerator, where it is installed."""

from pathlib import Path

import pytest
from ranks import run_ranks

from accelerate.core.imports import is_available

WORKERS = Path(__file__).parent / "workers"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not is_available("deepspeed"), reason="deepspeed is not installed"),
]


@pytest.mark.parametrize("worker", ["deepspeed_parity.py", "deepspeed_items.py"])
def test_zero_stages_train_like_the_plain_loop(worker):
    results = run_ranks(WORKERS / worker, 2, env={"DS_ACCELERATOR": "cpu"}, timeout=170)
    assert all("all equal" in result.stdout for result in results)


def test_several_models_and_transformers(tmp_path):
    results = run_ranks(WORKERS / "deepspeed_models.py", 2, tmp_path, env={"DS_ACCELERATOR": "cpu"}, timeout=170)
    assert all("all equal" in result.stdout for result in results)


def test_bytes_are_those_that_explain_tells():
    results = run_ranks(WORKERS / "deepspeed_messages.py", 2, env={"DS_ACCELERATOR": "cpu"}, timeout=170)
    assert all("all equal" in result.stdout for result in results)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_goes_on_through_all_stages(ranks, tmp_path):
    results = run_ranks(
        WORKERS / "deepspeed_accelerator.py", ranks, tmp_path, env={"DS_ACCELERATOR": "cpu"}, timeout=170
    )
    assert all("all equal" in result.stdout for result in results)
