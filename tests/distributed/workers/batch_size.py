# SPDX-License-Identifier: Apache-2.0
"""A rank of the test of find_executable_batch_size: whichever rank is out of memory, all try the same sizes."""

from __future__ import annotations

import time

import torch
from torch.nn.parallel import DistributedDataParallel

from accelerate.collectives import batch_size, gather_object, reduce
from accelerate.collectives.batch_size import find_executable_batch_size
from accelerate.state import PartialState

state = PartialState(cpu=True)
RANK, WORLD = state.process_index, state.num_processes
LAST = RANK == WORLD - 1
batch_size.GRACE = 0.5


def exhaust():
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")


def tried_alike(tried, expected):
    assert tried == expected, tried
    assert gather_object([tried]) == [expected] * WORLD


# Each rank has another limit, and nobody communicates.
tried = []


@find_executable_batch_size(starting_batch_size=100)
def lonely(size, offset, *, factor):
    tried.append(size)
    if size > (60 if LAST else 75):
        exhaust()
    return size * factor + offset


assert lonely(1, factor=2) == 57 * 2 + 1
tried_alike(tried, [100, 90, 81, 72, 64, 57])
assert lonely(0, factor=1) == 57  # what was found is kept

# One rank leaves the others in DDP's all-reduce, and the models of failed attempts are still held.
tried, models = [], []


@find_executable_batch_size(starting_batch_size=100, reduce_batch_size_fn=lambda: tried[-1] // 2)
def together(size):
    tried.append(size)
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    models.append(model)
    for step in range(3):
        if LAST and size > 30 and step == 1:
            exhaust()
        model(torch.full((size, 4), float(RANK))).mean().backward()
    return model.module.weight.grad


begin = time.monotonic()
gradient = together()
assert time.monotonic() - begin < 30, "the waiting rank was not woken"
tried_alike(tried, [100, 50, 25])
# Three steps of the mean over ranks of an input that is the rank's number.
assert torch.allclose(gradient, torch.full((1, 4), 3 * sum(range(WORLD)) / WORLD))
assert reduce(torch.ones(1), "sum").item() == WORLD


# An error of another kind on one rank ends all.
@find_executable_batch_size(starting_batch_size=8)
def failing(size):
    if LAST:
        raise KeyError("no such column")


try:
    failing()
except KeyError:
    assert LAST
except RuntimeError as error:
    assert not LAST and f"rank {WORLD - 1} has failed with batch size 8: KeyError: 'no such column'" in str(error)
else:
    raise AssertionError("the error was lost")
assert reduce(torch.ones(1), "sum").item() == WORLD
print("all ok", flush=True)
