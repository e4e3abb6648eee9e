# SPDX-License-Identifier: Apache-2.0
"""Collectives among 2 and 4 ranks, their debug mode, and the batch size that all ranks agree on."""

from pathlib import Path

import pytest
from ranks import run_ranks

WORKERS = Path(__file__).parent / "workers"


@pytest.mark.parametrize("world", [2, 4])
def test_every_operation(world):
    results = run_ranks(WORKERS / "collectives.py", world, timeout=120)
    assert all(result.stdout.count(" ok") == 9 for result in results)
    only_main, every = [1] + [0] * (world - 1), [1] * world
    for words, expected in (("in turn", only_main), ("one", only_main), ("all", every)):
        assert [result.stderr.count(f"] {words}") for result in results] == expected


@pytest.mark.parametrize(
    ("world", "seed"),
    [(2, 1), pytest.param(3, 2, marks=pytest.mark.thorough), pytest.param(2, 3, marks=pytest.mark.thorough)],
)
def test_ranks_that_call_different_things(world, seed):
    """Never an answer made of other tensors' bytes, never an abort: one error that names what each rank called."""
    results = run_ranks(WORKERS / "mismatches.py", world, seed, 60, timeout=120)
    assert all(" of 60 refused" in result.stdout for result in results)


def test_debug_mode_names_ranks_and_sides():
    env = {"ACCELERATE_DEBUG_MODE": "1", "ACCELERATE_DEBUG_TIMEOUT": "2"}
    results = run_ranks(WORKERS / "collectives_debug.py", 3, env=env, timeout=120)
    assert all("all ok" in result.stdout for result in results)


def test_all_operations_agree_in_debug_mode():
    """The comparison itself must not refuse what is right."""
    env = {"ACCELERATE_DEBUG_MODE": "1"}
    run_ranks(
        WORKERS / "collectives.py", 2, "test_reduce", "test_uneven_rows", "test_padding", "test_subgroup", env=env
    )


def test_batch_size_is_agreed_on():
    results = run_ranks(WORKERS / "batch_size.py", 2, timeout=120)
    assert all("all ok" in result.stdout for result in results)
