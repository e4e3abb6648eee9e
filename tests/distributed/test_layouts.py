# SPDX-License-Identifier: Apache-2.0
"""Layouts of FSDP2 and tensor parallelism behind one loop, on 4 ranks, and a state that goes from one to another."""

from pathlib import Path

from ranks import run_ranks

WORKER = Path(__file__).parent / "workers" / "layouts.py"


def test_one_loop_in_every_layout(tmp_path):
    results = run_ranks(WORKER, 4, tmp_path, "train", timeout=400)
    assert all("all equal" in result.stdout for result in results)
    run_ranks(WORKER, 1, tmp_path, "load", timeout=60)
