# SPDX-License-Identifier: Apache-2.0
"""A rank of the mismatch trials: ranks call different things, drawn at random; all raise one error that names both.

Arguments: the seed, and how many pairings are tried.
"""

from __future__ import annotations

import random
import sys
import time

import torch

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

accelerator = Accelerator(cpu=True)
RANK, WORLD = accelerator.process_index, accelerator.num_processes
LARGE = 1 << 20

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
    "gather": gather,
    "reduce sum": lambda data: reduce(data, "sum"),
    "reduce max": lambda data: reduce(data, "max"),
    "broadcast": lambda data: broadcast(data),
    "broadcast from 1": lambda data: broadcast(data, from_process=1),
    "pad": lambda data: pad_across_processes(data),
    "gather_counted": lambda data: gather_counted(data, [1] * WORLD),
    "gather_for_metrics": accelerator.gather_for_metrics,
}
WITHOUT_DATA = {
    "gather_object": lambda: gather_object([RANK]),
    "gather_object large": lambda: gather_object(["x" * LARGE]),
    "broadcast_object_list": lambda: broadcast_object_list([RANK]),
    "copy_tensor_to_devices": lambda: copy_tensor_to_devices(torch.ones(2) if RANK == 0 else None),
    "wait_for_everyone": accelerator.wait_for_everyone,
    "check_trigger": accelerator.check_trigger,
    "metrics of text": lambda: accelerator.gather_for_metrics(["text"]),
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
    return f"{call} {name}", lambda: CALLS[call](DATA[name]()), call


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


def main(seed, count):
    draw = random.Random(seed)
    refused = 0
    for turn in range(count):
        first = drawn(draw)
        # Half of the pairs are the same call on other data.
        pair = [first, drawn(draw, first[2] if draw.random() < 0.5 else None)]
        odd = draw.randrange(WORLD)
        chosen = [pair[rank == odd] for rank in range(WORLD)]
        names = [name for name, *_ in chosen]
        begin = time.monotonic()
        try:
            chosen[RANK][1]()
        except DistributedOperationException as error:
            said = str(error)
        except ValueError as error:
            # All call copy_tensor_to_devices alike, or an empty part of a run.
            said = f"ValueError {error}"
        else:
            said = "returned"
        took = time.monotonic() - begin
        # Afterwards the ranks understand each other, and have been told the same.
        assert gather_object([said]) == [said] * WORLD, (names, said)
        assert took < 5, (names, took)
        if alike(names):
            assert said == "returned", (names, said)
        else:
            refused += 1
            assert said.startswith("Cannot apply the desired operation: the ranks"), (names, said)
            for rank in range(WORLD):
                assert f"Process {rank}: " in said, said
            assert __file__ in said, said
        if RANK == 0:
            print(f"{turn:3} | {' / '.join(names)} | {said.splitlines()[0]} | {took * 1000:.0f} ms", flush=True)
    print(f"{refused} of {count} refused", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
