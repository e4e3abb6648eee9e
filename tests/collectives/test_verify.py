# SPDX-License-Identifier: Apache-2.0
"""Ranks that call different things: one error on all that names each call, then the run goes on."""

from __future__ import annotations

import time

import pytest
import torch
from rank_pool import on_ranks

from accelerate import Accelerator
from accelerate.collectives import (
    broadcast,
    broadcast_object_list,
    gather,
    gather_object,
    pad_across_processes,
    reduce,
)
from accelerate.core.errors import DistributedOperationException

LARGE = 1 << 20


# Pairs of what two ranks call.
PAIRS = {
    "dtypes": (
        lambda run: gather(torch.ones(4)),
        lambda run: gather(torch.ones(4, dtype=torch.float64)),
    ),
    "shapes": (lambda run: gather(torch.ones(2, 2)), lambda run: gather(torch.ones(4))),
    "sizes": (lambda run: gather(torch.ones(4)), lambda run: gather(torch.ones(LARGE))),
    "structures": (
        lambda run: gather({"a": torch.ones(4), "b": torch.zeros(4)}),
        lambda run: gather([torch.ones(4), torch.ones(4)]),
    ),
    "keys": (
        lambda run: reduce({"a": torch.ones(4), "b": torch.zeros(4)}),
        lambda run: reduce({"a": torch.ones(4), "c": torch.zeros(4)}),
    ),
    "options": (lambda run: reduce(torch.ones(4), "sum"), lambda run: reduce(torch.ones(4), "max")),
    "sources": (
        lambda run: broadcast(torch.ones(4)),
        lambda run: broadcast(torch.ones(4), from_process=1),
    ),
    "operations": (lambda run: gather(torch.ones(4)), lambda run: reduce(torch.ones(4), "sum")),
    "tensors and objects": (
        lambda run: gather(torch.ones(4)),
        lambda run: gather_object(["x" * LARGE]),
    ),
    "objects": (lambda run: gather_object([1]), lambda run: broadcast_object_list([1])),
    "ranks": (
        lambda run: pad_across_processes(torch.ones(4)),
        lambda run: pad_across_processes(torch.ones(2, 2)),
    ),
    "barrier": (
        lambda run: run.wait_for_everyone(),
        lambda run: run.gather_for_metrics(torch.ones(4)),
    ),
    "trigger": (lambda run: run.check_trigger(), lambda run: run.wait_for_everyone()),
}


@on_ranks(2, thorough=[3])
def test_ranks_that_call_different_things(nproc):
    """Never an answer made of other tensors' bytes, never an abort."""
    run = Accelerator(cpu=True)
    for name, pair in PAIRS.items():
        for odd in range(nproc):
            begin = time.monotonic()
            with pytest.raises(DistributedOperationException) as caught:
                pair[run.process_index == odd](run)
            said = str(caught.value)
            # Far from the timeout of the process group.
            assert time.monotonic() - begin < 30, name
            assert (
                all(f"Process {rank}: " in said for rank in range(nproc))
                and "test_verify.py:" in said
            ), (
                name,
                said,
            )
            # Afterwards the ranks understand each other, and have been told the same.
            assert gather_object([said]) == [said] * nproc, name
