# SPDX-License-Identifier: Apache-2.0
"""Whether other ranks come to the point where rank 0 is or have gone past it: it saves alone what all ranks hold.

Rank 0 posts in the run's store how far it is. In each other rank the thread of the hang watch looks for such a
question a few times a second, and answers if its main thread is further. Nothing is on the path of a step.
"""

from __future__ import annotations

import contextlib
import json
import time
from typing import Any

from ..torch_internals.flight_recorder import newest, recorded
from . import marks
from .agreement import Agreement, Connection, default_connection, log_wait, next_subject, pauses
from .calls import LEDGER

# The number of questions; odd while one is open. The last question. How often a rank has begun to answer, and, by rank
# and that number, who does not answer any more.
_COUNT, _QUESTION = "accelerate/passing", "accelerate/passing/question"
_BEGUN, _SILENT = "accelerate/passing/begun", "accelerate/passing/silent"
# Seconds until rank 0 asks (the others may just be coming), until it looks for more, and until it logs its wait.
_ASK, _LOOK, _LOG = 0.02, 0.25, 5.0
# Reading the flight recorder takes up to 0.1 s: a rank spends this share of its time on it, and waits at most so long.
_SHARE, _PAUSE = 0.1, 1.0


def others_went_on(agreement: Agreement, subject: str, limit: float) -> bool:
    """Whether the other ranks do not come to the next exchange. Rank 0 calls it before it takes part.

    It is so only where one was seen to be past this point: in a later batch, in a collective that rank 0 has not
    begun, in a round about something else; or where rank 1 has left the run without an error. Until one has announced
    the exchange or has come to it, rank 0 looks for `limit` seconds.
    """
    if agreement.rank or agreement.world == 1:
        return False
    # The exchange reports a store that is gone.
    with contextlib.suppress(RuntimeError, ConnectionError):
        connection = default_connection()
        if next_subject(agreement.name, connection, range(1, agreement.world)) == subject:
            return False
        return _went_on(subject, agreement.name, connection, agreement.world, limit)
    return False


def _went_on(subject: str, name: str, connection: Connection, world: int, limit: float) -> bool:
    store = connection.store
    position: dict[str, Any] = {
        "subject": subject,
        "batch": marks.outer_batch(),
        "calls": LEDGER.count,
    }
    number = 0
    is_compared = is_logged = False
    try:
        for waited in pauses(2, limit):
            subject_of_others = next_subject(name, connection, range(1, world))
            if subject_of_others is not None:
                return subject_of_others != subject
            if number and store.check([f"{_COUNT}/{number}"]):
                return True
            if waited >= limit:
                return False
            run = store.add(f"{_BEGUN}/0", 0)
            if store.check([f"{_SILENT}/1/{run}"]):
                return all(cause["kind"] == marks.ENDED for cause in marks.entries(marks.CAUSES))
            if waited > _LOOK and marks.state_of(1, store):
                return False  # it is dead: the round reports it
            if waited > _ASK and not number:
                store.set(_QUESTION, json.dumps(position))
                number = int(store.add(_COUNT, 1))
            if waited > _LOOK and not is_compared:
                is_compared = True
                position["collectives"] = newest(recorded())
                store.set(_QUESTION, json.dumps(position))
            if waited > _LOG and not is_logged:
                is_logged = True
                log_wait(subject, 0, range(1, world), limit - waited)
    finally:
        if number:
            store.add(_COUNT, 1)
    return False


def begin_answers(rank: int) -> int:
    """Count a run whose questions a rank is going to answer; the number is the same on all ranks."""
    with marks.Tolerant():
        return int(marks.run_store().add(f"{_BEGUN}/{rank}", 1))
    return 0


class Answers:
    """The answers of one rank in a run, given by another thread than its main one.

    Args:
        store: a connection of that thread.
        rank: this rank.
        number: of the run, when several follow each other in one process group; see `begin_answers`.
    """

    def __init__(self, store: Any, rank: int, number: int) -> None:
        self._store = store
        self._silent = f"{_SILENT}/{rank}/{number}"
        self._next_reading = 0.0  # of the flight recorder

    def look(self) -> None:
        """Answer the open question, if there is one and the main thread is past its point."""
        number = int(self._store.add(_COUNT, 0))
        if number % 2 and self._is_past(json.loads(self._store.get(_QUESTION))):
            self._store.set(f"{_COUNT}/{number}", "")

    def _is_past(self, position: dict[str, Any]) -> bool:
        calls = LEDGER.count
        call = LEDGER.current()
        if call is not None and call.operation == position["subject"]:
            return False
        if calls > position["calls"]:
            return True
        batch = marks.outer_batch()
        batch_of_rank_0 = position["batch"]
        if batch and batch_of_rank_0 and batch > batch_of_rank_0:
            return True
        now = time.monotonic()
        if "collectives" not in position or now < self._next_reading:
            return False
        begun = newest(recorded())
        after = time.monotonic()
        self._next_reading = after + min((after - now) / _SHARE, _PAUSE)
        numbers = position["collectives"]
        return any(begun.get(group, 0) > last for group, last in numbers.items())

    def end(self) -> None:
        """There are no more answers: this rank leaves the run."""
        self._store.set(self._silent, "")
