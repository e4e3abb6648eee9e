# SPDX-License-Identifier: Apache-2.0
"""Several machines with fixed ranks: their launchers connect to machine 0, compare options and start together.

The connections stay for the whole run, restarts included: a failure, or the loss of a machine, ends the ranks of all.
Messages are lines of JSON. Where launchers cannot connect to each other, the ranks start all the same and find each
other at MASTER_ADDR and MASTER_PORT, as those of any torch program do.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import select
import socket
from collections.abc import Callable
from functools import partial
from typing import Any

from ..core import env, messages
from ..core.errors import ConfigurationError, LaunchError
from ..core.objects import spans
from ..core.version import __version__
from .base import AGENT, Launcher
from .ports import DEFAULT_PORT, ReservedPort, any_address, interface_of, resolve_address
from .spec import LaunchSpec
from .supervisor import OtherMachines, Stop, Supervisor, supervise, with_restarts
from .waiting import Waiting, connect

PROTOCOL = "accelerate-launch-2"
# Seconds in which machine 0 answers a launcher that has connected.
REPLY = 6.0
# Options and versions that must be equal on all machines, and how the user sets them.
SHARED = {
    "num_machines": "--num_machines",
    "num_processes": "--num_processes",
    "max_restarts": "--max_restarts",
    "accelerate": "accelerate",
    "torch": "torch",
}
Message = dict[str, Any]


def identity(spec: LaunchSpec) -> Message:
    """What a launcher reports about itself to machine 0."""
    try:
        torch = importlib.metadata.version("torch").split("+")[0]
    except importlib.metadata.PackageNotFoundError:
        torch = "none"
    options = {
        name: getattr(spec, name) for name in ("num_machines", "num_processes", "max_restarts")
    }
    me = {"protocol": PROTOCOL, "machine": spec.machine_rank, "host": socket.gethostname()}
    return {**me, **options, "accelerate": __version__, "torch": torch}


class Peer:
    """The connection to another machine's launcher."""

    def __init__(self, connection: socket.socket, machine: int = 0, host: str = "") -> None:
        self.socket = connection
        self.machine = machine
        self.host = host
        self.is_done: bool = False
        self._buffer = b""
        _notice_loss(connection)

    def __str__(self) -> str:
        return f"machine {self.machine} ({self.host})"

    def send(self, message: Message) -> None:
        """Send a message. A lost connection is ignored here, because `receive` reports it."""
        with contextlib.suppress(OSError):
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, timeout: float = 0.0) -> list[Message]:
        """The messages that have arrived within `timeout` seconds.

        Raises:
            OSError: the connection has ended.
            ValueError: the other side is not a launcher.
        """
        if not select.select([self.socket], [], [], timeout)[0]:
            return []
        data = self.socket.recv(65536)
        if not data:
            raise ConnectionError("the connection has ended")
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        messages = [json.loads(line) for line in lines]
        if not all(isinstance(message, dict) for message in messages) or self._buffer[:1] not in (
            b"",
            b"{",
        ):
            raise ValueError("no message of a launcher")
        return messages


def _notice_loss(connection: socket.socket) -> None:
    """Have the kernel notice within seconds that the other machine is gone, also while a message is on its way."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    settings = {"TCP_KEEPIDLE": 3, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 7000}
    for name, value in settings.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def gather(spec: LaunchSpec) -> list[Peer]:
    """Machine 0: wait until the launchers of the other machines have connected.

    Returns:
        Their connections; fewer where machines have not come in time, or are started by another program.

    Raises:
        ConfigurationError: a machine has other options or another version.
    """
    peers: dict[int, Peer] = {}
    strangers: list[Peer] = []
    waiting = Waiting()
    server, address = any_address()
    try:
        server.bind((address, spec.main_process_port))
        server.listen(1024)
        while len(peers) < spec.num_machines - 1:
            absent = _listed(set(range(1, spec.num_machines)) - set(peers), spec.num_machines)
            if waiting.seconds > spec.join_timeout:
                messages.show(
                    f"{absent} did not connect within {spec.join_timeout:.0f} s: the ranks start without it"
                )
                break
            if waiting.is_due():
                for peer in peers.values():
                    peer.send({"waiting": absent})
                is_here = interface_of(resolve_address(spec.main_process_ip)) is not None
                if is_here:
                    note = ""
                else:
                    note = f"; they connect to {spec.main_process_ip}, no address of this machine"
                messages.show(f"waiting for {absent}{note}")
            ready = select.select(
                [server, *(peer.socket for peer in (*strangers, *peers.values()))], [], [], 0.2
            )[0]
            if server in ready:
                strangers.append(Peer(server.accept()[0]))
            if not _admit(
                spec, [peer for peer in strangers if peer.socket in ready], strangers, peers
            ):
                messages.show(
                    "a program that is not a launcher has connected: the ranks start without waiting further"
                )
                break
            for peer in [peer for peer in peers.values() if peer.socket in ready]:
                try:
                    peer.receive()
                except (OSError, ValueError):
                    del peers[peer.machine]
    except ConfigurationError as error:
        for peer in (*peers.values(), *strangers):
            peer.send({"refused": str(error)})
        raise
    finally:
        server.close()
    for peer in peers.values():
        peer.send({"go": 0})
    return list(peers.values())


def _admit(
    spec: LaunchSpec, ready: list[Peer], strangers: list[Peer], peers: dict[int, Peer]
) -> bool:
    """Read the first messages of new connections. False where one is not of a launcher."""
    ours = identity(spec)
    for peer in ready:
        try:
            messages = peer.receive()
        except OSError:  # it has asked whether anybody listens
            strangers.remove(peer)
            continue
        except ValueError:
            return False
        if not messages:
            continue
        strangers.remove(peer)
        theirs = messages[0]
        if theirs.get("protocol") != PROTOCOL:
            return False
        peer.machine, peer.host = theirs["machine"], theirs["host"]
        for name, shown in SHARED.items():
            if ours[name] != theirs[name]:
                strangers.append(peer)
                raise ConfigurationError(
                    f"{peer} has {shown} {theirs[name]}, machine 0 ({ours['host']}) has {ours[name]}: "
                    "all machines need the same"
                )
        if peer.machine == 0 or peer.machine in peers:
            strangers.append(peer)
            if peer.machine == 0:
                other = ours["host"]
            else:
                other = peers[peer.machine].host
            raise ConfigurationError(
                f"--machine_rank {peer.machine} was given on two machines: {other} and {peer.host}"
            )
        peers[peer.machine] = peer
        peer.send({"welcome": True})
    return True


def _listed(machines: set[int], count: int) -> str:
    names = ", ".join(
        str(low) if low == high else f"{low}-{high}" for low, high in spans(sorted(machines))
    )
    return f"machine{'s' if len(machines) > 1 else ''} {names} of {count}"


def join(spec: LaunchSpec) -> list[Peer]:
    """Another machine: connect to machine 0 and wait until all have.

    Returns:
        The connection to machine 0; none where no launcher answers there.

    Raises:
        ConfigurationError: machine 0 refuses.
    """
    where = f"machine 0 at {spec.main_process_ip}:{spec.main_process_port}"
    resolve_address(spec.main_process_ip)
    try:
        peer = Peer(
            connect(spec.main_process_ip, spec.main_process_port, spec.join_timeout),
            0,
            spec.main_process_ip,
        )
        peer.send(identity(spec))
        timeout = REPLY
        while received := peer.receive(timeout):
            for message in received:
                if "refused" in message:
                    raise ConfigurationError(f"{where} refuses: {message['refused']}")
                if "go" in message:
                    return [peer]
                if "waiting" in message:
                    messages.show(f"{where} waits for {message['waiting']}")
                timeout = spec.join_timeout
        reason = "does not answer as a launcher does"
    except ConfigurationError:
        raise
    except (LaunchError, OSError, ValueError) as error:
        reason = str(error)
    messages.show(
        f"no connection to the launcher of {where} ({reason}): the ranks start, and connect there themselves"
    )
    return []


class Link(OtherMachines):
    """The connections to other machines during the run: a failure on one machine stops the ranks of all."""

    def __init__(self, spec: LaunchSpec, peers: list[Peer]) -> None:
        self.spec = spec
        self.peers = peers
        self.attempt: int = 0

    def start_together(self, attempt: int) -> None:
        """Before a restart, wait until the ranks of the former attempt have ended on all machines.

        Raises:
            LaunchError: a machine does not take part in it.
        """
        self.attempt = attempt
        if self.spec.machine_rank:
            self._send({"ready": attempt})
        for peer in self.peers:
            try:
                while not any(
                    attempt in message.values() for message in peer.receive(self.spec.join_timeout)
                ):
                    pass
            except (OSError, ValueError) as error:
                raise LaunchError(
                    f"no restart: {peer} does not take part in it ({error})"
                ) from None
        if self.spec.machine_rank == 0:
            self._send({"go": attempt})

    def callbacks(self, stop: Stop) -> list[tuple[socket.socket, Callable[[], bool]]]:
        """The sockets that the supervisor watches, each with its callback."""
        return [(peer.socket, partial(self._receive, peer, stop)) for peer in self.peers]

    def _receive(self, peer: Peer, stop: Stop) -> bool:
        try:
            messages = peer.receive()
        except (OSError, ValueError):
            if not peer.is_done:
                stop(f"{peer} is lost: its launcher or its network connection has ended", 1, False)
            return False
        for message in messages:
            peer.is_done = peer.is_done or "done" in message
            if message.get("failed") and message["of"] == self.attempt:
                self._send(message, exclude=peer)
                stop(message["failed"], message["code"], message["final"])
        return True

    def failed(self, report: str, code: int) -> None:
        """Report a failure of this machine to the others."""
        self._send({"failed": report, "code": code, "final": False, "of": self.attempt})

    def interrupted(self, name: str, code: int) -> None:
        """End the run on all machines, because of a signal here."""
        report = f"machine {self.spec.machine_rank} ({socket.gethostname()}) was ended by {name}"
        self._send({"failed": report, "code": code, "final": True, "of": self.attempt})

    def finished(self) -> list[str]:
        """The names of the machines that have finished."""
        return [str(peer) for peer in self.peers if peer.is_done]

    def close(self) -> None:
        """Report the end of the run here and close the connections."""
        self._send({"done": True})
        for peer in self.peers:
            peer.socket.close()

    def _send(self, message: Message, exclude: Peer | None = None) -> None:
        for peer in self.peers:
            if peer is not exclude:
                peer.send(message)


class StaticLauncher(Launcher):
    """The launchers connect at machine 0's `main_process_ip` and `main_process_port`; then rank 0 listens there."""

    spec: LaunchSpec
    name = "static"

    unused: tuple[str, ...] = (*AGENT, "mpirun_hostfile")

    def __init__(self, spec: LaunchSpec) -> None:
        super().__init__(spec._replace(main_process_port=spec.main_process_port or DEFAULT_PORT))

    def check(self) -> None:
        """Check what this engine requires."""
        if not self.spec.main_process_ip:
            raise ConfigurationError(
                "several machines need --main_process_ip, the address of machine 0"
            )
        _ = self.spec.join_timeout  # raises for settings that cannot be used
        resolve_address(self.spec.main_process_ip)

    def run(self) -> int:
        """Run this machine's share of the launch, with restarts. Returns the exit code."""
        spec = self.spec
        if not spec.main_process_ip_given:
            messages.show(
                f"no --main_process_ip: machine 0 is expected at {spec.main_process_ip}, so only launches on this "
                "machine can join"
            )
        # Reserved before the launcher listens on it, and until rank 0 does.
        with (
            contextlib.nullcontext() if spec.machine_rank else ReservedPort(spec.main_process_port)
        ):
            link = Link(spec, join(spec) if spec.machine_rank else gather(spec))
            try:
                return with_restarts(spec, partial(self._run_once, link))
            finally:
                link.close()

    def _run_once(self, link: Link, number: int) -> Supervisor:
        """Run all processes once."""
        if number:
            link.start_together(number)
        elif env.get("GLOO_SOCKET_IFNAME") is None and link.peers:
            # Have gloo use the network over which the launchers are connected.
            address = link.peers[0].socket.getsockname()[0].removeprefix("::ffff:")
            name = interface_of(address)
            if name is not None:
                self.spec = self.spec._replace(
                    variables={**self.spec.variables, "GLOO_SOCKET_IFNAME": name}
                )
        return supervise(self.spec, self.processes(attempt=number), link)
