# SPDX-License-Identifier: Apache-2.0
"""The collectives that this process has begun, from torch's flight recorder: DDP's, FSDP's and the user's."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch.distributed as dist

from . import Internal

FLIGHT_RECORDER = Internal(
    name="flight_recorder",
    what="torch._C._distributed_c10d._dump_fr_trace_json and _dump_nccl_trace_json",
    versions="2.12 to 2.14",
    upstream="not reported",
    needed_by="the report of a run that stands still (docs/hang.md), examples/debugging/hang.py, saves of rank 0",
    without="reports have the collectives of this package only, ranks in different ones are not found out early, and "
    "saves on rank 0 only wait for half a minute in a loop without a prepared loader",
    test="tests/torch_internals/test_flight_recorder.py::test_collectives_are_recorded",
)

# One recorder for backends on the CPU, one for NCCL: builds of torch without it lack the second.
_DUMPS: list[Callable[[], bytes]] = []
with contextlib.suppress(ImportError):
    from torch._C._distributed_c10d import _dump_fr_trace_json  # type: ignore[attr-defined]

    _DUMPS.append(_dump_fr_trace_json)
with contextlib.suppress(ImportError):
    from torch._C._distributed_c10d import _dump_nccl_trace_json  # type: ignore[attr-defined]

    _DUMPS.append(_dump_nccl_trace_json)

_DTYPES = {
    "Float": "float32",
    "Double": "float64",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Int": "int32",
}
_DTYPES |= {"Long": "int64", "Char": "int8", "Byte": "uint8", "Bool": "bool"}


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
    """The collectives in torch's recorders in the order in which they began; empty where nothing is recorded."""
    if not FLIGHT_RECORDER.is_on or not dist.is_available() or not dist.is_initialized():
        return []
    now = time.time_ns()
    collectives: list[Recorded] = []
    for dump in _DUMPS:
        # The format is not documented: what another version of torch writes must not end the watch.
        with contextlib.suppress(ValueError, KeyError, TypeError):
            collectives += [_parsed(entry, now) for entry in json.loads(dump()).get("entries", [])]
    return collectives


def _parsed(entry: dict[str, Any], now: int) -> Recorded:
    is_p2p = bool(entry.get("is_p2p"))
    name, description = [*entry.get("process_group", []), "", ""][:2]
    dtypes = [_DTYPES.get(kind, kind) for kind in entry.get("input_dtypes", [])]
    shapes = entry.get("input_sizes", [])
    return Recorded(
        group=f"{name}/{description}" if description else str(name),
        number=int(entry["p2p_seq_id" if is_p2p else "collective_seq_id"]),
        operation=str(entry["profiling_name"]).rpartition(":")[2],
        data=", ".join(
            f"{dtype} {list(shape)}" for dtype, shape in zip(dtypes, shapes, strict=False)
        ),
        age=max(0.0, (now - int(entry["time_created_ns"])) / 1e9),
        # gloo leaves the state at "scheduled"; an entry that has ended is retired.
        is_pending=not entry.get("retired") and entry.get("state") != "completed",
        is_p2p=is_p2p,
    )


def newest(collectives: list[Recorded]) -> dict[str, int]:
    """The number of the last collective in each group."""
    return {one.group: one.number for one in collectives if not one.is_p2p}
