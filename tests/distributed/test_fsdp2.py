# SPDX-License-Identifier: Apache-2.0
"""FSDP2 on 1, 2 and 4 ranks: the parameters of the plain single-process loop, to 1e-8 in float64."""

from pathlib import Path

import pytest
from ranks import run_ranks

WORKERS = Path(__file__).parent / "workers"


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.thorough), 2, 4])
def test_parity_loading_and_resume(ranks, tmp_path):
    results = run_ranks(WORKERS / "fsdp2_parity.py", ranks, tmp_path, timeout=150)
    assert all("all equal" in result.stdout for result in results)


def test_adapters_an_overflow_on_one_rank_and_a_plugin_of_two_runs():
    results = run_ranks(WORKERS / "fsdp2_cases.py", 2, timeout=120)
    assert all("all equal" in result.stdout for result in results)


def test_messages_of_a_step_are_those_of_the_hand_written_one():
    results = run_ranks(WORKERS / "step_messages.py", 2, timeout=120)
    assert all("all equal" in result.stdout for result in results)


@pytest.mark.parametrize("kind", ["SHARDED_STATE_DICT", pytest.param("FULL_STATE_DICT", marks=pytest.mark.thorough)])
def test_a_run_saved_by_two_sharded_ranks_goes_on_in_any_layout(kind, tmp_path):
    worker = WORKERS / "fsdp2_accelerator.py"
    run_ranks(worker, 2, tmp_path, kind, "first")
    run_ranks(worker, 1, tmp_path, "plain", "resume")
    run_ranks(worker, 1, tmp_path, kind, "resume")


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak is read from /proc")
def test_loading_takes_one_copy_of_the_model_on_one_rank():
    # Blocks of memory that are freed go back at once, so that the peak is what is needed.
    run_ranks(WORKERS / "load_memory.py", 2, env={"MALLOC_MMAP_THRESHOLD_": "1000000"}, timeout=120)
