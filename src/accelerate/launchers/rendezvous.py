# SPDX-License-Identifier: Apache-2.0
"""This machine's part in the rendezvous of an elastic run: it connects, waits for its group and learns of its rank."""

from __future__ import annotations

import select
import socket
from functools import partial
from typing import TYPE_CHECKING

from ..core import env
from ..core.errors import ConfigurationError, LaunchError
from .base import print_message
from .coordinator import Coordinator
from .generations import Generation, Member, StoreLost
from .ports import ReservedPort
from .spec import RENDEZVOUS_SETTINGS, LaunchSpec
from .static import FIRST_NOTICE, Message, Peer, Waiting, connect, identity, interface_of, ready, resolve_address

if TYPE_CHECKING:
    from torch.distributed import TCPStore

# Seconds in which a machine reports why it has ended, after the loss of its connection was noticed elsewhere.
CAUSE = 3.0


def settings_of(spec: LaunchSpec) -> dict[str, int]:
    """The settings of the rendezvous; ConfigurationError for an unknown one, or one that is not an integer."""
    found = dict(RENDEZVOUS_SETTINGS)
    for key, text in spec.known_rendezvous_settings().items():
        if key not in found:
            continue
        if not text.isdigit() or not int(text):
            raise ConfigurationError(f"rdzv_conf: {key}={text!r} is not an integer above 0")
        found[key] = int(text)
    return found


class Rendezvous:
    """This machine's access to the run. `address` is its own on the network to the other machines."""

    def __init__(self, spec: LaunchSpec, address: str) -> None:
        least, _, most = spec.nnodes.partition(":")
        self.min_machines: int = int(least)
        self.max_machines: int = int(most or least)
        self.settings: dict[str, int] = settings_of(spec)
        self.reserved: ReservedPort | None = _reserve(spec)
        if self.reserved is not None:
            spec = spec._replace(main_process_port=self.reserved.number)
        self.spec = spec
        own = {"address": address, "nnodes": spec.nnodes, "run": spec.rdzv_id, "restarts": spec.max_restarts}
        self.identity: Message = {**identity(spec, "elastic"), **own}
        self.coordinator: Coordinator | None = None
        self._store: TCPStore | None = None
        self._present: list[str] = []
        # The last generation that this machine was a member of.
        self.formed: Generation | None = None
        interval, attempts = self.settings["keep_alive_interval"], self.settings["keep_alive_max_attempt"]
        self._ready = partial(ready, idle=interval, interval=interval, attempts=attempts)
        self.cause_timeout: float = interval * (1 + attempts) + CAUSE
        if self.reserved is not None:
            self.coordinator = Coordinator(
                spec.main_process_port,
                self.identity,
                self.min_machines,
                self.max_machines,
                self.settings["last_call_timeout"],
                spec.stop_timeout + 2.0,
                self._accept,
            )
            self.coordinator.start()
        self.peer: Peer = connect(spec, self.where, float(self.settings["join_timeout"]))
        self._accept(self.peer.socket)
        self.number: int = self._register()

    @property
    def where(self) -> str:
        """The address of the rendezvous, for messages."""
        return f"the rendezvous at {self.spec.main_process_ip}:{self.spec.main_process_port}"

    def _accept(self, connection: socket.socket) -> socket.socket:
        connection.settimeout(self.settings["heartbeat_timeout"])
        return self._ready(connection)

    def _register(self) -> int:
        """Have this machine's options compared with those of the host. Returns its number in the run."""
        self.peer.send({"hello": self.identity})
        if not select.select([self.peer.socket], [], [], min(2 * FIRST_NOTICE, self.settings["read_timeout"]))[0]:
            print_message(f"{self.where} does not reply: it is not a launcher, or one with another --engine")
            select.select([self.peer.socket], [], [], max(0.0, self.settings["read_timeout"] - 2 * FIRST_NOTICE))
        for message in self.peer.receive() or ():
            if "refused" in message:
                raise ConfigurationError(f"{self.where} refuses: {message['refused']}")
            if "number" in message:
                return int(message["number"])
        raise LaunchError(
            f"the program at {self.where} is not a launcher of this kind: start every machine with the same engine, "
            "and with the same version"
        )

    def form(self, restarts: int) -> tuple[Generation, LaunchSpec, int]:
        """The next generation, its launch, and the port of its ranks' store.

        Raises:
            LaunchError: too few machines join, the run is over, or the rendezvous is lost.
        """
        self.peer.send({"join": restarts})
        waiting, formed, port = Waiting(), None, None
        while True:
            for message in self._receive():
                if "present" in message:
                    self._present = message["present"]
                elif "over" in message:
                    raise LaunchError(
                        f"the run {self.spec.rdzv_id!r} at {self.where} is over: there is nothing to join"
                    )
                elif "group" in message:
                    formed, port = self._begin(message), None
                elif formed is not None:
                    if "main" in message and message["generation"] == formed.number:
                        port = message["main"]
                    formed.handle(message)
            if formed is not None and port is not None:
                self.formed = formed
                return formed, formed.spec(self.spec), port
            if formed is not None and formed.end is not None:
                # A machine was lost meanwhile.
                self.peer.send({"join": max(restarts, formed.restarts)})
                formed = None
            timeout = self.settings["join_timeout"]
            if waiting.seconds > timeout:
                raise LaunchError(f"gave up after {timeout} s (--rdzv_conf join_timeout) {self._status()}")
            if waiting.is_due():
                print_message(self._status())

    def _receive(self) -> list[Message]:
        if not select.select([self.peer.socket], [], [], 0.2)[0]:
            return []
        messages = self.peer.receive()
        if messages is None:
            raise StoreLost("the connection has ended")
        return messages

    def _begin(self, message: Message) -> Generation:
        """The generation of a message. Its first machine opens the store of the ranks."""
        members = [Member(**member) for member in message["group"]]
        position = [member.number for member in members].index(self.number)
        formed = Generation(
            self.peer,
            message["generation"],
            members,
            position,
            message["restarts"],
            self.min_machines,
            self.coordinator is not None,
            self.cause_timeout,
        )
        if position == 0:
            from torch.distributed import TCPStore

            # A store for the ranks of this generation alone: the former one contains addresses of dead processes.
            self._store = TCPStore(members[0].address, 0, None, True, wait_for_workers=False)
            formed.send({"main": self._store.port})
        return formed

    def _status(self) -> str:
        """Which machines are present, and how many are missing."""
        names, count = ", ".join(self._present), len(self._present)
        if count > self.max_machines:
            return f"the run has as many machines as it may have ({self.max_machines}): waiting for a place"
        if count >= self.min_machines:
            return f"waiting for the others to form a new group: {names}"
        lacking = self.min_machines - count
        return f"waiting for {lacking} more machine{'s' if lacking > 1 else ''} at {self.where}; here: {names}"

    def close(self) -> None:
        """Leave the run. The machine that holds the rendezvous leaves last."""
        self.peer.socket.close()
        if self.coordinator is not None:
            self.coordinator.close(self.settings["close_timeout"])
        if self.reserved is not None:
            self.reserved.release()


def _reserve(spec: LaunchSpec) -> ReservedPort | None:
    """The port of the rendezvous, if this machine holds it: because of `is_host`, or because of its address."""
    given = spec.rendezvous_settings().get("is_host")
    if given is not None:
        holds = env.parse_bool(given, "rdzv_conf is_host")
    else:
        main = resolve_address(spec.main_process_ip)
        loopback = main.startswith("127.") or main == "::1"
        holds = interface_of(main) is not None and (spec.machine_rank == 0 or not loopback)
    try:
        return ReservedPort(spec.main_process_port) if holds else None
    except ConfigurationError:
        if given is not None or spec.machine_rank == 0:
            raise
        # A second launch on the machine that already holds the rendezvous.
        return None


def lost(rendezvous: Rendezvous, reason: str) -> str:
    """The message for the loss of the rendezvous."""
    where = f"{rendezvous.spec.main_process_ip}:{rendezvous.spec.main_process_port}"
    return (
        f"the machine at {where}, which holds the rendezvous, is gone or cannot be reached ({reason}). No machine can "
        "continue without it: start all of them again, there or with another --main_process_ip; the checkpoints are "
        "untouched"
    )
