# SPDX-License-Identifier: Apache-2.0
"""Messages for errors of torch.distributed and its backends: which rank is missing, why, and what to check."""

from __future__ import annotations

import re
import time
from typing import Any

import torch.distributed as dist

from ..core.errors import AccelerateError, CommunicationError
from . import hang_watch, marks
from .calls import ranks_in_words, user_line
from .hang_report import SAME_CALLS, status_line
from .ledger import LEDGER

# The messages of gloo, NCCL and the store for a rank that is gone or has not come.
_LOST = re.compile(
    r"Connection (closed|reset) by peer|Broken pipe|Timed out waiting \d+ms|Application timeout caused pair closure|"
    r"Socket (closed|Timeout)|remote process exited|NCCL (communicator|error|watchdog)|collective operation timeout|"
    r"monitoredBarrier|has been aborted|Operation timed out|Writing to a pair|gloo/transport|not connected",
    re.IGNORECASE,
)
_CLOSED = re.compile(
    r"Connection (closed|reset) by peer|Broken pipe|Socket closed|remote process exited", re.IGNORECASE
)
# Seconds to wait for the marks of ranks that have closed the connection or wait elsewhere.
GRACE = 1.0

UNEVEN = (
    "Uneven batches? Ranks that read different numbers of batches cannot train together. Keep `even_batches=True` "
    "(the default), wrap the loop in `accelerator.join_uneven_inputs([model])` (DDP), or use "
    "`Accelerator(exact=True)`. A `break`, or an exception that is caught on one rank only, has the same effect."
)


def is_lost(error: BaseException) -> bool:
    """Whether a backend's error means that another rank is gone or has not come."""
    return isinstance(error, (RuntimeError, ConnectionError)) and (
        isinstance(error, (dist.DistBackendError, dist.DistNetworkError, ConnectionError))
        or _LOST.search(str(error)) is not None
    )


def raise_lost(error: BaseException, operation: str) -> None:
    """Raise CommunicationError from a backend's error about another rank; return for any other error."""
    if isinstance(error, AccelerateError) or not is_lost(error) or not _several():
        return
    raise CommunicationError(explanation(operation, error)) from error


def _several() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def explanation(operation: str, error: BaseException | None = None, at: str | None = None) -> str:
    """A message: where this rank is, what the other ranks' marks report, and a remedy. Leaves this rank's mark."""
    me, world = dist.get_rank(), dist.get_world_size()
    at = at or user_line()
    marks.publish(marks.WAITING, marks.where(operation, at))
    others = [rank for rank in range(world) if rank != me]
    begin = time.monotonic()
    while True:
        found = _marks(others)
        if found is None or all(_has_mark(found, rank) for rank in others) or time.monotonic() - begin > GRACE:
            break
        time.sleep(0.02)
    gone = [] if found is None else [rank for rank in others if _is_gone(found, rank)]
    if gone:
        # Its process may have left marks after they were read.
        found = _marks(others)
    marks.publish(marks.READY, True)
    place = marks.own_place()
    head = f"rank {me}: {'another rank is not in' if error is None else 'the connection to another rank failed in'} "
    head += f"{operation} (at {at}{f', in {place}' if place else ''})"
    lines = [f"{head}."]
    closed = error is not None and _CLOSED.search(str(error)) is not None
    lines += [f"  - {line}" for line in _reports(found, others, closed)]
    unable = [] if found is None else [rank for rank in others if _is_stopped(found, rank) or _is_gone(found, rank)]
    if found is not None and not _has_failed(found) and not unable:
        if _is_uneven(found):
            lines.append(UNEVEN)
        elif not closed or found[marks.LEFT]:
            lines.append(SAME_CALLS)
    if before := LEDGER.ended(hang_watch.BEFORE):
        lines.append(f"The last collectives of rank {me} before it: {', '.join(before)}")
    if error is not None:
        first = str(error).strip().splitlines()
        lines.append(f"The backend's message: {first[0] if first else type(error).__name__}")
    return "\n".join(lines)


def _marks(others: list[int]) -> dict[str, dict[int, Any]] | None:
    # A rank that has failed leaves that mark before the one that it has left, so that is read after it.
    kinds = (marks.LEFT, marks.FAILED, marks.READ, marks.WAITING, marks.PROCESS)
    found = {kind: marks.read(kind, others) for kind in kinds}
    return None if None in found.values() else found  # type: ignore[return-value]


def _has_mark(found: dict[str, dict[int, Any]], rank: int) -> bool:
    return _has_reported(found, rank) or _is_gone(found, rank)


def _has_reported(found: dict[str, dict[int, Any]], rank: int) -> bool:
    """Whether a rank has left a mark of its end, or of where it is."""
    return any(rank in found[kind] for kind in (marks.FAILED, marks.LEFT, marks.WAITING))


def _is_gone(found: dict[str, dict[int, Any]], rank: int) -> bool:
    """Whether a rank's process is gone without a mark of why."""
    return not _has_reported(found, rank) and marks.is_gone(found[marks.PROCESS].get(rank))


def _is_stopped(found: dict[str, dict[int, Any]], rank: int) -> bool:
    return not _has_reported(found, rank) and marks.is_stopped(found[marks.PROCESS].get(rank))


def _reports(found: dict[str, dict[int, Any]] | None, others: list[int], closed: bool) -> list[str]:
    if found is None:
        return ["the store of the run is gone: the process that hosts it (rank 0, or the launcher) has ended"]
    lines, silent = [], []
    # A closed connection usually means that a rank without a mark is gone, and cannot answer.
    unknown = [] if closed else [rank for rank in others if not _has_mark(found, rank)]
    places = hang_watch.request(unknown) if unknown else {}
    for rank in others:
        failed, waiting = found[marks.FAILED].get(rank), found[marks.WAITING].get(rank)
        if failed is not None and not failed["secondary"]:
            line = f"rank {rank} failed: {failed['error']} (at {failed['at']})"
        elif waiting is not None:
            line = f"rank {rank} is in {waiting['operation']} (at {waiting['at']})"
            if waiting["place"]:
                lines.append(f"{line}, in {waiting['place']}")
                continue
        elif rank in found[marks.LEFT]:
            line = f"rank {rank} has finished: its script has ended"
        elif _is_gone(found, rank):
            lines.append(f"rank {rank} was killed (out of memory?) or crashed: its process is gone")
            continue
        elif _is_stopped(found, rank):
            lines.append(f"rank {rank} is stopped (process {found[marks.PROCESS][rank][1]}): SIGSTOP, or a debugger")
            continue
        elif rank in places:
            line = f"rank {rank} {status_line(places[rank])}"
        elif rank in found[marks.READ]:
            line = f"rank {rank} is elsewhere"
        else:
            silent.append(rank)
            continue
        lines.append(line + _data(found[marks.READ].get(rank)))
    if silent:
        known = closed and (found[marks.LEFT] or found[marks.FAILED])
        unanswered = "stopped, in a call that holds the interpreter lock, or on a machine that cannot be reached"
        crashed = "still at work" if known else "killed (out of memory?) or crashed, or still at work"
        state = crashed if closed else unanswered
        lines.append(f"{ranks_in_words(silent)}: no word from {'it' if len(silent) == 1 else 'them'}; {state}")
    return lines


def _data(mark: Any) -> str:
    if mark is None:
        return ""
    batches = f"{mark['batches']} batch{'es' if mark['batches'] != 1 else ''}"
    if mark["complete"]:
        return f"; its loader ended epoch {mark['epoch']} after {batches}"
    return f"; it left the loop over its loader in epoch {mark['epoch']} after {batches}"


def _has_failed(found: dict[str, dict[int, Any]]) -> bool:
    return any(not mark["secondary"] for mark in found[marks.FAILED].values())


def _is_uneven(found: dict[str, dict[int, Any]]) -> bool:
    """Whether another rank has read another number of batches, or has ended while this one is in its loop."""
    own = marks.batches_read()
    # A rank that has ended with an error, as this one is about to, has not run out of batches.
    left = [rank for rank in found[marks.LEFT] if rank not in found[marks.FAILED]]
    if marks.own_place() and left:
        return True
    totals = {rank: mark["total"] for rank, mark in found[marks.READ].items()}
    for rank, mark in found[marks.WAITING].items():
        totals[rank] = mark["total"]
        if mark["reading"] and marks.is_reading():
            # In different calls amid their loaders, one is ahead because of that. An error leaves the loop, too.
            del totals[rank]
    stopped = [rank for rank in left if rank not in totals]
    return any(total != own for total in totals.values()) or bool(stopped and own)
