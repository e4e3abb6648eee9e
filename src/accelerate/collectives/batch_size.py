# SPDX-License-Identifier: Apache-2.0
"""The largest batch size that fits into memory, on all ranks: where one is out of memory, all try a smaller one."""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist

from ..core.devices import clear_device_cache, report_exhausted, should_reduce_batch_size
from ..runtime import group
from ..runtime.agreement import Round
from ..torch_internals.flight_recorder import newest, recorded
from . import transport

# Seconds: for which a rank that is out of memory waits for the others before it interrupts the collective that they
# may wait in; for which a rank waits at all; between two looks of the watcher.
GRACE = 5.0
LIMIT = 1800.0
WATCH = 0.25

FITS, MEMORY, BROKEN = "fits", "memory", "broken"
RESTART, CONTINUE = "restart", "continue"


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
) -> Callable[..., Any]:
    """Call the decorated function with a smaller batch size each time memory runs out, until it fits.

    The function takes the batch size as its first parameter and is called without it. In a run of several
    processes, all processes call it, and all try the next size together when any of them runs out of memory. Create
    objects that communicate (prepared models) inside the function: if an error left ranks waiting in a collective, the
    process group is recreated for the next attempt.

    Args:
        function: the function, if the decorator is used without arguments.
        starting_batch_size: the first size to try.
        reduce_batch_size_fn: returns the next size. Default: nine tenths of the last one, rounded down.

    Returns:
        The function without its first parameter. It raises TypeError if the batch size is also passed, and
        RuntimeError when no size is left or another rank failed.

    Example:
        @find_executable_batch_size(starting_batch_size=256)
        def train(batch_size, model): ...

        train(model)
    """
    if function is None:
        return functools.partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
        )
    if not callable(function):
        raise TypeError(
            f"find_executable_batch_size takes a function, not {function!r}: pass "
            "starting_batch_size by name"
        )
    batch_size = starting_batch_size
    smaller = reduce_batch_size_fn or (lambda: int(batch_size * 0.9))

    @functools.wraps(function)
    def search(*args: object, **kwargs: object) -> Any:
        nonlocal batch_size
        _check_arguments(function, args)
        tried = set()
        clear_device_cache(garbage_collection=True)
        while batch_size > 0:
            fits, result = _Attempt(batch_size).run(function, args, kwargs)
            if fits:
                return result
            tried.add(batch_size)
            batch_size = smaller()
            if batch_size in tried:
                raise RuntimeError(
                    f"No executable batch size found: memory ran out with {batch_size}, and "
                    "reduce_batch_size_fn returned that size again. It must return a smaller "
                    "size each time"
                )
        raise RuntimeError("No executable batch size found, reached zero.")

    return search


def _check_arguments(function: Callable[..., Any], args: tuple[object, ...]) -> None:
    """Raise TypeError where the caller has most likely passed a batch size too: one argument too many."""
    parameters = list(inspect.signature(function).parameters.values())
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        return
    if len(parameters) < len(args) + 1:
        name = getattr(function, "__name__", repr(function))
        arguments = []
        for parameter, value in zip(parameters[1:], args[1:], strict=False):
            arguments.append(f"{parameter.name}={value}")
        raise TypeError(
            f"Batch size was passed into `{name}` as the first argument when called.\n"
            f"Remove this as the decorator already does so: `{name}({', '.join(arguments)})`"
        )


class _Attempt:
    """A call of the function with one batch size, on all ranks.

    The ranks exchange how it ended through the store, since some of them may be stuck in a collective.
    """

    def __init__(self, batch_size: int) -> None:
        self.batch_size = batch_size
        self._started: Round | None = None

    def _round(self) -> Round | None:
        """The round of this attempt; None for one process. The function itself may start the process group."""
        if self._started is None and group.is_running() and dist.get_world_size() > 1:
            self._started = Round("batch_size")
        return self._started

    def run(
        self,
        function: Callable[..., Any],
        args: tuple[object, ...],
        kwargs: dict[str, Any],
    ) -> tuple[bool, Any]:
        """Whether the batch size fits on every rank, and the result on this one."""
        ended, result = self._call(function, args, kwargs)
        if ended != FITS:
            # The frames of the failed call are gone here, and so are the tensors that they referenced.
            clear_device_cache(garbage_collection=True)
        turn = self._round()
        if turn is not None:
            ended = self._agree(turn, ended)
        return ended == FITS, result

    def _call(
        self,
        function: Callable[..., Any],
        args: tuple[object, ...],
        kwargs: dict[str, Any],
    ) -> tuple[str, Any]:
        try:
            with _aborted_on_restart(self._round()):
                return FITS, function(self.batch_size, *args, **kwargs)
        except Exception as error:
            turn = self._round()
            if should_reduce_batch_size(error):
                report_exhausted(error)
                if turn is not None:
                    turn.store.set(turn.key(MEMORY), "")
                return MEMORY, None
            if turn is not None:
                if turn.store.check([turn.key(MEMORY)]):
                    # This rank's error follows from another one's, which has left a collective.
                    return BROKEN, None
                text = (
                    f"rank {turn.rank} has failed with batch size {self.batch_size}: "
                    f"{type(error).__name__}: {error}"
                )
                turn.settle({"refused": text})
            raise

    def _agree(self, turn: Round, ended: str) -> str:
        """FITS when the batch size fits on every rank; MEMORY when all must try another."""

        def plan(endings: dict[int, list[Any]]) -> str:
            how = {ending for ending, _ in endings.values()}
            if how == {FITS}:
                return FITS
            collectives = {done for _, done in endings.values()}
            # Ranks that have not done the same collectives cannot continue with the group that these belong to.
            if BROKEN in how or len(collectives) > 1:
                return _propose(turn, RESTART)
            return _propose(turn, CONTINUE)

        rejoin: Callable[[], None] | None = None
        arrived = turn.put([ended, _collectives_done()])
        is_last = arrived == len(turn.ranks)
        for waited in turn.waits("find_executable_batch_size", LIMIT, plan, is_last=is_last):
            if ended != MEMORY or rejoin is not None or waited <= GRACE:
                continue
            # Another rank may be waiting for this one in a collective, which has to be interrupted.
            if _propose(turn, RESTART) == RESTART:
                rejoin = group.interrupt()
        outcome = turn.outcome()
        if outcome.refused is not None:
            raise RuntimeError(outcome.refused)
        if outcome.absent:
            absence = f"did not arrive within {LIMIT:g} s"
            if outcome.ended:
                absence = "ended"
            raise RuntimeError(
                f"{outcome.absent} {absence} while rank {turn.rank} waited to agree on batch size "
                f"{self.batch_size}: every process must call the function"
            )
        if outcome.result == RESTART:
            if rejoin is None:
                rejoin = group.interrupt()
            rejoin()
        if outcome.result == FITS:
            return FITS
        return MEMORY


def _propose(turn: Round, plan: str) -> str:
    """What all do next: the first plan that any rank proposes."""
    first = turn.store.compare_set(turn.key("plan"), "", plan)
    return str(first.decode())


@contextlib.contextmanager
def _aborted_on_restart(turn: Round | None) -> Iterator[None]:
    """In the block, abort this rank's collectives when the ranks restart the group.

    gloo needs no help: its connections close. A kernel that waits for another device notices nothing by itself.
    """
    if turn is None or dist.get_backend() == "gloo":
        yield
        return
    default = transport.group_of(None)
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(WATCH):
            if turn.store.check([turn.key("plan")]):
                default.abort()
                return

    watcher = threading.Thread(target=watch, name="accelerate-batch-size", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()


def _collectives_done() -> int | None:
    """How many collectives this rank has begun in the default group; None where torch does not record them."""
    if not group.is_running():
        return None
    default = transport.group_of(None)
    counts = newest(recorded())
    return counts.get(f"{default.group_name}/{default.group_desc}")
