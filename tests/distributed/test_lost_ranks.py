# SPDX-License-Identifier: Apache-2.0
"""What the ranks say where another one fails, stops before them, or waits elsewhere."""

from pathlib import Path

import pytest
from ranks import run_ranks

WORKERS = Path(__file__).parent / "workers"
UNEVEN = ("Uneven batches?", "join_uneven_inputs", "exact=True")
ENDED = "its loader ended epoch 0 after 3 batches"
LEFT = "it left the loop over its loader in epoch 0 after 3 batches"
thorough = pytest.mark.thorough


def test_an_error_on_one_rank_is_heard_by_all(tmp_path):
    results = run_ranks(WORKERS / "rank_errors.py", 2, tmp_path, timeout=120)
    assert all("all ok" in result.stdout for result in results)


@pytest.mark.parametrize(
    ("how", "layout", "world", "needles"),
    [
        ("uneven", "ddp", 2, ("has finished", ENDED, "batch 4 of epoch 0", *UNEVEN)),
        ("state", "fsdp", 2, ("rank 1: ValueError: bad state",)),
        pytest.param("raise", "ddp", 2, ("failed: ValueError: bad sample", "lost_rank.py:"), marks=thorough),
        pytest.param("uneven", "fsdp", 2, (ENDED, *UNEVEN), marks=thorough),
        pytest.param("uneven", "ddp", 4, (ENDED, *UNEVEN), marks=thorough),
        pytest.param("break", "ddp", 2, (LEFT, *UNEVEN), marks=thorough),
        pytest.param("break", "fsdp", 2, (LEFT, *UNEVEN), marks=thorough),
        pytest.param("gather", "ddp", 2, ("is in `gather` (at", ENDED, *UNEVEN), marks=thorough),
    ],
)  # fmt: skip
def test_survivors_name_the_rank_that_stopped(how, layout, world, needles, tmp_path):
    results = run_ranks(WORKERS / "lost_rank.py", world, how, layout, tmp_path / "state", timeout=120, check=False)
    ended = how in ("uneven", "break")
    assert [result.returncode for result in results] == [1] * (world - 1) + [0 if ended else 1], results
    for result in results[:-1]:
        assert f"rank {world - 1}" in result.stderr, result.stderr
        for needle in needles:
            assert needle in result.stderr, f"{needle!r} is not in:\n{result.stderr}"
    if how == "gather":
        assert "rank 0 is in `accelerator.backward` (at" in results[-1].stderr, results[-1].stderr
