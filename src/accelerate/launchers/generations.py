# SPDX-License-Identifier: Apache-2.0
"""One round of an elastic run: its machines, their ranks, and the one reason for its end that all of them agree on."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from .messenger import BEAT, MISSED, SILENCE, Messenger, Presence, StoreLost
from .others import Others, Stop
from .spec import LaunchSpec, ProcessSpec


@dataclass(frozen=True)
class Member:
    """A machine of a round. number: its own in the run. restarts: those it knows of."""

    number: int
    host: str
    address: str
    machine: int
    restarts: int

    @property
    def name(self) -> str:
        return f"{self.host} ({self.address})"


@dataclass(frozen=True)
class End:
    """Why a round ended: finished, failed (a rank), gone or left (a machine), joined (a new one), over (for good)."""

    kind: str
    told: str
    code: int = 1
    by: int = 0


class Generation(Others):
    """`members` in the order of their ranks, `place` is this machine's in it. `waiting`: how many wait to come in.

    least: the number of machines below which the run cannot go on. holds: whether this machine holds the store.
    The end is decided by whoever writes it first into the store; every machine goes by what stands there.
    """

    def __init__(
        self,
        talk: Messenger,
        number: int,
        members: list[Member],
        place: int,
        waiting: Callable[[], int],
        least: int,
        holds: bool,
    ) -> None:
        self.least, self.holds = least, holds
        self.talk, self.number, self.members, self.place = talk, number, members, place
        self.end: End | None = None
        self.interval = 0.1
        if len(members) > 1:
            # A machine that is gone shows first as a lost partner of the ranks here.
            self.settle = MISSED * BEAT + 3.0
        self._waiting = waiting
        self._finished = False
        self._presence = Presence([member.number for member in members if member.number != talk.member])

    @property
    def restarts(self) -> int:
        return max(member.restarts for member in self.members)

    @property
    def own(self) -> Member:
        return self.members[self.place]

    def key(self, name: str) -> str:
        return f"round/{self.number}/{name}"

    def begin(self) -> None:
        self.talk.follow = self._look

    def _look(self, store: Any) -> None:
        """Each beat, in the messenger's thread."""
        gone = self._presence.look(store)
        if self.end is not None:
            return
        if store.check([self.key("end")]):
            self.end = _read(store.get(self.key("end")))
        elif gone:
            names = ", ".join(member.name for member in self.members if member.number in gone)
            self._declare(store, End("gone", f"{names} {'are' if len(gone) > 1 else 'is'} gone"))
        elif self._finished:
            if store.add(self.key("finished"), 0) == len(self.members):
                self._declare(store, End("finished", "all ranks have finished", 0))
        elif self.place == 0 and (count := self._waiting()):
            new = f"{count} machines have" if count > 1 else "a machine has"
            self._declare(store, End("joined", f"{new} come: the group forms again"))

    def _declare(self, store: Any, end: End) -> None:
        self.end = _read(store.compare_set(self.key("end"), "", json.dumps(vars(end))))

    # What the supervisor of this machine's ranks calls.

    def tick(self, stop: Stop) -> None:
        if self.talk.is_silent():
            stop("the machine that holds the rendezvous is gone or out of reach", 1, True)
        elif self.end is not None and self.end.by != self.own.number:
            stop(self.end.told, self.end.code, self.end.kind == "over")

    def failed(self, told: str, code: int, final: bool = False) -> None:
        """Here only an interruption is final: this machine goes, and the others go on where they can."""
        end = End(self._kind_of_leaving() if final else "failed", told, code, self.own.number)
        self.talk.tell(lambda store: self._declare(store, end))

    def _kind_of_leaving(self) -> str:
        return "over" if self.holds or self.left - 1 < self.least else "left"

    def interrupted(self, name: str, code: int) -> None:
        """A signal has ended this machine's part; told before it goes."""
        holder = ", which holds the rendezvous," if self.holds else ""
        self.failed(f"{self.own.name}{holder} was ended by {name}", code, final=True)
        self.talk.ask(lambda store: None)

    # What follows when the ranks here have ended.

    def settle_end(self, finished: bool) -> End:
        """Wait for the end that all agree on. `finished`: whether the ranks here ended well, by themselves."""
        if finished:
            self.talk.ask(lambda store: store.set(self.key(f"finished/{self.own.number}"), "1"))
            self.talk.ask(lambda store: store.add(self.key("finished"), 1))
            self._finished = True
        until = time.monotonic() + 2 * SILENCE
        while self.end is None:
            if self.talk.is_silent():
                raise StoreLost(self.talk.reason)
            if not finished and time.monotonic() > until:
                raise StoreLost("no machine says why its ranks were stopped")
            time.sleep(self.interval)
        return self.end

    def finished(self) -> list[str]:
        """The machines of this round whose ranks have all ended without an error. None where the store is lost."""
        others = [member for member in self.members if member.number != self.own.number]

        def ask(store: Any) -> list[str]:
            return [member.name for member in others if store.check([self.key(f"finished/{member.number}")])]

        try:
            return list(self.talk.ask(ask))
        except StoreLost:
            return []

    @property
    def left(self) -> int:
        """How many machines of this round are still there."""
        gone = {number for number, missed in self._presence.missed.items() if missed >= MISSED}
        if self.end is not None and self.end.kind == "left":
            gone.add(self.end.by)
        return len(self.members) - len(gone)

    @property
    def costs(self) -> bool:
        """Whether the end uses up a restart: a failure does, and a machine that is lacking; a change in bounds not."""
        if self.end is None or self.end.kind not in ("gone", "left"):
            return self.end is not None and self.end.kind == "failed"
        return self.left < self.least

    def gather(self, what: str, patience: float) -> None:
        """Wait until all machines that are still there have come to the same point, at most `patience` seconds."""
        until = time.monotonic() + patience
        count = self.talk.ask(lambda store: store.add(self.key(what), 1))
        while count < self.left and time.monotonic() < until:
            time.sleep(self.interval)
            count = self.talk.ask(lambda store: store.add(self.key(what), 0))

    # The processes.

    def spec(self, spec: LaunchSpec, main: str) -> LaunchSpec:
        """The launch as it is in this round."""
        return replace(
            spec,
            num_processes=spec.local_processes * len(self.members),
            num_machines=len(self.members),
            machine_rank=self.place,
            main_process_ip=main,
        )


def processes(spec: LaunchSpec, port: int, restarts: int) -> list[ProcessSpec]:
    """The processes of a round on this machine, with what torch's own agent tells them."""
    told: dict[str, str | None] = {
        "TORCHELASTIC_RUN_ID": spec.rdzv_id,
        "TORCHELASTIC_RESTART_COUNT": str(restarts),
        "TORCHELASTIC_MAX_RESTARTS": str(spec.max_restarts),
        # The store that ranks meet in is held by a launcher and made anew for each round.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "ROLE_NAME": spec.role,
    }
    found = []
    for local_rank in range(spec.local_processes):
        process = spec.process(local_rank, port, restarts)
        ranks = {"ROLE_RANK": process.variables["RANK"], "ROLE_WORLD_SIZE": process.variables["WORLD_SIZE"]}
        found.append(replace(process, variables={**process.variables, **told, **ranks}))
    return found


def _read(text: bytes) -> End:
    return End(**json.loads(text))
