# SPDX-License-Identifier: Apache-2.0
"""Messages for errors of torch.distributed and its backends: which rank is missing, why, and what to check."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import torch.distributed as dist

from ..core.errors import AccelerateError, CommunicationError, is_lost_connection
from ..core.objects import ranks_in_words
from ..core.stacks import user_line
from . import hang_watch, marks
from .agreement import pauses
from .calls import LEDGER, Call

# Those that say that a connection was closed.
_CLOSED = re.compile(
    r"(?i)Connection (closed|reset) by peer|Broken pipe|Socket closed|remote process exited"
)
# Those of gloo and NCCL that say that a collective has waited as long as it may.
_TIMED_OUT = re.compile(
    r"(?i)timed out waiting \d+ms|timeout caused pair closure|collective operation timeout"
)
# Seconds to wait for a cause, and for the rank that asks those without a word.
GRACE, PATIENCE = 1.0, 5.0

UNEVEN = (
    "Uneven batches? Ranks that read different numbers of batches cannot train together. Keep "
    "`even_batches=True` (the default), wrap the loop in "
    "`accelerator.join_uneven_inputs([model])` (DDP), or use `Accelerator(exact=True)`. A "
    "`break`, or an exception that is caught on only one rank, has the same effect."
)


class Collective:
    """A block in which this rank waits for others: in the ledger, and CommunicationError where one is gone."""

    # Not a generator of contextlib: that takes longer than the entry in the ledger.
    def __init__(self, call: Call) -> None:
        self._entry = LEDGER.enter(call)

    def __enter__(self) -> None:
        """Nothing: the entry is made."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        """The collective has ended."""
        try:
            if isinstance(error, RuntimeError):
                raise_lost(error, f"`{self._entry.operation}`")
        finally:
            self._entry.left = time.monotonic()


def is_lost(error: BaseException) -> bool:
    """Whether a backend's error means that another rank is gone or has not come."""
    return isinstance(error, (RuntimeError, ConnectionError)) and (
        isinstance(error, (dist.DistBackendError, dist.DistNetworkError, ConnectionError))
        or is_lost_connection(str(error))
    )


def raise_lost(error: BaseException, operation: str) -> None:
    """Raise CommunicationError from a backend's error about another rank; return for any other error."""
    if isinstance(error, AccelerateError) or not is_lost(error):
        return
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        text = explanation(operation, error)
        raise CommunicationError(f"{text}\nThe backend's message: {lines[0]}") from error


def explanation(operation: str, error: BaseException | None = None, at: str | None = None) -> str:
    """A message: where this rank is, what has become of the others, and a remedy. The other ranks can read it."""
    me = dist.get_rank()
    at = at or user_line()
    if error is None:
        what = "another rank is not in"
    elif _TIMED_OUT.search(str(error)):
        what = "the wait for another rank timed out in"
    else:
        what = "the connection to another rank failed in"
    where = f"at {at}"
    batch = marks.own_place()
    if batch:
        where += f", in {batch}"
    lines = [f"rank {me}: {what} {operation} ({where})."]
    marks.post(marks.LOST, marks.LOST, operation=operation, at=at)
    closed = error is not None and _CLOSED.search(str(error)) is not None
    try:
        lines += _what_is_known(me, closed)
    except (RuntimeError, ValueError):
        lines.append(
            "  - the store of the run is gone: the process that hosts it (rank 0, or the launcher) has ended"
        )
    marks.done()
    before = LEDGER.ended(hang_watch.BEFORE)
    if before:
        lines.append(f"The last collectives of rank {me} before it: {', '.join(before)}")
    return "\n".join(lines)


def _what_is_known(me: int, closed: bool) -> list[str]:
    """What the other ranks have left in the store, and a remedy."""
    world = dist.get_world_size()
    processes = marks.neighbours()
    for waited in pauses(world, GRACE):
        marks.post_killed(processes)
        if marks.count(marks.CAUSES) or marks.count(marks.LOST) >= world or waited >= GRACE:
            break
    causes = marks.entries(marks.CAUSES)
    others: dict[int, dict[str, Any]] = {}
    for entry in marks.entries(marks.LOST):
        if entry["rank"] != me:
            others[entry["rank"]] = entry
    words = [_in_words(entry) for entry in (*causes, *others.values())]
    unable = any(entry["kind"] != marks.ENDED for entry in causes)
    if not causes and marks.count(marks.LOST) < world:
        silent = _silent(world, closed)
        words += silent["lines"]
        unable = silent["unable"]
    lines = [f"  - {line}" for line in words]
    if unable:
        return lines
    if _are_uneven(causes, list(others.values())):
        lines.append(UNEVEN)
    elif causes or not closed:
        lines.append(hang_watch.SAME_CALLS)
    return lines


def _are_uneven(causes: list[dict[str, Any]], others: list[dict[str, Any]]) -> bool:
    """Whether ranks that have ended, or wait elsewhere, have read another number of batches than this one."""
    total = marks.batches_read()
    in_pass = bool(marks.own_place())
    for entry in causes:
        if in_pass or entry["total"] != total:
            return True
    uneven = [entry for entry in others if entry["total"] != total]
    if in_pass:
        # In different calls amid their loaders, one is ahead because of that.
        uneven = [entry for entry in uneven if not entry["place"]]
    return bool(uneven)


# What has become of a rank, from an entry of the store.
_FATES = {
    marks.KILLED: marks.WAS_KILLED,
    marks.FAILED: "failed: {error} (at {at})",
    marks.ENDED: "has finished: its script has ended",
    marks.LOST: "is in {operation} (at {at})",
}


def _in_words(entry: dict[str, Any]) -> str:
    line = f"rank {entry['rank']} {_FATES[entry['kind']].format(**entry)}"
    if entry["kind"] == marks.LOST and entry["place"]:
        return f"{line}, in {entry['place']}"
    if entry.get("last_pass"):
        return f"{line}; {entry['last_pass']}"
    return line


def _silent(world: int, closed: bool) -> dict[str, Any]:
    """What is known of the ranks that have left no word. One rank finds out, for all."""
    store = marks.run_store()
    key = "accelerate/silent/lines"
    me = str(dist.get_rank())
    if store.compare_set("accelerate/silent", "", me).decode() == me:
        store.set(key, json.dumps(_ask_silent(store, world, closed)))
    for waited in pauses(world, PATIENCE):
        if store.check([key]):
            answer: dict[str, Any] = json.loads(store.get(key))
            return answer
        if waited >= PATIENCE:
            break
    return {"lines": [], "unable": False}


def _ask_silent(store: Any, world: int, closed: bool) -> dict[str, Any]:
    """What this rank finds out about those without a word."""
    entries = marks.entries(marks.LOST, most=2 * world)
    posted = {entry["rank"] for entry in entries}
    silent = sorted(set(range(world)) - posted)
    states = {}
    for rank in silent:
        state = marks.state_of(rank, store)
        if state:
            states[rank] = state
    unable = any(state != marks.HAS_ENDED for state in states.values())
    # A closed connection usually means that a rank without a word is gone, and cannot answer.
    why = "killed (out of memory?), crashed, or still working"
    if not closed:
        why = "stopped, or cannot be reached"
        statuses = hang_watch.request([rank for rank in silent if rank not in states])
        for rank, status in statuses.items():
            states[rank] = hang_watch.status_line(status)
    lines = [f"rank {rank} {state}" for rank, state in states.items()]
    unknown = [rank for rank in silent if rank not in states]
    if unknown:
        pronoun = "them"
        if len(unknown) == 1:
            pronoun = "it"
        lines.append(f"{ranks_in_words(unknown)}: no answer from {pronoun}; {why}")
    return {"lines": lines, "unable": unable}
