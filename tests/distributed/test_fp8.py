# SPDX-License-Identifier: Apache-2.0
"""fp8 through torchao, emulated on the CPU: one process, DDP, FSDP2 (gathering in float8 too), split, in stages."""

from pathlib import Path

import pytest
from ranks import run_ranks

from accelerate.core.imports import is_available


@pytest.mark.skipif(not is_available("torchao"), reason="torchao is not installed")
@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.thorough), 2])
def test_training_in_fp8_follows_fp32(ranks, tmp_path):
    results = run_ranks(Path(__file__).parent / "workers" / "fp8.py", ranks, tmp_path)
    assert all("all near" in result.stdout for result in results)


def test_layers_of_transformer_engine_train_as_those_they_replace(tmp_path):
    run_ranks(Path(__file__).parent / "workers" / "fp8_engine.py", 2, tmp_path)
