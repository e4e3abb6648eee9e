# SPDX-License-Identifier: Apache-2.0
"""How the ranks of a run agree on something: small values through the process group's store, with a time limit.

The store is used, not a collective. It works from a background thread, while another rank is in a collective or in
another call, and a rank that does not come is named instead of waited for.
"""

from __future__ import annotations

import json
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch.distributed as dist

from ..core.errors import CheckpointError
from . import marks
from .calls import ranks_in_words

logger: logging.Logger = logging.getLogger(__name__)

# Seconds: until a wait is logged; until another rank decides where the first one has not come; until the first look
# for ranks that have ended.
_PATIENCE = 5.0
_STAND_IN = 0.5
_FIRST_LOOK = 0.5


class Process(Protocol):
    """Who this process is. A `PartialState` is one."""

    @property
    def process_index(self) -> int:
        """The global rank."""

    @property
    def num_processes(self) -> int:
        """The number of processes of the run."""

    @property
    def local_process_index(self) -> int:
        """The rank on this machine."""


class StoreLostError(RuntimeError):
    """The store of the run cannot be reached: the process that hosts it (rank 0, or the launcher) has ended."""


@dataclass(slots=True)
class Connection:
    """A connection to the store of one default process group, and how many rounds of each name it has had.

    The rounds start anew with each group: two of its ranks may not have been in the same groups before.
    """

    store: dist.Store
    rounds: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an exchange came to. It is the same on every rank that takes part, also on one that comes later.

    Fields:
        values: the values of the ranks that came, by rank.
        absent: the ranks that did not come.
        ended: those of `absent` whose process has ended.
        refused: why a rank refused to take part; None where none did.
        waited: the seconds after which the others stopped waiting for `absent`.
    """

    values: dict[int, Any]
    absent: list[int] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)
    refused: str | None = None
    waited: float = 0.0


class Round:
    """One round of an agreement: each rank puts a value, and the first outcome that a rank writes counts for all.

    Every rank makes the same rounds of one name in the same order.

    Args:
        name: what is agreed on, as part of a key.
        ranks: the ranks that take part, by default all. The first of them decides.
        rank: this process's rank.
        connection: by default that of the default process group.
    """

    def __init__(
        self,
        name: str,
        ranks: Sequence[int] | None = None,
        rank: int | None = None,
        connection: Connection | None = None,
    ) -> None:
        connection = default_connection() if connection is None else connection
        self.store: dist.Store = connection.store
        self.ranks: range | Sequence[int] = range(dist.get_world_size()) if ranks is None else ranks
        self.rank: int = dist.get_rank() if rank is None else rank
        self._name = name
        self.number: int = connection.rounds.get(name, 0)
        connection.rounds[name] = self.number + 1

    def key(self, what: object, back: int = 0) -> str:
        """The key of a rank's value, or of something else, in this round or one before."""
        return f"accelerate/{self._name}/{self.number - back}/{what}"

    def exchange(self, subject: str, value: object, timeout: float) -> Outcome:
        """Wait up to `timeout` seconds for the values (plain JSON data) of all ranks.

        Raises StoreLostError where the store is gone.
        """

        def judge(waited: float) -> Any:
            if self.is_complete():
                return {"values": list(self.values().items())}
            absent = self.absent() if waited > min(timeout, _FIRST_LOOK) else []
            ended = self.ended(absent)
            if not ended and waited <= timeout:
                return None
            return {"values": list(self.values().items()), "absent": absent, "ended": ended, "waited": waited}

        found = self.decide(subject, value, timeout, judge)
        return Outcome(**{**found, "values": dict(found.get("values", []))})

    def decide(self, subject: str, value: object, timeout: float, judge: Callable[[float], Any]) -> Any:
        """Put this rank's value and return the outcome of the round.

        `judge` takes the seconds waited so far and returns an outcome (plain JSON data), or None as long as there is
        none. The first rank calls it. The others do where that rank has not come, or does not decide in time.
        """
        first, logged = self.ranks[0], False
        try:
            self.put(value)
            for waited in pauses():
                if self.store.check([self.key("outcome")]):
                    return json.loads(self.store.get(self.key("outcome")))
                stands_in = waited > 2 * timeout or (waited > _STAND_IN and not self.store.check([self.key(first)]))
                if (self.rank == first or stands_in) and (found := judge(waited)) is not None:
                    return self.fix(found)
                if waited > _PATIENCE and not logged:
                    logged = True
                    logger.warning(
                        "rank %d waits in `%s` for %s, up to %.0f s more",
                        self.rank, subject, ranks_in_words(self.absent() or [first]), max(0.0, timeout - waited),
                    )  # fmt: skip
        except (RuntimeError, ConnectionError) as error:
            raise StoreLostError(str(error)) from error
        raise AssertionError("unreachable")

    def put(self, value: object) -> None:
        """Give this rank's value."""
        self.store.set(self.key(self.rank), json.dumps(value))
        if self.number > 1:
            # Whoever has given a value in the round before this one has left the one before that.
            self.store.delete_key(self.key(self.rank, back=2))

    def fix(self, outcome: object) -> Any:
        """Write an outcome. Returns the valid one: this one, or an earlier one of another rank."""
        fixed = json.loads(self.store.compare_set(self.key("outcome"), "", json.dumps(outcome)))
        if self.number and self.rank == self.ranks[0] and self.is_complete():
            self.store.delete_key(self.key("outcome", back=1))
        return fixed

    def is_complete(self) -> bool:
        """Whether all ranks have come."""
        return bool(self.store.check([self.key(rank) for rank in self.ranks]))

    def values(self) -> dict[int, Any]:
        """The values of the ranks that have come."""
        present = self.ranks
        if not self.is_complete():
            present = [rank for rank in self.ranks if self.store.check([self.key(rank)])]
        if not present:
            return {}
        found = self.store.multi_get([self.key(rank) for rank in present])
        return {rank: json.loads(value) for rank, value in zip(present, found, strict=True)}

    def former_value(self, rank: int) -> Any:
        """What a rank that is not in this round yet gave in the one before; None where there is nothing."""
        key = self.key(rank, back=1)
        return json.loads(self.store.get(key)) if self.store.check([key]) else None

    def absent(self) -> list[int]:
        """The ranks that have not come."""
        return [rank for rank in self.ranks if not self.store.check([self.key(rank)])]

    def ended(self, ranks: Sequence[int]) -> list[int]:
        """Those of `ranks` whose process has left the run, as the store has it, or was killed on this machine."""
        return [rank for rank in ranks if self.store.check([f"accelerate/{marks.LEFT}/{rank}"]) or self._is_gone(rank)]

    def _is_gone(self, rank: int) -> bool:
        key = f"accelerate/{marks.PROCESS}/{rank}"
        return self.store.check([key]) and marks.is_gone(json.loads(self.store.get(key)))


class Agreement:
    """The ranks of one run, agreeing by name. Every rank has the same exchanges in the same order.

    One process agrees with itself, at no cost.
    """

    def __init__(self, process: Process, name: str = "checkpoint") -> None:
        self.rank: int = process.process_index
        self.world: int = process.num_processes
        self.name = name
        self._connection = default_connection() if self.world > 1 else None

    def _round(self) -> Round:
        return Round(self.name, range(self.world), self.rank, self._connection)

    def exchange(self, subject: str, value: object, timeout: float, absent: str = "") -> list[Any]:
        """Every rank's `value` (plain JSON data), in rank order, once all have come.

        Args:
            subject: what is being agreed on. It must be the same on all ranks.
            value: this rank's value.
            timeout: seconds to wait for the others.
            absent: what the absence of a rank may mean, for the message.

        Raises:
            CheckpointError: on every rank that came, where one has not within `timeout` or has refused.
        """
        if self._connection is None:
            return [value]
        try:
            outcome = self._round().exchange(subject, {"subject": subject, "value": value}, timeout)
        except StoreLostError as error:
            raise CheckpointError(
                f"rank {self.rank}: the other ranks cannot be reached ({subject}): {error}. "
                "The process that keeps the store (rank 0, or the launcher) may have ended."
            ) from error
        if outcome.refused is not None:
            raise CheckpointError(outcome.refused)
        if outcome.absent:
            ranks = ranks_in_words(outcome.ended or outcome.absent)
            why = " and has ended" if outcome.ended else f" within {outcome.waited:.0f} s"
            raise CheckpointError(f"rank {self.rank}: {ranks} did not come to `{subject}`{why}. {absent}".rstrip())
        rows = outcome.values.values()
        if len({row["subject"] for row in rows}) > 1:
            calls = "; ".join(f"rank {rank}: {row['subject']}" for rank, row in outcome.values.items())
            raise CheckpointError(f"the ranks do different things at the same time: {calls}")
        return [row["value"] for row in rows]

    def refuse(self, text: str) -> None:
        """Leave an error as the outcome of the next exchange, in which this rank takes no part: the others raise it.

        For a rank that has failed where others may wait for it in a collective: it must not wait for them in turn.
        """
        if self._connection is None:
            return
        try:
            self._round().fix({"refused": text})
        except dist.DistError as error:
            logger.warning("rank %d: the other ranks cannot be reached to report an error: %s", self.rank, error)


# By the group's own store, which must not be kept: rank 0's hosts the server, and the next group needs a new one.
_CONNECTIONS: weakref.WeakKeyDictionary[dist.Store, Connection] = weakref.WeakKeyDictionary()
# The hang watch connects in its own thread. Two connections would count the rounds of this rank twice.
_CONNECTING = threading.Lock()


def default_connection() -> Connection:
    """A separate connection to the store of the default group, so that no wait inside torch delays a round.

    Made once a group: connecting takes milliseconds, and every now and then five seconds (torch 2.13 tries again
    after that time where the first try met a busy server). Threads share it: each of our operations is short.
    """
    default: Any = dist.distributed_c10d._get_default_store()
    with _CONNECTING:
        if default not in _CONNECTIONS:
            _CONNECTIONS[default] = Connection(default.clone())
        return _CONNECTIONS[default]


def pauses() -> Iterator[float]:
    """The seconds waited so far, with a sleep in between that grows to 10 ms.

    A store's own `wait` with a time limit writes a warning each time that the limit passes.
    """
    begin, pause = time.monotonic(), 5e-5
    while True:
        yield time.monotonic() - begin
        time.sleep(pause)
        pause = min(1.5 * pause, 0.01)
