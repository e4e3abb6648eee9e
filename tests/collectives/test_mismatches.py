# SPDX-License-Identifier: Apache-2.0
"""Ranks that call different things, drawn at random: one error on all that names each call, then the run goes on."""

from __future__ import annotations

import random
import time

import pytest
import torch
from rank_pool import on_ranks

from accelerate import Accelerator
from accelerate.collectives import (
    broadcast,
    broadcast_object_list,
    copy_tensor_to_devices,
    gather,
    gather_object,
    pad_across_processes,
    reduce,
)
from accelerate.collectives.metrics import gather_counted
from accelerate.core.errors import DistributedOperationException

LARGE, PAIRINGS = 1 << 20, 60


@pytest.fixture(autouse=True)
def alone():
    """The test process has no part in it."""


# name -> the data of a call: another row is another dtype, shape, number of leaves or structure.
DATA = {
    "f32[4]": lambda: torch.ones(4),
    "f64[4]": lambda: torch.ones(4, dtype=torch.float64),
    "i64[2]": lambda: torch.ones(2, dtype=torch.int64),
    "bool[4]": lambda: torch.ones(4, dtype=torch.bool),
    "c64[2]": lambda: torch.ones(2, dtype=torch.complex64),
    "f32[2,2]": lambda: torch.ones(2, 2),
    "f32[2,3].t": lambda: torch.ones(2, 3).t(),
    "f32[]": lambda: torch.tensor(1.0),
    "f32[0]": lambda: torch.zeros(0),
    "grad f32[5]": lambda: torch.ones(5, requires_grad=True) * 2,
    "f32[large]": lambda: torch.ones(LARGE),
    "f64[large]": lambda: torch.ones(LARGE, dtype=torch.float64),
    "two f32[4]": lambda: [torch.ones(4), torch.ones(4)],
    "{a,b}": lambda: {"a": torch.ones(4), "b": torch.zeros(4)},
    "{b,a}": lambda: {"b": torch.ones(4), "a": torch.zeros(4)},
    "{a,c}": lambda: {"a": torch.ones(4), "c": torch.zeros(4)},
    "none": list,
}
# Whole numbers have no mean.
CALLS = {
    "gather": lambda run, data: gather(data),
    "reduce sum": lambda run, data: reduce(data, "sum"),
    "reduce max": lambda run, data: reduce(data, "max"),
    "broadcast": lambda run, data: broadcast(data),
    "broadcast from 1": lambda run, data: broadcast(data, from_process=1),
    "pad": lambda run, data: pad_across_processes(data),
    "gather_counted": lambda run, data: gather_counted(data, [1] * run.num_processes),
    "gather_for_metrics": lambda run, data: run.gather_for_metrics(data),
}
WITHOUT_DATA = {
    "gather_object": lambda run: gather_object([run.process_index]),
    "gather_object large": lambda run: gather_object(["x" * LARGE]),
    "broadcast_object_list": lambda run: broadcast_object_list([run.process_index]),
    "copy_tensor_to_devices": lambda run: copy_tensor_to_devices(torch.ones(2) if run.is_main_process else None),
    "wait_for_everyone": lambda run: run.wait_for_everyone(),
    "check_trigger": lambda run: run.check_trigger(),
    "metrics of text": lambda run: run.gather_for_metrics(["text"]),
}


def drawn(draw, call=None):
    """A name, a call and what it is a call of. Calls that fail on their own, before they send, are left out."""
    if call is None and draw.random() < 0.35:
        name = draw.choice(list(WITHOUT_DATA))
        return name, WITHOUT_DATA[name], None
    call = call or draw.choice(list(CALLS))
    names = [name for name in DATA if not (call == "gather_counted" and name in ("f32[0]", "none"))]
    if call == "reduce max":
        names = [name for name in names if "c64" not in name]
    name = draw.choice(names)
    return f"{call} {name}", lambda run: CALLS[call](run, DATA[name]()), call


def alike(names):
    """Whether the calls may go together, since they differ in nothing that the others need to know."""
    return len({effect(name) for name in names}) == 1


def effect(name):
    name = name.replace("gather_for_metrics none", "gather_object").replace("metrics of text", "gather_object")
    name = name.replace("gather_for_metrics", "gather").replace("gather_object large", "gather_object")
    if name.startswith(("pad ", "gather_counted ")):
        # Rows of any number.
        for rows in ("grad f32[5]", "f32[large]", "f32[0]"):
            name = name.replace(rows, "f32[4]")
        name = name.replace("f64[large]", "f64[4]").replace("f32[2,3].t", "f32[2,2]")
    if name == "gather_counted f32[]":
        return "gather_counted f32[4]"
    return name


def check(seed):
    """Never an answer made of other tensors' bytes, never an abort: one error that names what each rank called."""
    run = Accelerator(cpu=True)
    rank, world = run.process_index, run.num_processes
    draw = random.Random(seed)
    refused = 0
    for turn in range(PAIRINGS):
        first = drawn(draw)
        # Half of the pairs are the same call on other data.
        pair = [first, drawn(draw, first[2] if draw.random() < 0.5 else None)]
        odd = draw.randrange(world)
        chosen = [pair[other == odd] for other in range(world)]
        names = [name for name, *_ in chosen]
        begin = time.monotonic()
        try:
            chosen[rank][1](run)
        except DistributedOperationException as error:
            said = str(error)
        except ValueError as error:
            # All call copy_tensor_to_devices alike, or an empty part of a run.
            said = f"ValueError {error}"
        else:
            said = "returned"
        took = time.monotonic() - begin
        # Afterwards the ranks understand each other, and have been told the same.
        assert gather_object([said]) == [said] * world, (names, said)
        # Far from the timeout of the process group.
        assert took < 30, (names, took)
        if alike(names):
            assert said == "returned", (names, said)
        else:
            refused += 1
            assert said.startswith("Cannot apply the desired operation: the ranks"), (names, said)
            for other in range(world):
                assert f"Process {other}: " in said, said
            assert __file__ in said, said
        if rank == 0:
            print(f"{turn:3} | {' / '.join(names)} | {said.splitlines()[0]} | {took * 1000:.0f} ms", flush=True)
    assert refused > PAIRINGS / 2, refused


@on_ranks(2, thorough=[3])
def test_ranks_that_call_different_things(nproc):
    check(seed=nproc - 1)


@pytest.mark.thorough
@on_ranks(2)
def test_other_pairings():
    check(seed=3)
