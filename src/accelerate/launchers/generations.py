# SPDX-License-Identifier: Apache-2.0
"""One generation of an elastic run: its machines, their ranks, and the reason for its end that all agree on."""

from __future__ import annotations

import select
import socket
from collections.abc import Callable
from dataclasses import dataclass, field

from ..core.errors import LaunchError
from .spec import LaunchSpec, ProcessSpec
from .static import Message, Peer
from .supervisor import OtherMachines, Stop


class StoreLost(LaunchError):
    """The machine that holds the rendezvous is lost or cannot be reached."""


@dataclass(frozen=True)
class Member:
    """A machine of an elastic run: its number in the run, and its machine rank."""

    number: int
    host: str
    address: str
    machine: int

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

    The machine that holds the rendezvous reports the first end of a generation to all its members.

    Args:
        peer: the connection to the machine that holds the rendezvous.
        number: of this generation in the run.
        members: in the order of their ranks.
        position: this machine's, among the members.
        restarts: how many the run has used up.
        min_machines: the run ends or waits where fewer are left.
        holds_rendezvous: whether this machine does.
        cause_timeout: seconds in which the loss of another machine is noticed.
    """

    peer: Peer
    number: int
    members: list[Member]
    position: int
    restarts: int
    min_machines: int
    holds_rendezvous: bool
    cause_timeout: float = OtherMachines.cause_timeout
    end: End | None = None
    is_lost: bool = False
    _gone: set[int] = field(default_factory=set)
    _finished: set[int] = field(default_factory=set)

    @property
    def own(self) -> Member:
        """The member that is this machine."""
        return self.members[self.position]

    def send(self, message: Message) -> None:
        """Send a message about this generation to the machine that holds the rendezvous."""
        self.peer.send({**message, "generation": self.number})

    def handle(self, message: Message) -> None:
        """Take in a message of the machine that holds the rendezvous; those about other generations are ignored."""
        if message.get("generation") != self.number:
            return
        if "gone" in message:
            self._gone.add(message["gone"])
        if "finished" in message:
            self._finished.add(message["finished"])
        if "end" in message:
            self.end = End(**message["end"])

    # Called by the supervisor of this machine's ranks.

    def callbacks(self, stop: Stop) -> list[tuple[socket.socket, Callable[[], bool]]]:
        """The connection to the machine that holds the rendezvous."""
        return [(self.peer.socket, self._receive)]

    def _receive(self) -> bool:
        messages = self.peer.receive()
        self.is_lost = messages is None
        for message in messages or ():
            self.handle(message)
        return not self.is_lost

    def tick(self, stop: Stop) -> None:
        """Stop the ranks here if the rendezvous is lost or another machine has ended the generation."""
        if self.end is not None and self.end.by != self.own.number:
            stop(self.end.reason, self.end.code, self.end.kind == "over")
        elif self.is_lost:
            stop("the machine that holds the rendezvous is lost or cannot be reached", 1, True)

    def failed(self, report: str, code: int, final: bool = False) -> None:
        """Only an interruption is final here: this machine leaves, and the others continue if they can."""
        end = End(self._kind_of_leaving() if final else "failed", report, code, self.own.number)
        self.send({"end": vars(end)})

    def _kind_of_leaving(self) -> str:
        return "over" if self.holds_rendezvous or self.remaining - 1 < self.min_machines else "left"

    def interrupted(self, name: str, code: int) -> None:
        """Report that a signal has ended this machine's part."""
        holder = ", which holds the rendezvous," if self.holds_rendezvous else ""
        self.failed(f"{self.own.name}{holder} was ended by {name}", code, final=True)

    def finished(self) -> list[str]:
        """The other machines whose ranks have all ended without an error."""
        return [one.name for one in self.members if one.number in self._finished and one.number != self.own.number]

    # Called after the ranks here have ended.

    def wait_for_end(self, finished: bool) -> End:
        """Wait for the end that all agree on. `finished`: the ranks here ended by themselves, without an error."""
        if finished:
            self.send({"finished": self.own.number})
        while self.end is None:
            if self.is_lost:
                raise StoreLost("the connection has ended")
            select.select([self.peer.socket], [], [])
            self._receive()
        return self.end

    @property
    def remaining(self) -> int:
        """How many machines of this generation are still there."""
        gone = {*self._gone, self.end.by} if self.end is not None and self.end.kind == "left" else self._gone
        return len(self.members) - len(gone)

    @property
    def uses_restart(self) -> bool:
        """Whether the end uses up a restart: a failure does, and the loss of a machine where too few are left."""
        if self.end is None or self.end.kind not in ("gone", "left"):
            return self.end is not None and self.end.kind == "failed"
        return self.remaining < self.min_machines

    # The processes.

    def spec(self, spec: LaunchSpec) -> LaunchSpec:
        """The launch with the machines of this generation."""
        return spec._replace(
            num_processes=spec.local_processes * len(self.members),
            num_machines=len(self.members),
            machine_rank=self.position,
            main_process_ip=self.members[0].address,
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
