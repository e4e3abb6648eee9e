# SPDX-License-Identifier: Apache-2.0
"""transformers.Trainer runs unmodified, with the losses it has on the well-known implementation."""

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
# Recorded with the same script: float32 on CPU, whose sums other processors round differently.
EXPECTED = json.loads((HERE.parent / "data" / "trainer_losses.json").read_text())["runs"]
PRELOADED = ("transformers.models.gpt2.modeling_gpt2", "transformers.trainer")


def train(folder):
    torch.use_deterministic_algorithms(True)
    sys.path.insert(0, str(HERE / "workers"))
    return importlib.import_module("trainer").results(folder)


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_trainer(world, ranks, tmp_path):
    pytest.importorskip("transformers")
    found = ranks(world).run(train, tmp_path, env={"ACCELERATE_USE_CPU": "true"}, timeout=160)[0]
    expected = EXPECTED[str(world)]
    assert found["losses"] == pytest.approx(expected["losses"], abs=2e-5)
    assert found["bf16_losses"] == pytest.approx(expected["bf16_losses"], abs=2e-3)
    assert found["eval_loss"] == pytest.approx(expected["eval_loss"], abs=2e-5)
    assert found["predicted_rows"] == expected["predicted_rows"]
    assert found["resumed_distance"] == 0.0
