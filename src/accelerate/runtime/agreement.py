# SPDX-License-Identifier: Apache-2.0
"""How the ranks of a run agree on something: small values through the process group's store, with a time limit.

The store is used, not a collective. It works from a background thread, while another rank is in a collective or in
another call, and a rank that does not come is named instead of waited for.

It is made for a thousand ranks. A rank gives its value, and then looks for the outcome at intervals that grow with its
wait. The last rank that comes reduces the values to the outcome, which is small. If a rank does not come, the first
rank of the round decides at the limit; if that is missing too, the second one does.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch.distributed as dist

from ..core.errors import AccelerateError, CheckpointError, ConfigurationError
from ..core.objects import ranks_in_words, values_in_words
from . import marks

logger: logging.Logger = logging.getLogger(__name__)

# Seconds until a wait is logged.
_PATIENCE = 5.0
# Seconds until the first look for ranks that have ended (others may just be coming), and at most between two looks.
_GRACE, _ENDED_LOOK = 0.5, 10.0
# Seconds after the limit until the second rank decides where the first one has not, and until the others give up.
_SUCCESSION = 0.5
# Seconds between two looks for the outcome: at first for each rank of the round, since the store serves one after the
# other; later this share of the time waited; at most.
_FIRST_LOOK, _SHARE, _LONGEST = 5e-5, 0.1, 1.0

Reduce = Callable[[dict[int, Any]], Any]


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


@dataclass(frozen=True, slots=True)
class OneProcess:
    """A process that takes part in what it does alone."""

    process_index: int = 0
    num_processes: int = 1
    local_process_index: int = 0


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
    """What a round came to. It is the same on every rank that takes part, also on one that comes later.

    Fields:
        result: what the reduction has made of the values; None if ranks are absent, or one has refused.
        absent: the ranks that did not come, as "ranks 3, 5-7"; empty if all came.
        ended: those of `absent` whose process has left the run.
        refused: why a rank refused to take part, or why the values cannot be reduced; None if all is well.
        waited: the seconds after which the others stopped waiting.
    """

    result: Any = None
    absent: str = ""
    ended: str = ""
    refused: str | None = None
    waited: float = 0.0


class Round:
    """One round of an agreement: each rank gives a value, and the first outcome that a rank writes counts for all.

    Every rank makes the same rounds of one name in the same order.

    Args:
        name: what is agreed on, as part of a key.
        ranks: the ranks that take part, by default all.
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
        if connection is None:
            connection = default_connection()
        self.store: dist.Store = connection.store
        if ranks is None:
            ranks = range(dist.get_world_size())
        if rank is None:
            rank = dist.get_rank()
        self.ranks: Sequence[int] = ranks
        self.rank: int = rank
        self._name = name
        self.number: int = connection.rounds.get(name, 0)
        connection.rounds[name] = self.number + 1

    def key(self, what: object, back: int = 0) -> str:
        """The key of a rank's value, or of something else, in this round or one before."""
        return f"agree/{self._name}/{self.number - back}/{what}"

    def exchange(
        self,
        subject: str,
        value: object,
        timeout: float,
        reduce: Reduce | None = None,
        explain: Callable[[list[int], list[int]], Any] | None = None,
    ) -> Outcome:
        """Give a value (plain JSON data) and wait up to `timeout` seconds for those of all ranks.

        Args:
            subject: what is agreed on, for the log.
            value: this rank's value. `values` reads it on another rank until that one's next round.
            timeout: seconds.
            reduce: makes the result (small JSON data) of {rank: value}. Called on one rank, once all have come. Its
                error is the round's `refused`.
            explain: makes the result if ranks are absent, of these and of those that have ended. Called on one rank.

        Raises:
            StoreLostError: the store is gone.
        """
        try:
            came = self.put(value)
            for _ in self.waits(subject, timeout, reduce, explain, is_last=came == len(self.ranks)):
                pass
            return self.outcome()
        except (RuntimeError, ConnectionError) as error:
            raise StoreLostError(str(error)) from error

    def put(self, value: object) -> int:
        """Give this rank's value. Returns how many ranks have come."""
        self.store.set(self.key(self.rank), json.dumps(value))
        if self.number > 1:
            # Whoever has given a value in the round before this one has left the one before that.
            self.store.delete_key(self.key(self.rank, back=2))
        return int(self.store.add(self.key("came"), 1))

    def waits(
        self,
        subject: str,
        timeout: float,
        reduce: Reduce | None = None,
        explain: Callable[[list[int], list[int]], Any] | None = None,
        is_last: bool = False,
    ) -> Iterator[float]:
        """Yield the seconds waited until there is an outcome. This rank makes it where that is its part."""
        position = self.ranks.index(self.rank)
        limit = timeout + _SUCCESSION * min(position, 2)
        is_logged = False
        next_look = _GRACE
        for waited in pauses(len(self.ranks), limit):
            if self.store.check([self.key("outcome")]):
                return
            if is_last:
                self._conclude(reduce)
                return
            if position < 2 and not is_logged and waited > _PATIENCE:
                is_logged = True
                absent = self.absent()
                if absent and (position == 0 or self.ranks[0] in absent):
                    # The first rank reports it, or the second one if the first has not come.
                    log_wait(subject, self.rank, absent, timeout - waited)
            ended: list[int] = []
            absent = []
            if position < 2 and waited > next_look:
                next_look = min(2 * waited, waited + _ENDED_LOOK)
                absent = self.absent()
                ended = [rank for rank in absent if marks.has_ended(rank, self.store)]
            if ended or waited >= limit:
                if position > 1:
                    # Neither the first rank nor the second one has decided. Counting the others is not for each rank.
                    absent = self.absent(self.ranks[:2]) or list(self.ranks[:2])
                elif not ended:
                    absent = self.absent()
                if not absent:
                    self._conclude(reduce)
                    return
                outcome: dict[str, Any] = {"absent": ranks_in_words(absent), "waited": waited}
                if explain is not None:
                    outcome["result"] = explain(absent, ended)
                if ended:
                    outcome["ended"] = ranks_in_words(ended)
                self.settle(outcome)
                return
            yield waited

    def _conclude(self, reduce: Reduce | None) -> None:
        """Reduce the values of all ranks to an outcome."""
        outcome: dict[str, Any] = {}
        try:
            if reduce is not None:
                outcome["result"] = reduce(self.values(self.ranks))
        except dist.DistError:
            raise
        except Exception as error:
            # The other ranks wait for the outcome.
            text = str(error)
            if not isinstance(error, AccelerateError):
                text = f"{type(error).__name__}: {text}"
            outcome["refused"] = text
        self.settle(outcome)
        if self.number:
            # All ranks are in this round, so none looks at the one before.
            for name in ("outcome", "came", "announced"):
                self.store.delete_key(self.key(name, back=1))

    def settle(self, outcome: Mapping[str, Any]) -> None:
        """Write an outcome, in fields of `Outcome`. Nothing happens where there is one."""
        self.store.compare_set(self.key("outcome"), "", json.dumps(outcome))

    def outcome(self) -> Outcome:
        """The outcome. There must be one."""
        return Outcome(**json.loads(self.store.get(self.key("outcome"))))

    def values(self, ranks: Sequence[int]) -> dict[int, Any]:
        """The values of ranks that have come. Each one asked for is sent to this rank: ask for few, or on one rank."""
        keys = [self.key(rank) for rank in ranks]
        texts = self.store.multi_get(keys)
        values = map(json.loads, texts)
        return dict(zip(ranks, values, strict=True))

    def former_value(self, rank: int) -> Any:
        """What a rank that is not in this round yet gave in the one before; None where there is nothing."""
        key = self.key(rank, back=1)
        if self.store.check([key]):
            return json.loads(self.store.get(key))
        return None

    def absent(self, ranks: Sequence[int] | None = None) -> list[int]:
        """Those of `ranks` (by default, of all) that have not come, found by halves."""
        if ranks is None:
            ranks = self.ranks
        if self.store.check([self.key(rank) for rank in ranks]):
            return []
        if len(ranks) == 1:
            return list(ranks)
        middle = len(ranks) // 2
        return self.absent(ranks[:middle]) + self.absent(ranks[middle:])


def next_subject(name: str, connection: Connection, ranks: Sequence[int]) -> str | None:
    """What other ranks have come to the next round of a name for, or have announced; None if none has.

    Args:
        name: of the rounds. This rank is not in the next one yet.
        connection: that of this rank.
        ranks: the other ranks.
    """
    store = connection.store
    key = f"agree/{name}/{connection.rounds.get(name, 0)}"
    announced = f"{key}/announced"
    if store.check([announced]):
        return str(store.get(announced).decode())
    if not store.add(f"{key}/came", 0):
        return None
    for rank in ranks:
        if store.check([f"{key}/{rank}"]):
            row = json.loads(store.get(f"{key}/{rank}"))
            return str(row[0])
    return None


def log_wait(subject: str, rank: int, absent: Iterable[int], left: float) -> None:
    """Log for whom a rank waits."""
    logger.warning(
        "rank %d waits in `%s` for %s, up to %.0f s more",
        rank,
        subject,
        ranks_in_words(absent),
        left,
    )


def first(values: Mapping[int, Any]) -> Any:
    """A reduction: the value of the first rank."""
    return values[min(values)]


class RankErrors(CheckpointError):
    """The errors that ranks have given in an exchange, or that its reduction has raised. Every rank raises this.

    Fields:
        common: the text of the error that all ranks have; None where they differ.
        classes: the names of the classes of the errors.
    """

    def __init__(self, text: str, common: str | None, classes: Sequence[str]) -> None:
        super().__init__(text)
        self.common = common
        self.classes = classes


def error_text(error: BaseException) -> str:
    """An error for a message of several ranks: without its class where it is one of this package's own."""
    text = str(error) or type(error).__name__
    if isinstance(error, (CheckpointError, ConfigurationError)):
        return text
    return f"{type(error).__name__}: {text}"


def _joined(errors: Mapping[int, Sequence[str]], ranks: int) -> dict[str, Any]:
    """The fields of `RankErrors`, from the text and the class of each rank's error."""
    texts = {}
    classes = set()
    for rank, (text, name) in errors.items():
        texts[rank] = text
        classes.add(name)
    common = None
    if len(texts) == ranks and len(set(texts.values())) == 1:
        common = first(texts)
    return {"text": values_in_words(texts), "common": common, "classes": sorted(classes)}


class Agreement:
    """The ranks of one run, agreeing by name. Every rank has the same exchanges in the same order.

    One process agrees with itself, at no cost.
    """

    def __init__(self, process: Process, name: str = "checkpoint") -> None:
        self.rank: int = process.process_index
        self.world: int = process.num_processes
        self.name = name
        self._connection: Connection | None = None
        if self.world > 1:
            self._connection = default_connection()
        self._round: Round | None = None
        self._value: Any = None

    def _next(self) -> Round:
        return Round(self.name, range(self.world), self.rank, self._connection)

    def announce(self, subject: str) -> None:
        """Tell the other ranks that this one is going to take part in the next exchange, however long that takes."""
        if self._connection is not None:
            number = self._connection.rounds.get(self.name, 0)
            # The exchange reports a store that is gone.
            with contextlib.suppress(dist.DistError):
                self._connection.store.set(f"agree/{self.name}/{number}/announced", subject)

    def exchange(
        self,
        subject: str,
        value: object,
        timeout: float,
        absent: str = "",
        reduce: Reduce | None = None,
        error: BaseException | None = None,
    ) -> Any:
        """Give this rank's `value` (plain JSON data); return the same result on every rank, once all have come.

        Args:
            subject: what is being agreed on. It must be the same on all ranks.
            value: this rank's value.
            timeout: seconds to wait for the others.
            absent: what the absence of a rank may mean, for the message.
            reduce: makes the result of {rank: value}. One rank calls it, and all get what it returns, so this must be
                plain JSON data whose size does not grow with the number of ranks. Its error is raised on all ranks.
            error: of this rank, instead of a value.

        Raises:
            RankErrors: on every rank, where a rank has given an error, or `reduce` raises one.
            CheckpointError: on every rank that came, where one has not within `timeout`, has refused, or is in another
                exchange.
        """
        self._value = value
        cause = error

        def reduced(rows: dict[int, Any]) -> dict[str, Any]:
            nonlocal cause
            errors = {rank: row for rank, (_, _, row) in rows.items() if row is not None}
            if errors:
                return {"errors": _joined(errors, len(rows))}
            if reduce is None:
                return {}
            values = {rank: value for rank, (_, value, _) in rows.items()}
            try:
                return {"result": reduce(values)}
            except dist.DistError:
                raise
            except Exception as caught:
                cause = caught
                row = [error_text(caught), type(caught).__name__]
                return {"errors": _joined({self.rank: row}, len(rows))}

        def compared(rows: dict[int, Any]) -> dict[str, Any]:
            subjects = {rank: row[0] for rank, row in rows.items()}
            if set(subjects.values()) != {subject}:
                words = values_in_words(subjects)
                raise CheckpointError(
                    f"the ranks are doing different things at the same time: {words}"
                )
            return reduced(rows)

        row = [subject, value, None]
        if error is not None:
            row[2] = [error_text(error), type(error).__name__]
        if self._connection is None:
            result = reduced({self.rank: row})
        else:
            result = self._outcome(subject, row, timeout, absent, compared)
        if "errors" in result:
            raise RankErrors(**result["errors"]) from cause
        return result.get("result")

    def _outcome(
        self, subject: str, row: list[Any], timeout: float, absent: str, reduce: Reduce
    ) -> dict[str, Any]:
        """What the next round comes to. Raises CheckpointError where it has no result."""
        self._round = self._next()
        try:
            outcome = self._round.exchange(subject, row, timeout, reduce)
        except StoreLostError as error:
            raise CheckpointError(
                f"rank {self.rank}: the other ranks cannot be reached ({subject}): {error}. "
                "The process that hosts the store (rank 0, or the launcher) may have ended."
            ) from error
        if outcome.refused is not None:
            raise CheckpointError(outcome.refused)
        if outcome.absent:
            missing = outcome.absent
            why = f" within {outcome.waited:.0f} s"
            if outcome.ended:
                missing = outcome.ended
                why = " and has ended"
                if missing.startswith("ranks"):
                    why = " and have ended"
            raise CheckpointError(
                f"rank {self.rank}: {missing} did not reach `{subject}`{why}. {absent}".rstrip()
            )
        result: dict[str, Any] = outcome.result
        return result

    def values(self, ranks: Sequence[int]) -> dict[int, Any]:
        """The values that `ranks` have given in the last exchange, to be read before the next one.

        They are sent to the rank that calls this: for the one that needs all of them, and for a few elsewhere.
        """
        if self._round is None:
            return {self.rank: self._value}
        return {rank: row[1] for rank, row in self._round.values(ranks).items()}

    def refuse(self, text: str) -> None:
        """Leave an error as the outcome of the next exchange, in which this rank takes no part: the others raise it.

        For a rank that has failed where others may wait for it in a collective: it must not wait for them in turn.
        """
        if self._connection is None:
            return
        try:
            self._next().settle({"refused": text})
        except dist.DistError as error:
            logger.warning(
                "rank %d: the other ranks cannot be reached to report an error: %s",
                self.rank,
                error,
            )


# By the group. A store must not be kept: rank 0's hosts the server, and the next group needs a new one.
_CONNECTIONS: weakref.WeakKeyDictionary[dist.ProcessGroup, Connection] = weakref.WeakKeyDictionary()
# The hang watch connects in its own thread. Two connections would count the rounds of this rank twice.
_CONNECTING = threading.Lock()


def default_connection() -> Connection:
    """A separate connection to the store of the default group, so that no wait inside torch delays a round.

    Made once a group: connecting takes milliseconds, or seconds where the server is busy. Threads share it: each of
    our operations is short.
    """
    group = dist.group.WORLD
    if group is None:
        raise ValueError("the default process group is not initialized")
    with _CONNECTING:
        if group not in _CONNECTIONS:
            # The stubs of a store lack `clone`.
            store: Any = group.get_group_store()
            _CONNECTIONS[group] = Connection(store.clone())
        return _CONNECTIONS[group]


def pauses(ranks: int = 2, limit: float = math.inf) -> Iterator[float]:
    """The seconds waited so far, with a sleep in between that grows with them; one sleep ends at `limit`.

    `ranks` is the number of ranks that wait at the same time. A store's own `wait` with a time limit writes a warning
    each time that the limit passes, and holds up signals.
    """
    begin = time.monotonic()
    while True:
        waited = time.monotonic() - begin
        yield waited
        pause = min(max(_FIRST_LOOK * ranks, _SHARE * waited), _LONGEST)
        time.sleep(min(pause, limit - waited) if waited < limit else pause)
