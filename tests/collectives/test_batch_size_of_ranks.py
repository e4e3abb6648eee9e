# SPDX-License-Identifier: Apache-2.0
"""find_executable_batch_size on 2 ranks: whichever rank is out of memory, all try the same sizes."""

from __future__ import annotations

import time

import torch
from rank_pool import on_ranks
from torch.nn.parallel import DistributedDataParallel

from accelerate.collectives import batch_size, gather_object, reduce
from accelerate.collectives.batch_size import find_executable_batch_size
from accelerate.state import PartialState

WORLD = 2


def my_rank():
    batch_size.GRACE = 0.5
    return PartialState(cpu=True).process_index


def is_last():
    return my_rank() == WORLD - 1


def exhaust():
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")


def tried_alike(tried, expected):
    assert tried == expected, tried
    assert gather_object([tried]) == [expected] * WORLD


@on_ranks(2)
def test_each_rank_has_another_limit():
    tried = []

    @find_executable_batch_size(starting_batch_size=100)
    def lonely(size, offset, *, factor):
        tried.append(size)
        if size > (60 if is_last() else 75):
            exhaust()
        return size * factor + offset

    assert lonely(1, factor=2) == 57 * 2 + 1
    tried_alike(tried, [100, 90, 81, 72, 64, 57])
    assert lonely(0, factor=1) == 57  # what was found is kept


@on_ranks(2)
def test_a_rank_leaves_the_others_in_an_all_reduce():
    """The models of failed attempts are still in use."""
    my_rank()
    tried, models = [], []

    @find_executable_batch_size(
        starting_batch_size=100, reduce_batch_size_fn=lambda: tried[-1] // 2
    )
    def together(size):
        tried.append(size)
        torch.manual_seed(0)
        model = DistributedDataParallel(torch.nn.Linear(4, 1))
        models.append(model)
        for step in range(3):
            if is_last() and size > 30 and step == 1:
                exhaust()
            model(torch.full((size, 4), float(my_rank()))).mean().backward()
        return model.module.weight.grad

    begin = time.monotonic()
    gradient = together()
    assert time.monotonic() - begin < 30, "the waiting rank was not woken"
    tried_alike(tried, [100, 50, 25])
    # Three steps of the mean over ranks of an input that is the rank's number.
    assert torch.allclose(gradient, torch.full((1, 4), 3 * sum(range(WORLD)) / WORLD))
    assert reduce(torch.ones(1), "sum").item() == WORLD


@on_ranks(2)
def test_an_error_of_another_kind_ends_all():
    begin_together = reduce(torch.ones(1), "sum")
    assert begin_together.item() == WORLD

    @find_executable_batch_size(starting_batch_size=8)
    def failing(size):
        if is_last():
            raise KeyError("no such column")

    try:
        failing()
    except KeyError:
        assert is_last()
    except RuntimeError as error:
        assert (
            not is_last()
            and f"rank {WORLD - 1} has failed with batch size 8: KeyError: 'no such column'"
            in str(error)
        )
    else:
        raise AssertionError("the error was lost")
    assert reduce(torch.ones(1), "sum").item() == WORLD
