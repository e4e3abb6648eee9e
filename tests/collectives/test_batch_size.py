# SPDX-License-Identifier: Apache-2.0
"""The search for a batch size that fits, on one process and on several."""

from __future__ import annotations

import time

import pytest
import torch
from rank_pool import on_ranks
from torch.nn.parallel import DistributedDataParallel

from accelerate.collectives import batch_size, gather_object, reduce
from accelerate.collectives.batch_size import find_executable_batch_size
from accelerate.state import PartialState


def test_sizes_fall_by_a_tenth_to_nothing():
    tried = []

    @find_executable_batch_size(starting_batch_size=20)
    def train(batch_size):
        tried.append(batch_size)
        raise torch.OutOfMemoryError("CUDA out of memory.")

    with pytest.raises(RuntimeError, match="reached zero"):
        train()
    assert tried == [20, 18, 16, 14, 12, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1]


def test_without_arguments_it_starts_at_128_and_keeps_what_it_found():
    tried = []

    @find_executable_batch_size
    def train(batch_size, model, *, steps=1):
        """Train."""
        tried.append(batch_size)
        if batch_size > 100:
            raise RuntimeError(
                "DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"
            )
        return batch_size, model, steps

    assert train.__name__ == "train" and train.__doc__ == "Train."
    assert train("m", steps=2) == (92, "m", 2)
    assert train("m") == (92, "m", 1)
    assert tried == [128, 115, 103, 92, 92]


def test_a_rule_of_ones_own():
    sizes = iter([10, 3, -1])

    @find_executable_batch_size(starting_batch_size=16, reduce_batch_size_fn=lambda: next(sizes))
    def train(batch_size):
        raise MemoryError

    with pytest.raises(RuntimeError, match="reached zero"):
        train()
    assert next(sizes, None) is None


def test_a_rule_that_returns_the_same_size_again():
    @find_executable_batch_size(starting_batch_size=16, reduce_batch_size_fn=lambda: 8)
    def train(batch_size):
        raise MemoryError

    with pytest.raises(RuntimeError, match=r"8.*reduce_batch_size_fn"):
        train()


def test_the_failed_attempt_is_freed_before_the_next():
    import weakref

    held = []

    @find_executable_batch_size(starting_batch_size=4)
    def train(batch_size):
        assert all(reference() is None for reference in held)
        batch = torch.ones(batch_size)
        held.append(weakref.ref(batch))
        if batch_size > 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    train()
    assert len(held) == 3


def test_the_batch_size_is_not_passed_by_the_caller():
    @find_executable_batch_size(starting_batch_size=16)
    def train(batch_size, first, second):
        return first, second

    with pytest.raises(TypeError) as told:
        train(128, "hello", "world")
    assert "`train`" in str(told.value) and "first argument" in str(told.value)
    assert "`train(first=hello, second=world)`" in str(told.value)

    @find_executable_batch_size(starting_batch_size=16)
    def flexible(batch_size, *rest):
        return batch_size, rest

    assert flexible(1, 2, 3) == (16, (1, 2, 3))


# --- two ranks: whichever is out of memory, all try the same sizes


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
        assert not is_last()
        assert f"rank {WORLD - 1} " in str(error) and "batch size 8" in str(error)
        assert "KeyError: 'no such column'" in str(error)
    else:
        raise AssertionError("the error was lost")
    assert reduce(torch.ones(1), "sum").item() == WORLD
