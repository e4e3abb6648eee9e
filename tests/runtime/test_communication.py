# SPDX-License-Identifier: Apache-2.0
"""What the ranks report where another one fails, stops before them, or waits elsewhere."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from rank_pool import on_ranks
from ranks import run_ranks
from torch import nn

from accelerate import Accelerator
from accelerate.collectives import gather_object
from accelerate.core.errors import CheckpointError, DistributedOperationException
from accelerate.core.system import is_stopped
from accelerate.runtime.communication import explanation

WORKERS = Path(__file__).parents[1] / "distributed" / "workers"
UNEVEN = ("Uneven batches?", "join_uneven_inputs", "exact=True")
ENDED = "its loader ended epoch 0 after 3 batches"
LEFT = "it left the loop over its loader in epoch 0 after 3 batches"
CODES = {"uneven": 0, "break": 0, "killed": -9}
thorough = pytest.mark.thorough


class Moody:
    """Registered state, which can fail."""

    fails = False

    def state_dict(self):
        if self.fails:
            raise ValueError("bad state")
        return {}

    def load_state_dict(self, state):
        pass


def all_raise(kinds, words, function):
    """The failing rank may raise its own ValueError; the others raise one of `kinds`. All name rank and error."""
    with pytest.raises((*kinds, ValueError)) as caught:
        function()
    raised = gather_object([f"{caught.type.__name__}: {caught.value}"])
    assert all(words in text for text in raised), raised
    assert sum("ValueError: " in text[:20] for text in raised) <= 1, raised


@pytest.mark.skipif(sys.platform != "linux", reason="the state of a process is known on Linux")
@on_ranks(2)
def test_a_rank_that_is_stopped_is_named():
    accelerator = Accelerator(cpu=True)
    (_, stopped) = gather_object([os.getpid()])
    if accelerator.process_index == 1:
        os.kill(stopped, signal.SIGSTOP)
        return
    try:
        while not is_stopped(stopped):
            time.sleep(0.01)
        text = explanation(
            "`gather`", RuntimeError("Timed out waiting 10000ms for recv operation to complete")
        )
    finally:
        os.kill(stopped, signal.SIGCONT)
    assert f"- rank 1 is stopped (process {stopped}): SIGSTOP, or a debugger" in text
    assert "Every rank must call" not in text


@on_ranks(2)
def test_an_error_on_one_rank_is_an_error_on_all(tmp_path):
    """In a checkpoint, a hook, an ordered block; then the run goes on."""
    accelerator = Accelerator(cpu=True)
    here = accelerator.process_index

    def fail(*args):
        raise ValueError(f"bad hook of rank {here}")

    def save(name="bad"):
        accelerator.save_state(tmp_path / name)

    def load():
        accelerator.load_state(tmp_path / "good")

    def ordered():
        with accelerator.main_process_first():
            assert accelerator.is_main_process, (
                "the block must not run after it failed on the first process"
            )
            raise ValueError("bad block")

    model = nn.Linear(2, 2)
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    moody = Moody()
    accelerator.register_for_checkpointing(moody)
    save("good")
    for rank in (0, 1):
        moody.fails = rank == here
        all_raise([CheckpointError], f"rank {rank}: ValueError: bad state", save)
        moody.fails = False
        hook = fail if rank == here else print
        words = f"rank {rank}: ValueError: bad hook of rank {rank}"
        handle = accelerator.register_save_state_pre_hook(hook)
        all_raise([CheckpointError], words, save)
        handle.remove()
        handle = accelerator.register_load_state_pre_hook(hook)
        all_raise([CheckpointError], f"bad hook of rank {rank}", load)
        handle.remove()
    all_raise([DistributedOperationException], "bad block", ordered)
    load()
    save()


@pytest.mark.parametrize(
    ("how", "layout", "world", "needles"),
    [
        ("uneven", "ddp", 2, ("has finished", ENDED, "batch 4 of epoch 0", *UNEVEN)),
        ("state", "fsdp", 2, ("rank 1: ValueError: bad state",)),
        ("killed", "ddp", 2, ("did not reach `save_state` and has ended", "its process is gone")),
        pytest.param("raise", "ddp", 2, ("failed: ValueError: bad sample", "lost_rank.py:"), marks=thorough),
        pytest.param("uneven", "fsdp", 2, (ENDED, *UNEVEN), marks=thorough),
        pytest.param("uneven", "ddp", 4, (ENDED, *UNEVEN), marks=thorough),
        pytest.param("break", "ddp", 2, (LEFT, *UNEVEN), marks=thorough),
        pytest.param("break", "fsdp", 2, (LEFT, *UNEVEN), marks=thorough),
        pytest.param("gather", "ddp", 2, ("is in `gather` (at", ENDED, *UNEVEN), marks=thorough),
    ],
)  # fmt: skip
def test_survivors_name_the_rank_that_stopped(how, layout, world, needles, tmp_path):
    results = run_ranks(
        WORKERS / "lost_rank.py", world, how, layout, tmp_path / "state", timeout=120, check=False
    )
    assert [result.returncode for result in results] == [1] * (world - 1) + [CODES.get(how, 1)], (
        results
    )
    for result in results[:-1]:
        assert f"rank {world - 1}" in result.stderr, result.stderr
        for needle in needles:
            assert needle in result.stderr, f"{needle!r} is not in:\n{result.stderr}"
        assert result.stderr.count("connection to another rank failed") <= 1, result.stderr
    if how == "gather":
        assert "rank 0 is in `accelerator.backward` (at" in results[-1].stderr, results[-1].stderr
