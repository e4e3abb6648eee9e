# SPDX-License-Identifier: Apache-2.0
"""One sequence over 2 and 4 ranks: torch's own attention to 1e-10, and the parameters of the plain loop to 1e-8."""

from pathlib import Path

import pytest
from ranks import run_ranks

WORKERS = Path(__file__).parent / "workers"


def run(name, ranks, *args):
    results = run_ranks(WORKERS / name, ranks, *args, timeout=175)
    assert all("all equal" in result.stdout for result in results)


def test_attention_and_training_on_two_ranks(tmp_path):
    run("context_parity.py", 2, tmp_path)


def test_attention_and_training_on_four_ranks_and_its_checkpoint_alone(tmp_path):
    run("context_parity.py", 4, tmp_path)
    run("context_parity.py", 1, tmp_path)


@pytest.mark.thorough
def test_trainer_unchanged(tmp_path):
    pytest.importorskip("transformers")
    run("context_trainer.py", 1, tmp_path)
    run("context_trainer.py", 2, tmp_path)


def test_models_of_transformers_and_refusals():
    pytest.importorskip("transformers")
    run("context_models.py", 2)
