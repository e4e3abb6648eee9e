# SPDX-License-Identifier: Apache-2.0
"""How the ranks of a run agree on a save: small messages through the process group's store, with a time limit.

The store is used, not a collective: it needs no lock step with the training's own messages, so it works from a
background thread, and a rank that never comes is found and named instead of waited for.
"""

from __future__ import annotations

import json
import logging
import time
import weakref
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch.distributed as dist

from ..core.errors import CheckpointError

logger = logging.getLogger(__name__)

_PATIENCE = 5.0  # seconds until a wait is worth a line


class Process(Protocol):
    """Who this process is. A `PartialState` is one."""

    @property
    def process_index(self) -> int: ...
    @property
    def num_processes(self) -> int: ...
    @property
    def local_process_index(self) -> int: ...


class Agreement:
    """The ranks of one run, agreeing by name. Every rank holds the same rounds in the same order.

    One process agrees with itself, at no cost.
    """

    def __init__(self, process: Process, name: str = "checkpoint") -> None:
        self.rank = process.process_index
        self.world = process.num_processes
        self.name = name
        self._link: _Link | None = _link() if self.world > 1 else None
        self.store: Any = None if self._link is None else self._link.store

    def exchange(self, subject: str, value: Any, timeout: float, absent: str = "") -> list[Any]:
        """Every rank's `value` (plain JSON data), in rank order, once all have come.

        `subject` says what is being agreed on; it must be the same on all ranks. Raises CheckpointError on every rank
        that came when one has not within `timeout` seconds; `absent` says what that may mean.
        """
        if self.store is None:
            return [value]
        number = self._next_round()
        try:
            verdict = self._hold(f"accelerate/{self.name}/{number}", subject, value, timeout)
        except CheckpointError:
            raise
        except (dist.DistError, RuntimeError) as error:
            raise CheckpointError(
                f"rank {self.rank}: the other ranks cannot be reached ({subject}): {error}. "
                "The process that keeps the store (rank 0, or the launcher) may have ended."
            ) from error
        if "refused" in verdict:
            raise CheckpointError(verdict["refused"])
        if "missing" in verdict:
            raise CheckpointError(
                f"rank {self.rank}: {_ranks(verdict['missing'])} did not come to `{subject}` within "
                f"{verdict['waited']:.0f} s. {absent}".rstrip()
            )
        subjects = {row["subject"] for row in verdict["rows"]}
        if len(subjects) > 1:
            told = "; ".join(f"rank {rank}: {row['subject']}" for rank, row in enumerate(verdict["rows"]))
            raise CheckpointError(f"the ranks do different things at the same time: {told}")
        return [row["value"] for row in verdict["rows"]]

    def refuse(self, text: str) -> None:
        """Leave an error as the outcome of the next round, in which this rank takes no part: the others raise it.

        For a rank that has failed where others may wait for it in a collective: it must not wait for them in turn.
        """
        if self.store is None:
            return
        refused = {"refused": text}
        try:
            self.store.compare_set(f"accelerate/{self.name}/{self._next_round()}/verdict", "", json.dumps(refused))
        except (dist.DistError, RuntimeError) as error:
            logger.warning("rank %d: the other ranks cannot be told of an error: %s", self.rank, error)

    def _next_round(self) -> int:
        assert self._link is not None
        number = self._link.rounds.get(self.name, 0)
        self._link.rounds[self.name] = number + 1
        return number

    def _hold(self, base: str, subject: str, value: Any, timeout: float) -> Any:
        assert self.store is not None
        self.store.set(f"{base}/{self.rank}", json.dumps({"subject": subject, "value": value}))
        if self.rank == 0:
            return self._collect_values(base, subject, timeout)
        # Rank 0 may have come later, and waits its own full time for the others.
        for attempt in (1, 2):
            if self._wait([f"{base}/verdict"], timeout, base, subject):
                return json.loads(self.store.get(f"{base}/verdict"))
            if attempt == 1 and not self.store.check([f"{base}/0"]):
                break
        # Whoever comes later finds this and gives up too, so that no rank goes on alone.
        given_up = {"missing": self._missing(base), "waited": timeout}
        self.store.compare_set(f"{base}/verdict", "", json.dumps(given_up))
        return json.loads(self.store.get(f"{base}/verdict"))

    def _collect_values(self, base: str, subject: str, timeout: float) -> Any:
        assert self.store is not None
        keys = [f"{base}/{rank}" for rank in range(self.world)]
        if self.store.check([f"{base}/verdict"]):
            return json.loads(self.store.get(f"{base}/verdict"))
        arrived = self._wait(keys, timeout, base, subject, f"{base}/verdict")
        if self.store.check([f"{base}/verdict"]):
            return json.loads(self.store.get(f"{base}/verdict"))
        if arrived:
            verdict: dict[str, Any] = {"rows": [json.loads(row) for row in self.store.multi_get(keys)]}
            self._forget(base)
        else:
            verdict = {"missing": self._missing(base), "waited": timeout}
        return json.loads(self.store.compare_set(f"{base}/verdict", "", json.dumps(verdict)))

    def _wait(self, keys: list[str], timeout: float, base: str, subject: str, instead: str | None = None) -> bool:
        """Whether all `keys` have come in time, or the key `instead`."""
        assert self.store is not None
        first = min(_PATIENCE, timeout)
        if _arrived(self.store, keys, first, instead):
            return True
        if timeout <= first:
            return False
        logger.warning(
            "rank %d waits in `%s` for %s, up to %.0f s more", self.rank, subject, _ranks(self._missing(base)), timeout
        )
        return _arrived(self.store, keys, timeout - first, instead)

    def _missing(self, base: str) -> list[int]:
        assert self.store is not None
        return [rank for rank in range(self.world) if not self.store.check([f"{base}/{rank}"])]

    def _forget(self, base: str) -> None:
        """Remove the round before this one: whoever is in this round has read it."""
        assert self.store is not None
        head, _, number = base.rpartition("/")
        if int(number) > 0:
            old = f"{head}/{int(number) - 1}"
            for key in ("verdict", *range(self.world)):
                self.store.delete_key(f"{old}/{key}")


@dataclass
class _Link:
    """What this process has of one default process group: a connection to its store, and the rounds held by name.

    The rounds start anew with each group: two of its ranks may not have been in the same groups before.
    """

    store: Any
    rounds: dict[str, int] = field(default_factory=dict)


# By the group's own store, which must not be kept: rank 0's hosts the server, and the next group needs a new one.
_LINKS: weakref.WeakKeyDictionary[Any, _Link] = weakref.WeakKeyDictionary()


def _link() -> _Link:
    """A connection to the store that is nobody else's, so that no wait of torch's own holds a round up.

    Made once a group: connecting takes milliseconds, and every now and then five seconds (torch 2.13 tries again
    after that time where the first try met a busy server). Threads share it: each of our operations is short.
    """
    default: Any = dist.distributed_c10d._get_default_store()
    if default not in _LINKS:
        _LINKS[default] = _Link(default.clone())
    return _LINKS[default]


def _arrived(store: Any, keys: list[str], seconds: float, instead: str | None) -> bool:
    # Polled, since torch logs two lines of its own for each wait that runs out.
    deadline = time.monotonic() + seconds
    pause = 0.0002
    # The other key is rare: it is looked for where the keys have not come at once.
    while not store.check(keys) and not (instead and pause > 0.005 and store.check([instead])):
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(pause * 1.5, 0.01)
    return True


def _ranks(ranks: list[int]) -> str:
    if not ranks:
        return "a rank"
    shown = ", ".join(map(str, ranks[:16])) + (", ..." if len(ranks) > 16 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
