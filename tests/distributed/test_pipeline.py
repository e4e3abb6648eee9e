# SPDX-License-Identifier: Apache-2.0
"""Pipeline parallelism on 2 and 4 ranks: the plain loop's parameters, to 1e-8 in float64, and all else about it."""

import tempfile
from pathlib import Path

import pytest
from ranks import run_ranks

WORKERS = Path(__file__).parent / "workers"


@pytest.mark.parametrize("ranks", [2, 4])
def test_parity(ranks):
    results = run_ranks(WORKERS / "pipeline_parity.py", ranks, timeout=240)
    assert all("all equal" in result.stdout for result in results)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.thorough)])
def test_weights_that_other_stages_read(ranks):
    results = run_ranks(WORKERS / "pipeline_reads.py", ranks, timeout=240)
    assert all("all equal" in result.stdout for result in results)


def test_outputs_that_several_blocks_use():
    results = run_ranks(WORKERS / "pipeline_carried.py", 4, timeout=170)
    assert all("all equal" in result.stdout for result in results)


def test_precision_weights_losses_order_and_refusals():
    results = run_ranks(WORKERS / "pipeline_cases.py", 2, timeout=240)
    assert all("all well" in result.stdout for result in results)


def test_a_window_with_dropout_goes_on_bit_by_bit(tmp_path):
    results = run_ranks(WORKERS / "pipeline_resume.py", 4, tmp_path, timeout=240)
    assert all("all went on" in result.stdout for result in results)


def test_a_checkpoint_goes_on_in_other_layouts():
    """Two stages, one process, then two stages of two copies: each goes on from the state of the one before."""
    with tempfile.TemporaryDirectory() as folder:
        for ranks in (2, 1, 4):
            results = run_ranks(WORKERS / "pipeline_checkpoint.py", ranks, folder, timeout=200)
            assert all("saved" in result.stdout for result in results)
