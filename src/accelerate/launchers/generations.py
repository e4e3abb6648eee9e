# SPDX-License-Identifier: Apache-2.0
"""One generation of an elastic run: its machines, their ranks, and the reason for its end that all agree on."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .messenger import BEAT, MAX_MISSED, STORE_TIMEOUT, Messenger, Presence, StoreLost
from .spec import LaunchSpec, ProcessSpec
from .supervisor import OtherMachines, Stop


@dataclass(frozen=True)
class Member:
    """A machine of a generation: its number in the run, its machine rank, and the restarts that it knows of."""

    number: int
    host: str
    address: str
    machine: int
    restarts: int

    @property
    def name(self) -> str:
        """The host and its address, for messages."""
        return f"{self.host} ({self.address})"


@dataclass(frozen=True)
class End:
    """Why a generation ended.

    `kind` is finished, failed (a rank), gone or left (a machine), joined (a new machine), or over (no further one).
    """

    kind: str
    reason: str
    code: int = 1
    by: int = 0


@dataclass(eq=False)
class Generation(OtherMachines):
    """The machines that run together until the group changes.

    The first machine that writes an end into the store decides it; all others read that.

    Args:
        messenger: the connection to the store.
        number: of this generation in the run.
        members: in the order of their ranks.
        position: this machine's, among the members.
        waiting: returns the number of machines that wait to join.
        min_machines: the run ends or waits where fewer are left.
        holds_store: whether this machine holds the store.
    """

    messenger: Messenger
    number: int
    members: list[Member]
    position: int
    waiting: Callable[[], int]
    min_machines: int
    holds_store: bool
    end: End | None = None
    interval: float = 0.1
    _finished: bool = False

    def __post_init__(self) -> None:
        if len(self.members) > 1:
            # The loss of a machine appears first as a lost connection of the ranks here.
            self.cause_timeout: float = MAX_MISSED * BEAT + 3.0
        others = [member.number for member in self.members if member.number != self.messenger.member]
        self._presence = Presence(others)

    @property
    def restarts(self) -> int:
        """The largest number of restarts that a member has counted."""
        return max(member.restarts for member in self.members)

    @property
    def own(self) -> Member:
        """The member that is this machine."""
        return self.members[self.position]

    def key(self, name: str) -> str:
        """Return the store's key for a value of this generation."""
        return f"generation/{self.number}/{name}"

    def begin(self) -> None:
        """Start to follow the store at each heartbeat."""
        self.messenger.on_beat = self._on_beat

    def _on_beat(self, store: Any) -> None:
        """Called at each heartbeat, in the messenger's thread."""
        gone = self._presence.update(store)
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
        elif self.position == 0 and (count := self.waiting()):
            new = f"{count} machines have" if count > 1 else "a machine has"
            self._declare(store, End("joined", f"{new} joined: the group forms again"))

    def _declare(self, store: Any, end: End) -> None:
        self.end = _read(store.compare_set(self.key("end"), "", json.dumps(vars(end))))

    # Called by the supervisor of this machine's ranks.

    def tick(self, stop: Stop) -> None:
        """Stop the ranks here if the store is lost or another machine has ended the generation."""
        if self.messenger.is_lost():
            stop("the machine that holds the rendezvous is lost or cannot be reached", 1, True)
        elif self.end is not None and self.end.by != self.own.number:
            stop(self.end.reason, self.end.code, self.end.kind == "over")

    def failed(self, reason: str, code: int, final: bool = False) -> None:
        """Only an interruption is final here: this machine leaves, and the others continue if they can."""
        end = End(self._kind_of_leaving() if final else "failed", reason, code, self.own.number)
        self.messenger.post(lambda store: self._declare(store, end))

    def _kind_of_leaving(self) -> str:
        return "over" if self.holds_store or self.remaining - 1 < self.min_machines else "left"

    def interrupted(self, name: str, code: int) -> None:
        """Report that a signal has ended this machine's part."""
        holder = ", which holds the rendezvous," if self.holds_store else ""
        self.failed(f"{self.own.name}{holder} was ended by {name}", code, final=True)
        self.messenger.request(lambda store: None)

    # Called after the ranks here have ended.

    def wait_for_end(self, finished: bool) -> End:
        """Wait for the end that all agree on. `finished`: the ranks here ended by themselves, without an error."""
        if finished:
            self.messenger.request(lambda store: store.set(self.key(f"finished/{self.own.number}"), "1"))
            self.messenger.request(lambda store: store.add(self.key("finished"), 1))
            self._finished = True
        until = time.monotonic() + 2 * STORE_TIMEOUT
        while self.end is None:
            if self.messenger.is_lost():
                raise StoreLost(self.messenger.reason)
            if not finished and time.monotonic() > until:
                raise StoreLost("no machine reports why the ranks were stopped")
            time.sleep(self.interval)
        return self.end

    def finished(self) -> list[str]:
        """The machines whose ranks have all ended without an error; empty where the store is lost."""
        others = [member for member in self.members if member.number != self.own.number]

        def read(store: Any) -> list[str]:
            return [member.name for member in others if store.check([self.key(f"finished/{member.number}")])]

        try:
            return list(self.messenger.request(read))
        except StoreLost:
            return []

    @property
    def remaining(self) -> int:
        """How many machines of this generation are still there."""
        gone = {number for number, missed in self._presence.missed.items() if missed >= MAX_MISSED}
        if self.end is not None and self.end.kind == "left":
            gone.add(self.end.by)
        return len(self.members) - len(gone)

    @property
    def uses_restart(self) -> bool:
        """Whether the end uses up a restart: a failure does, and the loss of a machine where too few are left."""
        if self.end is None or self.end.kind not in ("gone", "left"):
            return self.end is not None and self.end.kind == "failed"
        return self.remaining < self.min_machines

    def wait_for_members(self, name: str, timeout: float) -> None:
        """Wait until all remaining machines have called this with the same name, at most `timeout` seconds."""
        until = time.monotonic() + timeout
        count = self.messenger.request(lambda store: store.add(self.key(name), 1))
        while count < self.remaining and time.monotonic() < until:
            time.sleep(self.interval)
            count = self.messenger.request(lambda store: store.add(self.key(name), 0))

    # The processes.

    def spec(self, spec: LaunchSpec, main: str) -> LaunchSpec:
        """The launch with the machines of this generation."""
        return spec._replace(
            num_processes=spec.local_processes * len(self.members),
            num_machines=len(self.members),
            machine_rank=self.position,
            main_process_ip=main,
        )


def processes(spec: LaunchSpec, port: int, restarts: int) -> list[ProcessSpec]:
    """The processes of a generation on this machine, with the variables that torch's own agent sets."""
    elastic: dict[str, str | None] = {
        "TORCHELASTIC_RUN_ID": spec.rdzv_id,
        "TORCHELASTIC_RESTART_COUNT": str(restarts),
        "TORCHELASTIC_MAX_RESTARTS": str(spec.max_restarts),
        # A launcher owns the store of the ranks, a new one for each generation.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "ROLE_NAME": spec.role,
    }
    found = []
    for local_rank in range(spec.local_processes):
        process = spec.process(local_rank, port, restarts)
        ranks = {"ROLE_RANK": process.variables["RANK"], "ROLE_WORLD_SIZE": process.variables["WORLD_SIZE"]}
        found.append(process._replace(variables={**process.variables, **elastic, **ranks}))
    return found


def _read(text: bytes) -> End:
    return End(**json.loads(text))
