# SPDX-License-Identifier: Apache-2.0
"""The largest batch size that fits into memory, on all ranks: where one is out of memory, all try a smaller one."""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from ..core.memory import clear_device_cache, should_reduce_batch_size
from ..runtime import group
from . import transport, verify

# Seconds: for which a rank that is out of memory waits for the others before it breaks off the collective that they
# may wait in; for which a rank waits at all; between two looks of the watcher.
GRACE = 5.0
LIMIT = 1800.0
WATCH = 0.25

FITS, MEMORY, BROKEN, FAILED = "fits", "memory", "broken", "failed"
RESTART, GO_ON = "restart", "go on"

# Attempts made with each default process group, by its store: ranks may have been in different groups before.
_attempts: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
) -> Callable[..., Any]:
    """Decorator: call the function with a smaller batch size each time that memory runs out, until it fits.

    The function takes the batch size as its first parameter and is called without it. In a run of several processes
    all call it, and all try the next size together when any of them is out of memory. Make what communicates
    (prepared models) inside the function: where an error left ranks waiting in a collective, the process group is
    made anew for the next attempt.

    Args:
        starting_batch_size: the first size to try.
        reduce_batch_size_fn: gives the next size; default: nine tenths of the last one, rounded down.

    Raises TypeError at the call where the batch size is passed too, RuntimeError when no size is left, or another
    rank has failed.

    ```
    @find_executable_batch_size(starting_batch_size=256)
    def train(batch_size, model): ...
    train(model)
    ```
    """
    if function is None:
        return functools.partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
        )
    batch_size = starting_batch_size
    smaller = reduce_batch_size_fn or (lambda: int(batch_size * 0.9))

    @functools.wraps(function)
    def search(*args: Any, **kwargs: Any) -> Any:
        nonlocal batch_size
        _check_arguments(function, args)
        clear_device_cache(garbage_collection=True)
        while batch_size > 0:
            try:
                outcome, result = _attempt(function, batch_size, args, kwargs)
                if outcome != FITS:
                    # The failed attempt's frames are gone here; so is what they held.
                    clear_device_cache(garbage_collection=True)
                if group.is_running() and dist.get_world_size() > 1:
                    outcome = _Agreement().settle(outcome, batch_size)
            finally:
                _count_attempt()
            if outcome == FITS:
                return result
            batch_size = smaller()
        raise RuntimeError("No executable batch size found, reached zero.")

    return search


def _check_arguments(function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """The batch size is ours to pass: one argument too many is most likely another one."""
    parameters = list(inspect.signature(function).parameters.values())
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        return
    if len(parameters) < len(args) + 1:
        name = getattr(function, "__name__", repr(function))
        given = ", ".join(f"{one.name}={value}" for one, value in zip(parameters[1:], args[1:], strict=False))
        raise TypeError(
            f"Batch size was passed into `{name}` as the first argument when called.\n"
            f"Remove this as the decorator already does so: `{name}({given})`"
        )


def _attempt(
    function: Callable[..., Any], batch_size: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[str, Any]:
    """What became of one call, and its result. An error that has nothing to do with memory is raised on."""
    try:
        with _woken():
            return FITS, function(batch_size, *args, **kwargs)
    except Exception as error:
        if should_reduce_batch_size(error):
            return MEMORY, None
        if group.is_running() and dist.get_world_size() > 1:
            agreement = _Agreement()
            if agreement.breaks_off():
                return BROKEN, None
            agreement.tell(FAILED, f"{type(error).__name__}: {error}")
        raise


@contextlib.contextmanager
def _woken() -> Iterator[None]:
    """Meanwhile, abort this rank's collectives when another rank has left them.

    gloo needs no help: its connections close. A kernel that waits for another device notices nothing by itself.
    """
    if not group.is_running() or dist.get_world_size() == 1 or "gloo" in dist.get_backend():
        yield
        return
    run: Any = _get_default_store()
    # The watcher has a connection of its own: a store's calls wait for each other.
    store = dist.PrefixStore(_prefix(run), run.clone())
    default, ended = transport.group_of(None), threading.Event()

    def watch() -> None:
        while not ended.wait(WATCH):
            if store.check(["plan"]):
                default.abort()
                return

    watcher = threading.Thread(target=watch, name="accelerate-batch-size", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()


def _prefix(store: Any) -> str:
    """Where the ranks of a default group write about the attempt under way."""
    return f"accelerate/batch_size/{_attempts.get(store, 0)}"


def _count_attempt() -> None:
    if group.is_running():
        store = _get_default_store()
        _attempts[store] = _attempts.get(store, 0) + 1


class _Agreement:
    """What an attempt came to on each rank, told through the run's store: ranks may be stuck in a collective."""

    def __init__(self) -> None:
        self.run = _get_default_store()
        self.store = dist.PrefixStore(_prefix(self.run), self.run)
        self.me, self.ranks = dist.get_rank(), range(dist.get_world_size())
        self.rejoin: Callable[[], None] | None = None

    def tell(self, outcome: str, text: str = "") -> None:
        self.store.set(str(self.me), json.dumps({"outcome": outcome, "text": text, "done": _collectives_done()}))

    def told(self) -> dict[int, dict[str, Any]]:
        present = [rank for rank in self.ranks if self.store.check([str(rank)])]
        return {rank: json.loads(self.store.get(str(rank))) for rank in present}

    def breaks_off(self) -> bool:
        """Whether an error here is the echo of another rank's that is out of memory and has left a collective."""
        return any(record["outcome"] == MEMORY for record in self.told().values())

    def settle(self, outcome: str, batch_size: int) -> str:
        """FITS when the batch size fits on every rank; MEMORY when all must try another."""
        self.tell(outcome)
        for waited in verify.pauses():
            records = self.told()
            self._check(records, waited, batch_size)
            if len(records) == len(self.ranks):
                break
            if outcome == MEMORY and self.rejoin is None and waited > GRACE and self._plan(RESTART) == RESTART:
                # Someone may be waiting for this rank in a collective, and has to be woken.
                self.rejoin = group.interrupt()
        outcomes = {record["outcome"] for record in records.values()}
        if outcomes == {FITS}:
            return FITS
        # Ranks that have not done the same collectives cannot go on with the group that these belong to.
        uneven = BROKEN in outcomes or len({record["done"] for record in records.values()}) > 1
        if self._plan(RESTART if uneven else GO_ON) == RESTART:
            (self.rejoin or group.interrupt())()
        return MEMORY

    def _plan(self, proposal: str) -> str:
        """What all do next: the first proposal made by any rank."""
        return str(self.store.compare_set("plan", "", proposal).decode())

    def _check(self, records: dict[int, dict[str, Any]], waited: float, batch_size: int) -> None:
        for rank, record in records.items():
            if record["outcome"] == FAILED:
                raise RuntimeError(f"rank {rank} has failed with batch size {batch_size}: {record['text']}")
        absent = [rank for rank in self.ranks if rank not in records]
        gone = verify.departed(self.run, absent)
        if gone or (absent and waited > LIMIT):
            raise RuntimeError(
                f"ranks {gone or absent} {'have ended' if gone else f'did not come within {LIMIT:g} s'} while rank "
                f"{self.me} waited to agree on batch size {batch_size}: every process must call the function"
            )


def _collectives_done() -> int | None:
    """How many collectives this rank has begun in the default group; None where its backend does not count."""
    if not group.is_running():
        return None
    default = transport.group_of(None)
    backend: Any = default._get_backend(transport.home(default))
    try:
        return int(backend._get_sequence_number_for_group())
    except RuntimeError:
        return None
