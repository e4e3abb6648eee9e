# SPDX-License-Identifier: Apache-2.0
"""A run that stands still explains itself: who waits where, for whom, and whether that rank computes."""

import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rank_pool import on_ranks
from ranks import run_ranks

from accelerate import Accelerator
from accelerate.runtime import hang_watch

EXAMPLES = Path(__file__).parents[2] / "examples" / "debugging"


def compute(store, key):
    while not store.check([key]):
        for _ in range(10):
            torch.ones(256, 256) @ torch.ones(256, 256)


def wait(store, key):
    """A wait in the operating system, in which nothing computes."""
    store.wait([key])


@on_ranks(3, env={"ACCELERATE_HANG_REPORT": "2"})
def test_a_slow_rank_is_told_from_one_that_waits(tmp_path):
    """Rank 2 does not come to a collective, or an agreement, until the report of rank 0 is out."""
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(4, 1))
    store = dist.distributed_c10d._get_default_store().clone()
    accelerator.wait_for_everyone()
    scenes = [
        (compute, "The run waits: rank 2 is still computing in `compute`", lambda: accelerator.gather(torch.ones(2))),
        (
            wait,
            "The run stands still: rank 2 is in `wait`",
            lambda: accelerator.backward(model(torch.ones(1, 4)).sum()),
        ),
        (wait, "The run stands still: rank 2 is in `wait`", lambda: accelerator.save_state(tmp_path / "c")),
    ]
    for number, (late, words, collective) in enumerate(scenes):
        key, reports = f"test/{number}", []
        if accelerator.process_index == 2:
            late(store, key)
        else:
            hang_watch.on_report[:] = [reports.append, lambda text, key=key: store.set(key, "reported")]
        collective()
        accelerator.wait_for_everyone()
        if accelerator.process_index == 0:
            (text,) = reports
            assert text.startswith(f"{words} ({__file__}:"), text
            place = ("`accelerator.gather`", "all_reduce of `accelerator.backward`", "`accelerator.save_state`")[
                number
            ]
            assert "ranks 0, 1 have waited " in text and f" in {place} ({__file__}:" in text, text
            assert "Every rank must call" not in text
        elif accelerator.process_index == 1:
            assert reports == []
    accelerator.end_training()
    assert hang_watch._Watch.running is None
    assert "accelerate-hang-watch" not in [thread.name for thread in threading.enumerate()]


def test_a_mismatch_is_explained_and_ends_by_the_limit():
    """examples/debugging/hang.py: a collective under an `if`."""
    limits = {"ACCELERATE_HANG_REPORT": "2", "ACCELERATE_COLLECTIVE_TIMEOUT": "6"}
    first, second = run_ranks(EXAMPLES / "hang.py", 2, env=limits, check=False, timeout=60)
    assert (first.returncode, second.returncode) == (1, 1), (first, second)
    for words in (
        "rank 0 waits in `accelerator.reduce` (",
        "rank 1 waits in all_reduce of `accelerator.backward` (",
        "differs: reduce of float32 [] on rank 0, all_reduce of float32 [9] on rank 1",
        "Every rank must call the same collectives in the same order",
        "CommunicationError: rank 0: the connection to another rank failed in `reduce`",
    ):
        assert words in first.stderr, first.stderr
    assert "stands still" not in second.stderr, second.stderr


@pytest.mark.thorough
def test_a_slow_rank_does_not_end_the_run():
    """examples/debugging/straggler.py."""
    first, _ = run_ranks(EXAMPLES / "straggler.py", 2, env={"ACCELERATE_HANG_REPORT": "2"}, timeout=60)
    assert "The run waits: rank 1 is still computing in `augment` (" in first.stderr, first.stderr
    assert "rank 0 has waited " in first.stderr and "trained 8 steps" in first.stdout
