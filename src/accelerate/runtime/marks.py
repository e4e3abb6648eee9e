# SPDX-License-Identifier: Apache-2.0
"""What each rank leaves in the run's store for the others to read when a collective fails: where it is, how it ended.

Nothing here is on the path of a step: marks are written at the end of a pass over a loader, on an error and at the
exit. They are read only when something went wrong. A store that is gone is no error here: there is nothing to read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from typing import Any, ClassVar

import torch.distributed as dist

from ..core import system
from ..core.system import machine_identity, process_start

FAILED = "failed"  # an error that nobody caught: {"error", "at", "secondary"}
LEFT = "left"  # the process has come to its end
READ = "read"  # the last pass over a loader: {"epoch", "batches", "complete", "total"}
STACKS = "stacks"  # the descriptor of the file to which the process writes its stacks: see `locked.py`
PROCESS = "process"  # [machine, process id, start], for ranks of the same machine
READY = "ready"  # this rank has read the marks that it needs: whoever hosts the store may go
WAITING = "waiting"  # in a collective that does not end: as `where` makes it


# The kinds of marks that this process has left.
_published: set[str] = set()


class _Store:
    """The store whose connection is lost, if any: torch logs the frames of each further call that fails."""

    lost: Any = None


def _store() -> Any:
    """The run's store. Raises RuntimeError where it is gone, ValueError where there is no group."""
    store = dist.distributed_c10d._get_default_store()
    if store is _Store.lost:
        raise RuntimeError("the store of the run is gone")
    return store


def _note_loss(error: Exception) -> None:
    if isinstance(error, dist.DistNetworkError):
        _Store.lost = dist.distributed_c10d._get_default_store()


class _Reading:
    """What this process has read from prepared loaders. `open`: those whose pass is under way, the innermost last."""

    open: ClassVar[list[Any]] = []
    total = 0
    # Where the last pass was left, in words; None where it was read to its end.
    left: str | None = None


def has_published(kind: str) -> bool:
    """Whether this process has left a mark of a kind, and not withdrawn it."""
    return kind in _published


def publish(kind: str, value: object) -> None:
    """Leave this rank's mark of a kind. Nothing happens where there is no group, or its store is gone."""
    _published.add(kind)
    try:
        _store().set(f"accelerate/{kind}/{dist.get_rank()}", json.dumps(value))
    except (RuntimeError, ValueError) as error:
        _note_loss(error)


def withdraw(kind: str) -> None:
    """Remove this rank's mark."""
    _published.discard(kind)
    try:
        _store().delete_key(f"accelerate/{kind}/{dist.get_rank()}")
    except (RuntimeError, ValueError) as error:
        _note_loss(error)


def is_first(subject: str) -> bool:
    """Whether no other rank of this machine has called this for a subject: one of them reports for all."""
    try:
        return bool(_store().add(f"accelerate/first/{machine_identity()}/{subject}", 1) == 1)
    except (RuntimeError, ValueError) as error:
        _note_loss(error)
        return True


def publish_process() -> None:
    """Leave this rank's mark of its process."""
    started = process_start(os.getpid())
    if started is not None:
        publish(PROCESS, [machine_identity(), os.getpid(), started])


def is_gone(mark: Any) -> bool:
    """Whether the process of a mark is known to be gone. Of processes on other machines it is not."""
    if mark is None:
        return False
    machine, pid, started = mark
    return bool(machine == machine_identity() and process_start(pid) != started)


def is_here(mark: Any) -> bool:
    """Whether the process of a mark runs on this machine."""
    return mark is not None and mark[0] == machine_identity() and process_start(mark[1]) == mark[2]


def is_stopped(mark: Any) -> bool:
    """Whether the process of a mark is stopped. Of processes on other machines it is not known."""
    return mark is not None and mark[0] == machine_identity() and system.is_stopped(mark[1])


def read(kind: str, ranks: Iterable[int], store: Any = None) -> dict[int, Any] | None:
    """The marks of a kind that `ranks` have left; None where the store is gone. `store`: another connection to it."""
    found = {}
    try:
        store = store or _store()
        for rank in ranks:
            key = f"accelerate/{kind}/{rank}"
            if store.check([key]):
                found[rank] = json.loads(store.get(key) or "null")
    except (RuntimeError, ValueError) as error:
        _note_loss(error)
        return None
    return found


def begin_pass(loader: object) -> None:
    """A pass over a prepared loader begins. Its `batches_read` counts."""
    _Reading.open.append(loader)


def end_pass(loader: Any, epoch: int, complete: bool) -> None:
    """A pass has ended, `complete` or left before; the other ranks can read where."""
    if loader in _Reading.open:
        _Reading.open.remove(loader)
    _Reading.left = None if complete else f"batch {loader.batches_read} of epoch {epoch}"
    _Reading.total += loader.batches_read
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        mark = {"epoch": epoch, "batches": loader.batches_read, "complete": complete, "total": _Reading.total}
        publish(READ, mark)


def batches_read() -> int:
    """Batches that this process has read from prepared loaders in all."""
    total: int = _Reading.total + sum(loader.batches_read for loader in _Reading.open)
    return total


def is_reading() -> bool:
    """Whether this process is in a pass over a prepared loader."""
    return bool(_Reading.open)


def own_place() -> str | None:
    """Where this process is in its data, or where an error or `break` left it; None after a complete pass."""
    if not _Reading.open:
        return _Reading.left
    loader = _Reading.open[-1]
    return f"batch {loader.batches_read} of epoch {loader.iteration}"


def where(operation: str, at: str) -> dict[str, Any]:
    """The mark of a process that waits in an operation."""
    place = {"total": batches_read(), "place": own_place(), "reading": is_reading()}
    return {"operation": operation, "at": at, **place}
