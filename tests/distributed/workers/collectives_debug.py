# SPDX-License-Identifier: Apache-2.0
"""A rank of the debug mode's test: each kind of disagreement is an error on every rank, soon; then the run goes on."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from accelerate.collectives import (
    broadcast,
    broadcast_object_list,
    gather,
    gather_object,
    pad_across_processes,
    reduce,
)
from accelerate.collectives.metrics import gather_counted
from accelerate.core.errors import DistributedOperationException
from accelerate.state import PartialState

state = PartialState(cpu=True)
RANK, WORLD = state.process_index, state.num_processes
LAST = RANK == WORLD - 1
assert state.debug and WORLD == 3


def disagree(needles, function, *args, within=10.0, **kwargs):
    """All ranks raise the same words, `within` seconds, and understand each other afterwards."""
    begin = time.monotonic()
    try:
        function(*args, **kwargs)
    except DistributedOperationException as error:
        told = str(error)
    else:
        raise AssertionError(f"rank {RANK} went on")
    took = time.monotonic() - begin
    assert took < within, took
    for needle in needles:
        assert needle in told, f"{needle!r} is not in:\n{told}"
    assert gather_object([told]) == [told] * WORLD
    return told


one, here = torch.ones(1, 5), __file__
LINES = Path(__file__).read_text().splitlines()
SLEEPS = next(number for number, line in enumerate(LINES, 1) if line.strip().startswith("time.sleep("))
assert gather([one, one]).__class__ is list  # agreement costs nothing but time
assert gather(one).shape == (3, 5)

disagree(
    ["rank 2 differs from ranks 0, 1", "disagree on the shape", "`accelerate.gather`", here]
    + ["Process 2: [1, 2, 5]", "Process 0: [1, 5]", "Process 1: [1, 5]"],
    gather,
    torch.ones(1, 2, 5) if LAST else one,
)
disagree(
    ["shape of data['a'][1];", "Process 2: [4]", "Process 1: [3]"], gather, {"a": [one, torch.ones(4 if LAST else 3)]}
)
disagree(["disagree on the dtype", "Process 2: float64", "Process 0: float32"], reduce, one.double() if LAST else one)
disagree(["structure", "dict(['a']: tensor)", "list([0]: tensor)"], broadcast, [one] if LAST else {"a": one})
disagree(
    ["structure", "dict(['b']: tensor, ['a']: tensor)"], gather, {"b": one, "a": one} if LAST else {"a": one, "b": one}
)
disagree(
    ["`accelerate.gather` or `accelerate.reduce`", "Process 2: `accelerate.reduce`"], reduce if LAST else gather, one
)
disagree(["options", "reduction='sum'", "reduction='mean'"], reduce, one, "sum" if LAST else "mean")
disagree(["options", "from_process=2"], broadcast_object_list, [1], 2 if LAST else 0)
disagree(["options", "counts=(1, 1, 0)"], gather_counted, one, (1, 1, 0) if LAST else (1, 1, 1))
disagree(["structure", "str"], gather, "text" if LAST else one)
disagree(["shape", "[any, any]", "[any]"], pad_across_processes, torch.ones(RANK) if LAST else torch.ones(RANK, 3))
assert pad_across_processes(torch.ones(RANK, 3)).shape == (2, 3)
# Each pair differs: both sides are told.
told = disagree(["Process 0: [1]", "Process 1: [2]", "Process 2: [3]"], gather, torch.ones(RANK + 1))
assert "rank 0" in told and "ranks 1, 2 differ" in told

# One rank comes too late: the others name it; it hears of it when it comes.
if LAST:
    time.sleep(3.5)  # longer than ACCELERATE_DEBUG_TIMEOUT; the others ask where this rank is
disagree(
    ["rank 2 did not call it within 2 seconds", "Process 0: at", "ACCELERATE_DEBUG_TIMEOUT"]
    + [f"Process 2: has not come; it is at {here}:{SLEEPS}", "its last operation was `accelerate.gather_object`"],
    gather,
    one,
    within=15.0,
)
for turn in range(20):
    assert gather(torch.tensor(turn)).tolist() == [turn] * WORLD

# One rank ends without the call.
if not LAST:
    begin = time.monotonic()
    try:
        gather(one)
    except DistributedOperationException as error:
        assert "rank 2 did not call it and has ended" in str(error), error
    else:
        raise AssertionError("went on without rank 2")
    assert time.monotonic() - begin < 10.0
print("all ok", flush=True)
