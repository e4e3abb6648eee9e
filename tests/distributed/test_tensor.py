# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism on 2 and 4 ranks, alone and composed: the parameters of the plain loop, to 1e-8 in float64."""

from pathlib import Path

import pytest
from ranks import run_ranks

WORKERS = Path(__file__).parent / "workers"


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.thorough), 4])
def test_parity(ranks, tmp_path):
    results = run_ranks(WORKERS / "tensor_parity.py", ranks, tmp_path, timeout=240)
    assert all("all equal" in result.stdout for result in results)


def test_messages_of_data_and_tensor_parallelism_are_those_of_the_hand_written_step():
    run_ranks(WORKERS / "messages.py", 2, timeout=120)


def test_losses_of_split_logits():
    run_ranks(WORKERS / "tensor_loss.py", 2, timeout=120)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.thorough)])
def test_models_and_trainer_of_transformers(ranks, tmp_path):
    pytest.importorskip("transformers")
    run_ranks(WORKERS / "tensor_transformers.py", ranks, tmp_path, timeout=240)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.thorough)])
def test_random_numbers(ranks, tmp_path):
    results = run_ranks(WORKERS / "tensor_random.py", ranks, tmp_path, timeout=240)
    assert all("all right" in result.stdout for result in results)
