# SPDX-License-Identifier: Apache-2.0
"""bf16 parameters with fp32 masters on 2 ranks: data parallel, sharded, tensor, pipeline and context parallel."""

from pathlib import Path

from ranks import run_ranks

WORKER = Path(__file__).parent / "workers" / "master_weights.py"


def test_masters_in_every_layout_and_from_one_to_another(tmp_path):
    results = run_ranks(WORKER, 2, tmp_path, "train", timeout=240)
    assert all("all equal" in result.stdout for result in results)
    run_ranks(WORKER, 1, tmp_path, "load", timeout=60)
