# SPDX-License-Identifier: Apache-2.0
"""Debug mode: before an operation the ranks compare what they are about to do, and all raise where they differ.

The comparison goes through the run's key-value store, not through a collective: it works whatever the ranks send, also
where one of them calls another operation, or none.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from types import EllipsisType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from ..core import env, trees
from ..core.errors import DistributedOperationException
from . import transport

# Seconds for which a rank waits for the others to come to the same operation (variable ACCELERATE_DEBUG_TIMEOUT).
TIMEOUT = 20.0
# Seconds in which the other ranks may come after a difference was found, so that it is told with all sides.
COMPLETE = 0.5
PASSED = "ok"
# What is compared, in this order: the first difference is told.
ASPECTS = ("operation", "options", "structure", "dtypes", "dimensions", "shapes")

_turns: dict[str, int] = {}


def agree(
    operation: str,
    data: Any,
    group: dist.ProcessGroup | None = None,
    options: str = "",
    free_dim: int | EllipsisType | None = None,
) -> None:
    """Return when every rank of `group` is about to do the same.

    Sizes along `free_dim` (`...`: along all) may differ. Raises DistributedOperationException, the same on every rank,
    where operation, options, structure, dtypes or shapes differ, and where a rank does not come in time.
    """
    group = transport.group_of(group)
    name = group.group_name
    turn = _turns[name] = _turns.get(name, 0) + 1
    ranks = dist.get_process_group_ranks(group)
    record = _record(operation, data, options, free_dim)
    try:
        verdict = _settle(dist.PrefixStore(f"accelerate/verify/{name}", _get_default_store()), turn, ranks, record)
    except (dist.DistNetworkError, ConnectionError) as error:
        raise DistributedOperationException(
            f"Operation: `accelerate.{operation}` at {record['at']}: the store of the run is gone, so the process "
            f"that hosts it (rank 0, or the launcher) has ended: {error}"
        ) from error
    if verdict != PASSED:
        raise DistributedOperationException(verdict)


def _settle(store: dist.Store, turn: int, ranks: list[int], record: dict[str, Any]) -> str:
    """Show `record`, wait for the others', and return the verdict that the first judge has given for all."""
    me = dist.get_rank()
    keys = {rank: f"{turn}/{rank}" for rank in ranks}
    store.set(keys[me], json.dumps(record))
    limit = env.get_float("debug_timeout") or TIMEOUT
    judgement = None
    for waited in pauses():
        present = [rank for rank in ranks if store.check([keys[rank]])]
        found = {rank: json.loads(store.get(keys[rank])) for rank in present}
        judgement = _judge(found, ranks, waited, limit)
        if judgement is None and store.check([f"{turn}/verdict"]):
            # The others have not waited for all to be here.
            judgement = PASSED
        if judgement is not None:
            break
    # The first judgement counts: a rank that comes late must not go on alone.
    verdict = store.compare_set(f"{turn}/verdict", "", str(judgement)).decode()
    _forget(store, turn - 2, me, me == ranks[0])
    return verdict


def _judge(found: dict[int, dict[str, Any]], ranks: list[int], waited: float, limit: float) -> str | None:
    """What the records shown so far amount to; None while it is open."""
    complete = len(found) == len(ranks)
    difference = _difference(found)
    if complete:
        return difference or PASSED
    if difference is not None and waited > COMPLETE:
        return difference
    return _absence(found, ranks, departed(_get_default_store(), ranks), limit, waited > limit)


def pauses() -> Iterator[float]:
    """Look after look at the store: the seconds waited so far, with a sleep between that grows to 20 ms.

    A store's own `wait` with a time limit writes a warning each time that the limit passes.
    """
    begin, pause = time.monotonic(), 5e-5
    while True:
        yield time.monotonic() - begin
        time.sleep(pause)
        pause = min(1.5 * pause, 0.02)


def _forget(store: dist.Store, turn: int, me: int, first: bool) -> None:
    """Remove what nobody reads any more: who shows a turn has left the one before, so two turns back all have."""
    if turn > 0:
        store.delete_key(f"{turn}/{me}")
        if first:
            store.delete_key(f"{turn}/verdict")


def forget() -> None:
    """Count from the beginning: the process group is a new one."""
    _turns.clear()


def departed(store: dist.Store, ranks: Iterable[int]) -> list[int]:
    """Those of `ranks` whose process has come to its end (the process group's farewell in the run's store says so)."""
    return [rank for rank in ranks if store.check([f"accelerate/left/{rank}"])]


def _record(operation: str, data: Any, options: str, free_dim: int | EllipsisType | None) -> dict[str, Any]:
    tensors = dict(_named(data, ""))
    shapes = {name: list(tensor.shape) if not tensor.is_nested else [] for name, tensor in tensors.items()}
    dimensions = {name: len(shape) for name, shape in shapes.items()}
    for shape in shapes.values():
        if free_dim is ...:
            shape[:] = [-1] * len(shape)
        elif free_dim is not None and -len(shape) <= free_dim < len(shape):
            shape[free_dim] = -1
    return {
        "operation": operation,
        "options": options,
        "structure": _outline(data),
        "dtypes": {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in tensors.items()},
        "dimensions": dimensions,
        "shapes": shapes,
        "at": _caller(),
    }


def _children(data: Any) -> list[tuple[str, Any]] | None:
    """The named parts of a container; None for anything else. In the order in which the tensors are packed."""
    if trees.is_namedtuple(data):
        return [(f".{field}", value) for field, value in zip(data._fields, data, strict=True)]
    if isinstance(data, (list, tuple)):
        return [(f"[{index}]", value) for index, value in enumerate(data)]
    if isinstance(data, Mapping):
        return [(f"[{key!r}]", value) for key, value in data.items()]
    if trees.is_dataclass_instance(data):
        return [(f".{field}", getattr(data, field)) for field in data.__dataclass_fields__]
    return None


def _named(data: Any, path: str) -> list[tuple[str, torch.Tensor]]:
    if trees.is_tensor(data):
        return [(path or "tensor", data)]
    found = []
    for name, value in _children(data) or []:
        found += _named(value, path + name)
    return found


def _outline(data: Any) -> str:
    if trees.is_tensor(data):
        return "tensor"
    children = _children(data)
    if children is None:
        return type(data).__qualname__
    return f"{type(data).__qualname__}({', '.join(name + ': ' + _outline(value) for name, value in children)})"


def _caller() -> str:
    """The place outside this package that called the operation."""
    frame = sys._getframe(1)
    package = __name__.partition(".")[0] + "."
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(package):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _difference(found: dict[int, dict[str, Any]]) -> str | None:
    """What the ranks that have shown their records differ in, or None."""
    for aspect in ASPECTS:
        values = {rank: record[aspect] for rank, record in found.items()}
        reference = next(iter(values.values()))
        if all(value == reference for value in values.values()):
            continue
        if isinstance(reference, dict):
            return _tensor_difference(aspect, values, found)
        told = {rank: value if aspect != "operation" else f"`accelerate.{value}`" for rank, value in values.items()}
        return _message(f"the ranks disagree on the {aspect}", aspect, told, found)
    return None


def _tensor_difference(aspect: str, values: dict[int, dict[str, Any]], found: dict[int, dict[str, Any]]) -> str:
    reference = next(iter(values.values()))
    name = next(name for name in reference if any(value.get(name) != reference[name] for value in values.values()))
    # What the user thinks in is the shape, also where only the number of dimensions differs.
    shown = "shapes" if aspect == "dimensions" else aspect
    told = {rank: str(record[shown][name]).replace("-1", "any") for rank, record in found.items()}
    where = "" if name == "tensor" else f" of data{name}"
    return _message(f"the ranks disagree on the {shown[:-1]}{where}", shown, told, found)


def _message(what: str, aspect: str, told: dict[int, str], found: dict[int, dict[str, Any]]) -> str:
    operations = sorted({record["operation"] for record in found.values()})
    odd = _minority(told)
    lines = [
        f"Cannot apply the desired operation: {what}; {odd}.",
        "",
        f"Operation: {' or '.join(f'`accelerate.{name}`' for name in operations)}",
        f"Input {aspect}:",
    ]
    lines += [f"  - Process {rank}: {text}  (at {found[rank]['at']})" for rank, text in told.items()]
    return "\n".join(lines)


def _minority(told: dict[int, str]) -> str:
    """Which ranks stand against most of the others (against rank 0's side when both are equally many)."""
    sides: dict[str, list[int]] = {}
    for rank, text in told.items():
        sides.setdefault(text, []).append(rank)
    most = max(sides.values(), key=len)
    odd = [rank for rank in told if rank not in most]
    return f"{_ranks(odd)} differ{'s' if len(odd) == 1 else ''} from {_ranks(most)}"


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _absence(
    found: dict[int, dict[str, Any]], ranks: list[int], departed: list[int], limit: float, late: bool
) -> str | None:
    """Why the absent ranks will not come, or None while they still may."""
    absent = [rank for rank in ranks if rank not in found]
    gone = [rank for rank in absent if rank in departed]
    if not gone and not late:
        return None
    record = next(iter(found.values()))
    lines = [
        f"Cannot apply the desired operation: {_ranks(gone or absent)} did not call it"
        + (" and has ended." if gone else f" within {limit:g} seconds."),
        "",
        f"Operation: `accelerate.{record['operation']}`",
        "Callers:",
    ]
    lines += [f"  - Process {rank}: at {record['at']}" for rank, record in found.items()]
    lines += [f"  - Process {rank}: {'has ended' if rank in departed else 'has not come'}" for rank in absent]
    if not gone:
        lines += ["", "If it only needs longer, set ACCELERATE_DEBUG_TIMEOUT to more seconds."]
    return "\n".join(lines)
