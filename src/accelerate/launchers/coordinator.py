# SPDX-License-Identifier: Apache-2.0
"""The machine that holds an elastic run's rendezvous: it forms groups, and reports the end of each to the members.

A machine is present while its connection lasts. The kernel notices the loss of a process at once, and that of a
machine or of the network through TCP's own keep-alive messages.
"""

from __future__ import annotations

import selectors
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from socket import socket

from .base import print_message
from .generations import End, Member
from .static import Message, Peer, listen

# Options that must be equal on all machines.
AGREED = {"run": "--rdzv_id", "nnodes": "--nnodes", "num_processes": "--num_processes", "restarts": "--max_restarts"}


UNKNOWN = Member(0, "", "", 0)


@dataclass(eq=False)
class _Machine:
    """A connected machine, UNKNOWN until its options have been compared with those here."""

    peer: Peer
    member: Member = UNKNOWN
    is_waiting: bool = False
    restarts: int = 0


class Coordinator(threading.Thread):
    """Answers the machines of a run, this one included, until `close`.

    Args:
        port: at which it listens.
        identity: this machine's options, with which those of each machine are compared.
        min_machines, max_machines: limits of a group.
        last_call_timeout: seconds for which a group that could be larger waits for more machines.
        stop_timeout: seconds in which the ranks of a machine end, after its generation has.
        ready: prepares a connection.
    """

    def __init__(
        self,
        port: int,
        identity: Message,
        min_machines: int,
        max_machines: int,
        last_call_timeout: float,
        stop_timeout: float,
        ready: Callable[[socket], socket],
    ) -> None:
        super().__init__(daemon=True, name="elastic-coordinator")
        self.identity = identity
        self.min_machines = min_machines
        self.max_machines = max_machines
        self.last_call_timeout = last_call_timeout
        self.stop_timeout = stop_timeout
        self.ready = ready
        self.is_closing: bool = False
        self._machines: list[_Machine] = []
        self._count = 0
        # The current generation. A member leaves `_group` when it waits for the next one.
        self._number = 0
        self._size = 0
        self._group: list[_Machine] = []
        self._finished: set[int] = set()
        self._end: End | None = End("none", "no generation was formed yet")
        self._form_at: float | None = None
        self._stopped_at = 0.0
        self._selector = selectors.DefaultSelector()
        self._server = listen(port)
        self._selector.register(self._server, selectors.EVENT_READ)

    def run(self) -> None:
        """Process messages until the run is over here and all machines have left."""
        try:
            while self._machines or not self.is_closing:
                for key, _ in self._selector.select(0.1):
                    if key.fileobj is self._server:
                        connection, _ = self._server.accept()
                        machine = _Machine(Peer(self.ready(connection)))
                        self._machines.append(machine)
                        self._selector.register(connection, selectors.EVENT_READ, machine)
                    else:
                        self._receive(key.data)
                if self._is_over:
                    _send(self._take(self._waiting()), {"over": True})
                elif self._end is None:
                    self._check_for_new()
                else:
                    self._form()
        finally:
            for machine in self._machines:
                machine.peer.socket.close()
            self._server.close()
            self._selector.close()

    def close(self, timeout: float) -> None:
        """End the run for all machines that wait, and return when all have left."""
        self.is_closing = True
        self.join(timeout)

    @property
    def _is_over(self) -> bool:
        return self.is_closing or (self._end is not None and self._end.kind in ("finished", "over"))

    def _receive(self, machine: _Machine) -> None:
        messages = machine.peer.receive()
        if messages is None:
            self._remove(machine)
        for message in messages or ():
            if machine.member is UNKNOWN:
                if not self._admit(machine, message.get("hello", {})):
                    return
            elif "join" in message:
                machine.is_waiting, machine.restarts = True, message["join"]
                self._group = [member for member in self._group if member is not machine]
                self._report_present()
            elif message.get("generation") == self._number and self._end is None:
                self._handle(message)

    def _admit(self, machine: _Machine, theirs: Message) -> bool:
        """Compare a machine's options with those here, and give it a number in the run if it can take part."""
        wrong = disagreement(self.identity, theirs)
        if wrong is not None:
            print_message(f"refused: {wrong}")
            machine.peer.send({"refused": wrong})
            self._remove(machine)
            return False
        self._count += 1
        machine.member = Member(self._count, theirs["host"], theirs["address"], theirs["machine"])
        machine.peer.send({"number": self._count})
        return True

    def _handle(self, message: Message) -> None:
        """A message about the current generation, which all its members get."""
        if "end" in message:
            self._declare(End(**message["end"]))
            return
        _send(self._group, message)
        if "finished" in message:
            self._finished.add(message["finished"])
            if len(self._finished) == self._size:
                self._declare(End("finished", "all ranks have finished", 0))

    def _remove(self, machine: _Machine) -> None:
        self._selector.unregister(machine.peer.socket)
        machine.peer.socket.close()
        self._machines.remove(machine)
        if machine in self._group:
            self._group.remove(machine)
            _send(self._group, {"gone": machine.member.number, "generation": self._number})
            if self._end is None:
                self._declare(End("gone", f"{machine.member.name} is gone"))
        self._report_present()

    def _declare(self, end: End) -> None:
        self._end = end
        self._stopped_at = time.monotonic() + self.stop_timeout
        _send(self._group, {"end": asdict(end), "generation": self._number})

    def _waiting(self) -> list[_Machine]:
        return [machine for machine in self._machines if machine.is_waiting]

    @staticmethod
    def _take(machines: list[_Machine]) -> list[_Machine]:
        for machine in machines:
            machine.is_waiting = False
        return machines

    def _check_for_new(self) -> None:
        count = len(self._waiting())
        if count and self._size < self.max_machines:
            new = f"{count} machines have" if count > 1 else "a machine has"
            self._declare(End("joined", f"{new} joined: the group forms again"))

    def _form(self) -> None:
        """Form a generation if enough machines wait, and the ranks of the last one have ended."""
        now, waiting = time.monotonic(), self._waiting()
        if len(waiting) < self.min_machines or (self._group and now < self._stopped_at):
            self._form_at = None
            return
        if self._form_at is None:
            self._form_at = now + self.last_call_timeout
        if len(waiting) < self.max_machines and now < self._form_at:
            return
        # Ranks follow the machine ranks where they are given, and the order of arrival.
        group = sorted(self._take(waiting[: self.max_machines]), key=lambda machine: machine.member.machine)
        self._number += 1
        self._group, self._size, self._finished, self._end, self._form_at = group, len(group), set(), None, None
        members, restarts = [asdict(machine.member) for machine in group], max(one.restarts for one in group)
        _send(group, {"group": members, "restarts": restarts, "generation": self._number})

    def _report_present(self) -> None:
        _send(self._waiting(), {"present": [one.member.name for one in self._machines if one.member.number]})


def _send(machines: Iterable[_Machine], message: Message) -> None:
    for machine in machines:
        machine.peer.send(message)


def disagreement(host: Message, theirs: Message) -> str | None:
    """Why a machine cannot take part in the run of `host`; None where it can."""
    if theirs.get("protocol") != host.get("protocol"):
        return "a program that is not a launcher of this version has connected"
    there = f"{host['host']} ({host['address']})"
    if theirs.get("engine") != host.get("engine"):
        return f"{theirs['host']} was started with --engine {theirs['engine']}, {there} with {host['engine']}"
    here = f"{theirs['host']} ({theirs['address']})"
    for key, flag in AGREED.items():
        if theirs[key] != host[key]:
            return f"{here} was started with {flag} {theirs[key]}, {there} with {host[key]}: use the same on all"
    for key in ("accelerate", "torch"):
        if theirs[key] != host[key]:
            return f"{here} has {key} {theirs[key]}, {there} has {host[key]}: install the same"
    return None
