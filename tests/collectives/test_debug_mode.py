# SPDX-License-Identifier: Apache-2.0
"""Debug mode on 3 ranks: each kind of disagreement is an error on every rank, soon; then the run goes on."""

from __future__ import annotations

import time
from pathlib import Path

import torch
import torch.distributed as dist
from rank_pool import on_ranks

from accelerate.collectives import (
    broadcast,
    gather,
    gather_object,
    pad_across_processes,
    reduce,
)
from accelerate.collectives.metrics import gather_counted
from accelerate.core.errors import DistributedOperationException
from accelerate.runtime import group
from accelerate.state import PartialState
from accelerate.utils import avg_losses_across_data_parallel_group
from accelerate.utils.operations import (
    TENSOR_INT_TO_DTYPE,
    chained_operation,
    gather_tensor_shape,
    verify_operation,
)

on_three = on_ranks(3, env={"ACCELERATE_DEBUG_MODE": "1", "ACCELERATE_DEBUG_TIMEOUT": "2"})
WORLD = 3


def my_rank():
    state = PartialState(cpu=True)
    assert state.debug and state.num_processes == WORLD
    return state.process_index


def begin_together():
    """The limits are for ranks that stay away: on a busy machine one may be forked seconds after another."""
    my_rank()
    dist.barrier()


def is_last():
    return my_rank() == WORLD - 1


def disagree(needles, function, *args, within=30.0, **kwargs):
    """All ranks raise the same words, `within` seconds, and understand each other afterwards."""
    begin = time.monotonic()
    try:
        function(*args, **kwargs)
    except DistributedOperationException as error:
        told = str(error)
    else:
        raise AssertionError(f"rank {my_rank()} went on")
    took = time.monotonic() - begin
    assert took < within, took
    for needle in needles:
        assert needle in told, f"{needle!r} is not in:\n{told}"
    assert gather_object([told]) == [told] * WORLD
    return told


@on_three
def test_operations_of_users():
    begin_together()

    @verify_operation
    def total(tensor, scale=1):
        summed = tensor.clone()
        dist.all_reduce(summed)
        return summed * scale

    @chained_operation
    def twice(size):
        return total(tensor=torch.ones(size)) + total(torch.ones(size), scale=2)

    assert twice(2).tolist() == [3 * WORLD] * 2
    disagree([".total`", "rank 2 differs"], total, torch.ones(2 + is_last()))
    disagree(["Error found while calling", ".twice`", "the earlier error"], twice, 2 + is_last())

    owned = torch.ones(4, 0, 2, dtype=torch.bfloat16) if is_last() else None
    sizes, kind = gather_tensor_shape(owned)
    assert (sizes.tolist(), sizes.dtype, TENSOR_INT_TO_DTYPE[kind]) == (
        [[4], [0], [2]],
        torch.int32,
        torch.bfloat16,
    )
    losses = [torch.tensor(float(my_rank()), requires_grad=True), torch.tensor([6.0])]
    assert avg_losses_across_data_parallel_group(losses).tolist() == [1.0, 6.0]


@on_three
def test_each_kind_of_disagreement_names_ranks_and_sides():
    begin_together()
    one, here = torch.ones(1, 5), Path(__file__).name
    disagree(
        ["rank 2 differs from ranks 0, 1", "disagree on the shape", "`accelerate.gather`", here]
        + ["Process 2: [1, 2, 5]", "Process 0: [1, 5]", "Process 1: [1, 5]"],
        gather,
        torch.ones(1, 2, 5) if is_last() else one,
    )
    disagree(
        ["shape of data['a'][1];", "Process 2: [4]", "Process 1: [3]"],
        gather,
        {"a": [one, torch.ones(4 if is_last() else 3)]},
    )
    disagree(
        ["disagree on the dtype", "Process 2: float64", "Process 0: float32"],
        reduce,
        one.double() if is_last() else one,
    )
    disagree(
        ["structure", "dict(['a']: tensor)", "list([0]: tensor)"],
        broadcast,
        [one] if is_last() else {"a": one},
    )
    disagree(
        ["`accelerate.gather` or `accelerate.reduce`", "Process 2: `accelerate.reduce`"],
        reduce if is_last() else gather,
        one,
    )
    disagree(
        ["options", "reduction='sum'", "reduction='mean'"],
        reduce,
        one,
        "sum" if is_last() else "mean",
    )
    disagree(
        ["options", "counts=(1, 1, 0)"], gather_counted, one, (1, 1, 0) if is_last() else (1, 1, 1)
    )
    disagree(
        ["shape", "[any, any]", "[any]"],
        pad_across_processes,
        torch.ones(my_rank()) if is_last() else torch.ones(my_rank(), 3),
    )
    assert pad_across_processes(torch.ones(my_rank(), 3)).shape == (2, 3)
    # Each pair differs: both sides are told.
    told = disagree(
        ["Process 0: [1]", "Process 1: [2]", "Process 2: [3]"], gather, torch.ones(my_rank() + 1)
    )
    assert "rank 0" in told and "ranks 1, 2 differ" in told


@on_three
def test_a_rank_that_comes_late_is_named_and_hears_of_it():
    begin_together()
    one = torch.ones(1, 5)
    lines = Path(__file__).read_text().splitlines()
    sleeps = next(
        number for number, line in enumerate(lines, 1) if line.strip().startswith("time.sleep(")
    )
    gather_object([my_rank()])
    if is_last():
        time.sleep(3.5)  # longer than ACCELERATE_DEBUG_TIMEOUT; the others ask where this rank is
    disagree(
        ["rank 2 did not call it within 2 seconds", "Process 0: at", "ACCELERATE_DEBUG_TIMEOUT"]
        + [
            f"{Path(__file__).name}:{sleeps}), with 0",
            "its last operation was `accelerate.gather_object`",
        ],
        gather,
        one,
        within=30.0,
    )
    for turn in range(20):
        assert gather(torch.tensor(turn)).tolist() == [turn] * WORLD


@on_three
def test_a_rank_that_has_ended_is_named():
    begin_together()
    one = torch.ones(1, 5)
    if is_last():
        group.leave()
    else:
        begin = time.monotonic()
        try:
            gather(one)
        except DistributedOperationException as error:
            assert "rank 2 " in str(error) and "has ended" in str(error), error
        else:
            raise AssertionError("went on without rank 2")
        assert time.monotonic() - begin < 30.0
