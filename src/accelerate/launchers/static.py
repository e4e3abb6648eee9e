# SPDX-License-Identifier: Apache-2.0
"""Several machines with fixed ranks: their launchers connect to machine 0, compare options and start together."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import select
import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ..core import env
from ..core.errors import ConfigurationError, LaunchError
from ..core.version import __version__
from .base import AGENT, Launcher, print_message
from .ports import DEFAULT_PORT, ReservedPort, any_address
from .spec import LaunchSpec
from .supervisor import OtherMachines, Stop, Supervisor, supervise, with_restarts

# Seconds until a waiting machine reports for whom it waits.
FIRST_NOTICE = 3.0
PROTOCOL = "accelerate-launch-1"
# What launchers send to each other, a line of JSON each.
Message = dict[str, Any]


class Waiting:
    """The time of a wait, and when to report it: after FIRST_NOTICE seconds, then at intervals that double."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._next = FIRST_NOTICE

    @property
    def seconds(self) -> float:
        """The time since the beginning of the wait."""
        return time.monotonic() - self._began

    def is_due(self) -> bool:
        """Whether to report the wait now."""
        if self.seconds <= self._next:
            return False
        self._next *= 2
        return True


def identity(spec: LaunchSpec, engine: str = "static") -> Message:
    """What a launcher reports about itself to the others."""
    try:
        torch = importlib.metadata.version("torch").split("+")[0]
    except importlib.metadata.PackageNotFoundError:
        torch = "none"
    return {
        "protocol": PROTOCOL,
        "engine": engine,
        "machine": spec.machine_rank,
        "num_machines": spec.num_machines,
        "num_processes": spec.num_processes,
        "host": socket.gethostname(),
        "accelerate": __version__,
        "torch": torch,
    }


@dataclass
class Peer:
    """The connection to another machine's launcher: messages are lines of JSON."""

    socket: socket.socket
    identity: Message = field(default_factory=dict)
    done: bool = False
    _buffer: bytes = b""

    @property
    def name(self) -> str:
        """The rank and the host of the machine, for messages."""
        return f"machine {self.identity.get('machine', '?')} ({self.identity.get('host', '?')})"

    def send(self, message: Message) -> None:
        """Send a message. A lost connection is ignored here, because `receive` reports it."""
        with contextlib.suppress(OSError):
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[Message] | None:
        """The messages that have arrived; None when the connection has ended."""
        try:
            data = self.socket.recv(65536)
        except BlockingIOError:
            return []
        except OSError:
            return None
        if not data:
            return None
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        try:
            messages = [json.loads(line) for line in lines]
        except ValueError:
            return None
        return messages if all(isinstance(message, dict) for message in messages) else None


def disagreement(ours: Message, theirs: Message, present: dict[int, Peer]) -> str | None:
    """Why a machine that connects cannot take part; None where it can."""
    if theirs.get("protocol") != PROTOCOL:
        return "a program that is not a launcher of this version has connected"
    name = f"machine {theirs['machine']} ({theirs['host']})"
    for key, flag in (
        ("engine", "--engine"), ("num_machines", "--num_machines"), ("num_processes", "--num_processes")
    ):  # fmt: skip
        if ours[key] != theirs[key]:
            return f"{name} was started with {flag} {theirs[key]}, machine 0 ({ours['host']}) with {ours[key]}"
    for key in ("accelerate", "torch"):
        if ours[key] != theirs[key]:
            return f"{name} has {key} {theirs[key]}, machine 0 ({ours['host']}) has {ours[key]}: install the same"
    rank = theirs["machine"]
    if rank == 0 or rank in present:
        other = ours["host"] if rank == 0 else present[rank].identity["host"]
        return f"--machine_rank {rank} was given on two machines: {other} and {theirs['host']}"
    return None


class Host:
    """Machine 0: listens until every machine has connected."""

    def __init__(self, spec: LaunchSpec) -> None:
        self.spec = spec
        self.timeout: float = spec.join_timeout
        self.identity: Message = identity(spec)
        self.present: dict[int, Peer] = {}
        self._unknown: list[Peer] = []
        self._selector = selectors.DefaultSelector()
        self._server = listen(spec.main_process_port)
        self._selector.register(self._server, selectors.EVENT_READ)

    def wait_for_all(self) -> list[Peer]:
        """Wait for the connections of all other machines and return them.

        Raises:
            ConfigurationError: a machine has other options or another version.
            LaunchError: not all machines have connected in time.
        """
        waiting = Waiting()
        try:
            while len(self.present) < self.spec.num_machines - 1:
                self._step()
                if waiting.seconds > self.timeout:
                    raise LaunchError(f"{self._absent()} did not appear at machine 0 within {self.timeout:.0f} s")
                if waiting.is_due():
                    self._send_all({"waiting": self._absent()})
                    print_message(f"waiting for {self._absent()}{self._note()}")
        except (ConfigurationError, LaunchError) as error:
            self._send_all({"refused": str(error)})
            raise
        finally:
            self._server.close()
            self._selector.close()
        self._send_all({"go": True})
        return list(self.present.values())

    def _step(self) -> None:
        for key, _ in self._selector.select(0.2):
            if key.fileobj is self._server:
                connection, _ = self._server.accept()
                peer = Peer(ready(connection))
                self._unknown.append(peer)
                self._selector.register(connection, selectors.EVENT_READ, peer)
            else:
                self._receive(key.data)

    def _receive(self, peer: Peer) -> None:
        messages = peer.receive()
        if messages is None:
            self._selector.unregister(peer.socket)
            self.present = {rank: other for rank, other in self.present.items() if other is not peer}
            return
        for message in messages:
            theirs = message.get("hello", {})
            wrong = disagreement(self.identity, theirs, self.present)
            if wrong is not None:
                raise ConfigurationError(wrong)
            peer.identity = theirs
            self.present[theirs["machine"]] = peer

    def _send_all(self, message: Message) -> None:
        for peer in {id(peer): peer for peer in (*self._unknown, *self.present.values())}.values():
            peer.send(message)

    def _note(self) -> str:
        """A hint where the others look for machine 0 at an address that this machine does not have."""
        host = self.spec.main_process_ip
        if interface_of(resolve_address(host)) is not None:
            return ""
        return f"; they connect to {host}, which is not an address of this machine"

    def _absent(self) -> str:
        absent = [str(rank) for rank in range(1, self.spec.num_machines) if rank not in self.present]
        return f"machine{'s' if len(absent) > 1 else ''} {', '.join(absent)} of {self.spec.num_machines}"


def join(spec: LaunchSpec) -> Peer:
    """Connect to machine 0 and wait until every machine has.

    Raises:
        ConfigurationError: the address is invalid, or machine 0 refuses.
        LaunchError: machine 0 does not answer in time.
    """
    where = f"machine 0 at {spec.main_process_ip}:{spec.main_process_port}"
    resolve_address(spec.main_process_ip)
    waiting = Waiting()
    while True:
        peer = connect(spec, where, spec.join_timeout, waiting)
        peer.send({"hello": identity(spec)})
        if _is_complete(peer, where):
            return peer
        # The store of an attempt that is ending answered, or a launcher that was stopped: try again.
        peer.socket.close()
        if waiting.is_due():
            print_message(f"{where} closes the connection: it has another --engine, is not a launcher, or was stopped")
        time.sleep(0.2)


def _is_complete(peer: Peer, where: str) -> bool:
    """Wait until machine 0 reports that all are there. False where the connection ends before."""
    # The first message arrives after FIRST_NOTICE seconds at the latest; later ones may take long.
    if not select.select([peer.socket], [], [], 2 * FIRST_NOTICE)[0]:
        print_message(f"{where} does not reply: it is not a launcher, or one with another --engine")
    while True:
        messages = peer.receive()
        if messages is None:
            return False
        for message in messages:
            if "refused" in message:
                raise ConfigurationError(f"{where} refuses: {message['refused']}")
            if "waiting" in message:
                print_message(f"{where} waits for {message['waiting']}")
            if message.get("go"):
                return True


def resolve_address(host: str) -> str:
    """The address of a host; ConfigurationError where it has none."""
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except socket.gaierror as error:
        raise ConfigurationError(
            f"main_process_ip={host!r} does not resolve to an address: {error.strerror}"
        ) from None


def connect(spec: LaunchSpec, where: str, timeout: float, waiting: Waiting | None = None) -> Peer:
    """Connect to machine 0. LaunchError where it does not answer within `timeout` seconds of waiting."""
    notice = Waiting()
    waiting = waiting or notice
    while True:
        try:
            connection = socket.create_connection((spec.main_process_ip, spec.main_process_port), timeout=2.0)
            connection.settimeout(timeout)
            return Peer(ready(connection), {"machine": 0, "host": spec.main_process_ip})
        except OSError as error:
            if waiting.seconds > timeout:
                raise LaunchError(f"{where} did not answer within {timeout:.0f} s: {error}") from None
            if notice.is_due():
                print_message(f"{where} does not answer yet ({error}): is it started, and is the address right?")
            time.sleep(0.2)


def ready(connection: socket.socket, idle: int = 3, interval: int = 1, attempts: int = 4) -> socket.socket:
    """Set up a connection so that the loss of the other machine is noticed within seconds.

    Args:
        connection: to another machine.
        idle: seconds without a message, after which the kernel probes the other machine.
        interval: seconds between two probes.
        attempts: number of probes without an answer, after which the connection counts as lost.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", idle), ("TCP_KEEPINTVL", interval), ("TCP_KEEPCNT", attempts),
        # There are no probes while a message waits for its acknowledgement.
        ("TCP_USER_TIMEOUT", 1000 * (idle + interval * attempts)),
    ):  # fmt: skip
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return connection


def listen(port: int) -> socket.socket:
    """A server for the connections of other machines."""
    server, address = any_address()
    server.bind((address, port))
    server.listen(128)
    return server


def interface_of(address: str) -> str | None:
    """The network interface with an address, for gloo, which would derive it from the host's name."""
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(item.address.split("%")[0] == address for item in addresses):
            return str(name)
    return None


class Link(OtherMachines):
    """The connections to other machines during the run: a failure on one machine stops the ranks of all."""

    def __init__(self, peers: list[Peer]) -> None:
        self.peers = peers
        for peer in peers:
            peer.socket.setblocking(False)

    def callbacks(self, stop: Stop) -> list[tuple[socket.socket, Callable[[], bool]]]:
        """Return the sockets that the supervisor watches, each with its callback."""
        return [(peer.socket, partial(self._receive, peer, stop)) for peer in self.peers]

    def _receive(self, peer: Peer, stop: Stop) -> bool:
        messages = peer.receive()
        if messages is None:
            if not peer.done:
                stop(f"{peer.name} is lost: its launcher or its network connection has ended", 1, False)
            return False
        for message in messages:
            peer.done = peer.done or bool(message.get("done"))
            if "failed" in message:
                self._send(message, exclude=peer)
                stop(message["failed"], message["code"], message["final"])
        return True

    def failed(self, report: str, code: int, final: bool = False) -> None:
        """Report a failure of this machine to the others."""
        self._send({"failed": report, "code": code, "final": final})

    def finished(self) -> list[str]:
        """Return the names of the machines that have finished."""
        return [peer.name for peer in self.peers if peer.done]

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

    name = "static"

    unused: tuple[str, ...] = (*AGENT, "mpirun_hostfile")

    def __init__(self, spec: LaunchSpec) -> None:
        self.spec: LaunchSpec
        super().__init__(spec._replace(main_process_port=spec.main_process_port or DEFAULT_PORT))

    def _check(self) -> None:
        if not self.spec.main_process_ip:
            raise ConfigurationError("several machines need --main_process_ip, the address of machine 0")
        _ = self.spec.join_timeout  # raises for settings that cannot be used
        resolve_address(self.spec.main_process_ip)

    def run(self) -> int:
        """Run this machine's share of the launch, with restarts. Returns the exit code."""
        spec = self.spec
        if not spec.main_process_ip_given:
            print_message(
                f"no --main_process_ip: machine 0 is expected at {spec.main_process_ip}, so only launches on this "
                "machine can join"
            )
        if spec.machine_rank > 0:
            return with_restarts(spec, lambda number: self._run_once(number, [join(spec)]))
        # Reserved before the launcher listens on it, and until rank 0 does.
        with ReservedPort(spec.main_process_port):
            return with_restarts(spec, lambda number: self._run_once(number, Host(spec).wait_for_all()))

    def _run_once(self, number: int, peers: list[Peer]) -> Supervisor:
        """Run all processes once, after the launchers have connected."""
        link = Link(peers)
        try:
            self._use_interface(link)
            return supervise(self.spec, self.processes(attempt=number), link)
        finally:
            link.close()

    def _use_interface(self, link: Link) -> None:
        """Have gloo use the network over which the launchers are connected, unless the user has named one."""
        if env.get("GLOO_SOCKET_IFNAME") is None and link.peers:
            address = link.peers[0].socket.getsockname()[0].removeprefix("::ffff:")
            name = interface_of(address)
            if name is not None:
                self.spec = self.spec._replace(variables={**self.spec.variables, "GLOO_SOCKET_IFNAME": name})
