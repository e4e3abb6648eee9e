# SPDX-License-Identifier: Apache-2.0
"""transformers.Trainer runs unmodified, with the losses it has on the well-known implementation."""

import json
from pathlib import Path

import pytest
from ranks import run_ranks

HERE = Path(__file__).parent
# Recorded with the same script: float32 on CPU, whose sums other processors round differently.
EXPECTED = json.loads((HERE.parent / "data" / "trainer_losses.json").read_text())["runs"]


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_trainer(world, tmp_path):
    pytest.importorskip("transformers")
    results = run_ranks(
        HERE / "workers" / "trainer.py", world, tmp_path, env={"ACCELERATE_USE_CPU": "true"}, timeout=170
    )
    found = json.loads(next(line for line in results[0].stdout.splitlines() if line.startswith('{"losses"')))
    expected = EXPECTED[str(world)]
    assert found["losses"] == pytest.approx(expected["losses"], abs=2e-5)
    assert found["bf16_losses"] == pytest.approx(expected["bf16_losses"], abs=2e-3)
    assert found["eval_loss"] == pytest.approx(expected["eval_loss"], abs=2e-5)
    assert found["predicted_rows"] == expected["predicted_rows"]
    assert found["resumed_distance"] == 0.0
