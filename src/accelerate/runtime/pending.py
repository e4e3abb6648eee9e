# SPDX-License-Identifier: Apache-2.0
"""The collectives of torch that this process has begun, from torch's flight recorder: DDP's, FSDP's and the user's."""

from __future__ import annotations

import contextlib
import json
import time
from typing import Any, NamedTuple

import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

# One recorder for backends on the CPU, one for NCCL. A backend without one is not in them.
_DUMPS = tuple(getattr(c10d, name, None) for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"))
_DTYPES = {"Float": "float32", "Double": "float64", "Half": "float16", "BFloat16": "bfloat16", "Int": "int32"}
_DTYPES |= {"Long": "int64", "Char": "int8", "Byte": "uint8", "Bool": "bool"}
# Collectives of each group that are kept for comparison, and of those how many the ranks compare while they wait.
KEPT = 16
COMPARED = 3
# Collectives of torch in which every rank passes tensors of the same shape.
SAME_SHAPES = ("all_reduce", "broadcast", "reduce", "all_gather", "_all_gather_base", "reduce_scatter")


class Recorded(NamedTuple):
    """A collective in the recorder.

    Fields:
        group: name and description of the process group.
        number: its number in the group; messages between two ranks have numbers of their own.
        operation: for example "all_reduce".
        data: dtypes and shapes of the input.
        age: seconds since the host began it.
        is_pending: whether it has not ended.
        is_p2p: whether it is a message between two ranks.
    """

    group: str
    number: int
    operation: str
    data: str
    age: float
    is_pending: bool
    is_p2p: bool


def recorded() -> list[Recorded]:
    """The collectives in torch's recorders, in the order in which they began; empty where nothing is recorded."""
    if not dist.is_available() or not dist.is_initialized():
        return []
    now = time.time_ns()
    found: list[Recorded] = []
    for dump in filter(None, _DUMPS):
        # The format is not documented: what another version of torch writes must not end the watch.
        with contextlib.suppress(ValueError, KeyError, TypeError):
            found += [_parsed(entry, now) for entry in json.loads(dump()).get("entries", [])]
    return found


def _parsed(entry: dict[str, Any], now: int) -> Recorded:
    is_p2p = bool(entry.get("is_p2p"))
    name, description = [*entry.get("process_group", []), "", ""][:2]
    dtypes = [_DTYPES.get(kind, kind) for kind in entry.get("input_dtypes", [])]
    shapes = entry.get("input_sizes", [])
    data = ", ".join(f"{dtype} {list(shape)}" for dtype, shape in zip(dtypes, shapes, strict=False))
    return Recorded(
        group=f"{name}/{description}" if description else str(name),
        number=int(entry["p2p_seq_id" if is_p2p else "collective_seq_id"]),
        operation=str(entry["profiling_name"]).partition(":")[2] or str(entry["profiling_name"]),
        data=data,
        age=max(0.0, (now - int(entry["time_created_ns"])) / 1e9),
        # gloo leaves the state at "scheduled"; an entry that has ended is retired.
        is_pending=not entry.get("retired") and entry.get("state") != "completed",
        is_p2p=is_p2p,
    )


def newest(calls: list[Recorded]) -> dict[str, int]:
    """The number of the last collective in each group."""
    return {one.group: one.number for one in calls if not one.is_p2p}


def compared(calls: list[Recorded]) -> dict[str, str]:
    """What every rank of a group does in its last collectives, up to the oldest that has not ended: name -> text."""
    texts: dict[str, str] = {}
    for group in {one.group for one in calls}:
        begun = [one for one in calls if one.group == group and not one.is_p2p]
        waits = next((at for at, one in enumerate(begun) if one.is_pending), len(begun) - 1)
        for one in begun[max(0, waits + 1 - COMPARED) : waits + 1]:
            # NCCL also takes an all_gather of different shapes.
            same = one.operation in SAME_SHAPES and one.operation != "all_gather"
            texts[f"{group}/{one.number}"] = f"{one.operation} of {one.data}" if same else one.operation
    return texts
