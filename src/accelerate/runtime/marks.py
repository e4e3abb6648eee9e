# SPDX-License-Identifier: Apache-2.0
"""What each rank leaves in the run's store for the others to read when a collective fails: how it ended, where it is.

The reasons why others fail (a rank has ended, has failed, was killed) are in one list, whose first entries every rank
reads; ranks that have lost a connection are in another one. So a rank reads as much in a run of a thousand ranks as in
one of eight. Nothing here is on the path of a step. A store that is gone is no error here: there is nothing to read.
"""

from __future__ import annotations

import contextlib
import json
import os
from typing import Any, ClassVar

import torch.distributed as dist

from ..core.system import is_stopped, machine_identity, process_start

# The lists, and the kinds of causes.
CAUSES, LOST = "causes", "lost"
ENDED, FAILED, KILLED = "ended", "failed", "killed"
# Entries of a list that a rank reads.
LISTED = 8
HAS_ENDED = "has ended"
WAS_KILLED = "was killed (out of memory?) or crashed: its process is gone"


class _Mine:
    """What this process has left in the store of its group, and what it has read from prepared loaders."""

    # torch logs the frames of each further call on a connection that is lost
    lost_store: Any = None
    has_failed = is_done = False
    passes: ClassVar[list[Any]] = []  # the loaders whose pass is under way, the innermost last
    total = 0
    # Where the last pass was left, in words; None if it was read to its end. And how it ended.
    left: str | None = None
    last_pass: str | None = None


class Tolerant(contextlib.AbstractContextManager[None]):
    """A block that uses the run's store; it ends where the store is gone, or there is none."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> bool:
        """Note that the store is gone."""
        if isinstance(error, dist.DistNetworkError) and dist.group.WORLD is not None:
            _Mine.lost_store = dist.group.WORLD.get_group_store()
        return isinstance(error, (RuntimeError, ValueError))


def run_store() -> Any:
    """The run's store. Raises RuntimeError where it is gone, ValueError where there is no group."""
    if dist.group.WORLD is None:
        raise ValueError("the default process group is not initialized")
    store = dist.group.WORLD.get_group_store()
    if store is _Mine.lost_store:
        raise RuntimeError("the store of the run is gone")
    return store


def start() -> None:
    """Begin in the store of a new group: this rank's process, for the other ranks of its machine."""
    _Mine.has_failed = _Mine.is_done = False
    started = process_start(os.getpid())
    if started is not None:
        with Tolerant():
            machine = machine_identity()
            rank = dist.get_rank()
            process = json.dumps([machine, os.getpid(), started])
            run_store().set(f"accelerate/process/{rank}", process)
            run_store().append(f"accelerate/machine/{machine}", f"{rank} ")


def post(name: str, kind: str, rank: int | None = None, **facts: Any) -> None:
    """Add an entry to a list: what has become of a rank, by default of this one, with what it has read."""
    if rank is None:
        if kind != ENDED:
            _Mine.has_failed = True
        facts["total"] = batches_read()
        facts["place"] = own_place()
        facts["last_pass"] = _Mine.last_pass
    with Tolerant():
        store = run_store()
        if rank is None:
            rank = dist.get_rank()
        number = store.add(f"accelerate/{name}/begun", 1)
        entry = {"kind": kind, "rank": rank, **facts}
        store.set(f"accelerate/{name}/{number}", json.dumps(entry))
        # Whoever sees that it counts can read it.
        store.add(f"accelerate/{name}", 1)


def count(name: str) -> int:
    """The number of entries of a list."""
    return int(run_store().add(f"accelerate/{name}", 0))


def entries(name: str, most: int = LISTED) -> list[dict[str, Any]]:
    """The first entries of a list."""
    store = run_store()
    number = min(count(f"{name}/begun"), most)
    posted = []
    for index in range(1, number + 1):
        key = f"accelerate/{name}/{index}"
        if store.check([key]):
            posted.append(json.loads(store.get(key)))
    return posted


def neighbours() -> dict[int, Any]:
    """The processes of the ranks of this machine; empty where they are not known."""
    store = run_store()
    key = f"accelerate/machine/{machine_identity()}"
    if not store.check([key]):
        return {}
    processes = {}
    for rank in store.get(key).decode().split():
        processes[int(rank)] = json.loads(store.get(f"accelerate/process/{rank}"))
    return processes


def post_killed(processes: dict[int, Any]) -> None:
    """Add the ranks of `neighbours` whose process is gone, without a word, to the causes."""
    store = run_store()
    for rank, process in processes.items():
        if not _is_gone(process) or store.check([f"accelerate/left/{rank}"]):
            continue
        is_first_to_see = store.add(f"accelerate/killed/{rank}", 1) == 1
        if is_first_to_see:
            post(CAUSES, KILLED, rank)


def _is_gone(process: Any) -> bool:
    machine, pid, started = process
    return bool(machine == machine_identity() and process_start(pid) != started)


def state_of(rank: int, store: Any) -> str:
    """Why a rank does not come or answer, as "has ended"; empty where it is not known, as of other machines."""
    if store.check([f"accelerate/left/{rank}"]):
        return HAS_ENDED
    key = f"accelerate/process/{rank}"
    if store.check([key]):
        process = json.loads(store.get(key))
        if _is_gone(process):
            return WAS_KILLED
        if process[0] == machine_identity() and is_stopped(process[1]):
            return f"is stopped (process {process[1]}): SIGSTOP, or a debugger"
    return ""


def has_ended(rank: int, store: Any) -> bool:
    """Whether the process of a rank is known to be gone. One that is stopped may go on."""
    state = state_of(rank, store)
    return bool(state) and not state.startswith("is stopped")


def leave() -> None:
    """Leave the run: this process has come to its end."""
    with Tolerant():
        if not _Mine.has_failed:
            post(CAUSES, ENDED)
        run_store().set(f"accelerate/left/{dist.get_rank()}", "")
        done()


def done() -> None:
    """This rank needs the store no longer: whoever hosts it may go."""
    if not _Mine.is_done and dist.get_rank():
        _Mine.is_done = True
        with Tolerant():
            run_store().add("accelerate/done", 1)


def has_failed() -> bool:
    """Whether this rank has posted a failure of its own, or a connection that it has lost."""
    return _Mine.has_failed


def is_first(subject: str) -> bool:
    """Whether no other rank of this machine has called this for a subject: one of them reports for all."""
    with Tolerant():
        return bool(run_store().add(f"accelerate/first/{machine_identity()}/{subject}", 1) == 1)
    return True


def begin_pass(loader: object) -> None:
    """A pass over a prepared loader begins. Its `batches_read` counts."""
    _Mine.passes.append(loader)


def end_pass(loader: Any, epoch: int, complete: bool) -> None:
    """A pass has ended, `complete` or left before."""
    if loader in _Mine.passes:
        _Mine.passes.remove(loader)
    number = loader.batches_read
    _Mine.total += number
    _Mine.left = None
    how = "its loader ended"
    if not complete:
        _Mine.left = f"batch {number} of epoch {epoch}"
        how = "it left the loop over its loader in"
    plural = "es" * (number != 1)
    _Mine.last_pass = f"{how} epoch {epoch} after {number} batch{plural}"


def batches_read() -> int:
    """Batches that this process has read from prepared loaders in all."""
    total: int = _Mine.total + sum(loader.batches_read for loader in _Mine.passes)
    return total


def own_place() -> str | None:
    """Where this process is in its data, or where an error or `break` left it; None after a complete pass."""
    if not _Mine.passes:
        return _Mine.left
    loader = _Mine.passes[-1]
    return f"batch {loader.batches_read} of epoch {loader.iteration}"


def outer_batch() -> list[int] | None:
    """The epoch and batch of the outermost pass under way, to compare with other ranks; None outside of passes."""
    if _Mine.passes:
        return [_Mine.passes[0].iteration, _Mine.passes[0].batches_read]
    return None
