# SPDX-License-Identifier: Apache-2.0
"""FSDP1 through the Accelerator: the plain loop's parameters to 1e-8, saved and loaded by any other layout."""

from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from safetensors.torch import load_file

WORKER = Path(__file__).parent / "workers" / "fsdp1.py"


@pytest.mark.parametrize("ranks", [pytest.param(n, marks=pytest.mark.thorough) if n != 2 else n for n in (1, 2, 4)])
def test_a_run_goes_on_through_all_settings(ranks, tmp_path):
    results = run_ranks(WORKER, ranks, tmp_path, timeout=180)
    assert all("all equal" in result.stdout for result in results)
    weights = load_file(tmp_path / "weights" / "model.safetensors")
    assert {tuple(value.shape) for name, value in weights.items() if "blocks.0.up" in name} == {(24, 8), (24,)}
    assert all(value.dtype is torch.float64 for value in weights.values())
