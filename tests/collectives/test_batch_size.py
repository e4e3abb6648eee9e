# SPDX-License-Identifier: Apache-2.0
"""The search for a batch size that fits, on one process."""

from __future__ import annotations

import pytest
import torch

from accelerate.collectives.batch_size import find_executable_batch_size


def test_sizes_fall_by_a_tenth_to_nothing():
    tried = []

    @find_executable_batch_size(starting_batch_size=20)
    def train(batch_size):
        tried.append(batch_size)
        raise torch.OutOfMemoryError("CUDA out of memory.")

    with pytest.raises(RuntimeError, match="No executable batch size found, reached zero"):
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
    assert "Batch size was passed into `train` as the first argument when called." in str(
        told.value
    )
    assert "`train(first=hello, second=world)`" in str(told.value)

    @find_executable_batch_size(starting_batch_size=16)
    def flexible(batch_size, *rest):
        return batch_size, rest

    assert flexible(1, 2, 3) == (16, (1, 2, 3))
