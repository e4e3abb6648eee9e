# SPDX-License-Identifier: Apache-2.0
"""Debug mode: before an operation the ranks compare what they are about to do, and all raise where they differ.

The comparison goes through the run's key-value store, not through a collective: it works whatever the ranks send, also
where one of them calls another operation, or none.
"""

from __future__ import annotations

import json
import time
import weakref
from collections.abc import Iterable, Iterator
from types import EllipsisType
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from ..core import env
from ..core.errors import DistributedOperationException
from ..runtime import whereabouts
from ..runtime.calls import Call, difference, ranks_in_words, record
from . import transport

# Seconds for which a rank waits for the others to come to the same operation (variable ACCELERATE_DEBUG_TIMEOUT).
TIMEOUT = 20.0
# Seconds in which the other ranks may come after a difference was found, so that it is told with all sides.
COMPLETE = 0.5
PASSED = "ok"

# By the store of the default group, then by group name: each new default group counts from the beginning.
_turns: weakref.WeakKeyDictionary[Any, dict[str, int]] = weakref.WeakKeyDictionary()


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
    run = _get_default_store()
    turns = _turns.setdefault(run, {})
    turn = turns[name] = turns.get(name, 0) + 1
    ranks = dist.get_process_group_ranks(group)
    mine = record(Call(operation, data, options, free_dim))
    try:
        verdict = _settle(dist.PrefixStore(f"accelerate/verify/{name}", run), turn, ranks, mine)
    except (dist.DistNetworkError, ConnectionError) as error:
        raise DistributedOperationException(
            f"Operation: `accelerate.{operation}` at {mine['at']}: the store of the run is gone, so the process "
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
        judgement = _judge(found, ranks, waited, limit, store, turn)
        if judgement is None and store.check([f"{turn}/verdict"]):
            # The others have not waited for all to be here.
            judgement = PASSED
        if judgement is not None:
            break
    # The first judgement counts: a rank that comes late must not go on alone.
    verdict = store.compare_set(f"{turn}/verdict", "", str(judgement)).decode()
    _forget(store, turn - 2, me, me == ranks[0])
    return verdict


def _judge(
    found: dict[int, dict[str, Any]], ranks: list[int], waited: float, limit: float, store: dist.Store, turn: int
) -> str | None:
    """What the records shown so far amount to; None while it is open."""
    complete = len(found) == len(ranks)
    differs = difference(found)
    if complete:
        return differs or PASSED
    if differs is not None and waited > COMPLETE:
        return differs
    return _absence(found, ranks, departed(_get_default_store(), ranks), limit, waited > limit, store, turn)


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


def departed(store: dist.Store, ranks: Iterable[int]) -> list[int]:
    """Those of `ranks` whose process has come to its end (the process group's farewell in the run's store says so)."""
    return [rank for rank in ranks if store.check([f"accelerate/left/{rank}"])]


def _absence(
    found: dict[int, dict[str, Any]],
    ranks: list[int],
    departed: list[int],
    limit: float,
    late: bool,
    store: dist.Store,
    turn: int,
) -> str | None:
    """Why the absent ranks will not come, or None while they still may."""
    absent = [rank for rank in ranks if rank not in found]
    gone = [rank for rank in absent if rank in departed]
    if not gone and not late:
        return None
    record = next(iter(found.values()))
    lines = [
        f"Cannot apply the desired operation: {ranks_in_words(gone or absent)} did not call it"
        + (" and has ended." if gone else f" within {limit:g} seconds."),
        "",
        f"Operation: `accelerate.{record['operation']}`",
        "Callers:",
    ]
    lines += [f"  - Process {rank}: at {record['at']}" for rank, record in found.items()]
    places = whereabouts.ask([rank for rank in absent if rank not in departed])
    for rank in absent:
        line = "has ended" if rank in departed else "has not come"
        if rank in places:
            line += f"; it is at {places[rank]}"
        if store.check([f"{turn - 1}/{rank}"]):
            last = json.loads(store.get(f"{turn - 1}/{rank}"))
            line += f"; its last operation was {last['summary']} (at {last['at']})"
        lines.append(f"  - Process {rank}: {line}")
    if not gone:
        lines += ["", "If it only needs longer, set ACCELERATE_DEBUG_TIMEOUT to more seconds."]
    return "\n".join(lines)
