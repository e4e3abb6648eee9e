# SPDX-License-Identifier: Apache-2.0
"""Launchers of several machines meet before anything starts: who is there, who is absent, who says something else."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import select
import selectors
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ..core.errors import ConfigurationError, LaunchError
from ..core.version import __version__
from .others import Others, Stop
from .spec import LaunchSpec

# Seconds until somebody waiting says for whom, and how long it waits at all.
FIRST_WORD = 3.0
PATIENCE = 600.0
PROTOCOL = "accelerate-launch-1"


def introduction(spec: LaunchSpec, engine: str = "static") -> dict[str, Any]:
    """What a launcher says of itself."""
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
    told: dict[str, Any] = field(default_factory=dict)
    done: bool = False
    _buffer: bytes = b""

    @property
    def name(self) -> str:
        return f"machine {self.told.get('machine', '?')} ({self.told.get('host', '?')})"

    def send(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[dict[str, Any]] | None:
        """The messages that have come; None when the other side is gone."""
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
            return [json.loads(line) for line in lines]
        except ValueError:
            return None


def disagreement(ours: dict[str, Any], theirs: dict[str, Any], present: dict[int, Peer]) -> str | None:
    """Why a machine that introduces itself cannot take part, or None."""
    if theirs.get("protocol") != PROTOCOL:
        return "something that is no launcher of this kind has connected"
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
        other = ours["host"] if rank == 0 else present[rank].told["host"]
        return f"--machine_rank {rank} was given on two machines: {other} and {theirs['host']}"
    return None


class Host:
    """Machine 0: listens until every machine has introduced itself."""

    def __init__(self, spec: LaunchSpec, port: int, patience: float = PATIENCE) -> None:
        self.spec, self.patience = spec, patience
        self.ours = introduction(spec)
        self.present: dict[int, Peer] = {}
        self._strangers: list[Peer] = []
        self._selector = selectors.DefaultSelector()
        self._server = _listen(port)
        self._selector.register(self._server, selectors.EVENT_READ)

    def meet(self) -> list[Peer]:
        """The other machines' connections, once all are there. ConfigurationError where one contradicts."""
        began, next_word = time.monotonic(), FIRST_WORD
        try:
            while len(self.present) < self.spec.num_machines - 1:
                self._step()
                waited = time.monotonic() - began
                if waited > self.patience:
                    raise LaunchError(f"{self._absent()} did not appear at machine 0 within {self.patience:.0f} s")
                if waited > next_word:
                    next_word *= 2
                    self._tell_all({"waiting": self._absent()})
                    say(f"waiting for {self._absent()}{self._note()}")
        except (ConfigurationError, LaunchError) as error:
            self._tell_all({"refused": str(error)})
            raise
        finally:
            self._server.close()
            self._selector.close()
        self._tell_all({"go": True})
        return list(self.present.values())

    def _step(self) -> None:
        for key, _ in self._selector.select(0.2):
            if key.fileobj is self._server:
                connection, _ = self._server.accept()
                peer = Peer(_ready(connection))
                self._strangers.append(peer)
                self._selector.register(connection, selectors.EVENT_READ, peer)
            else:
                self._hear(key.data)

    def _hear(self, peer: Peer) -> None:
        messages = peer.receive()
        if messages is None:
            self._selector.unregister(peer.socket)
            self.present = {rank: other for rank, other in self.present.items() if other is not peer}
            return
        for message in messages:
            told = message.get("hello", {})
            wrong = disagreement(self.ours, told, self.present)
            if wrong is not None:
                raise ConfigurationError(wrong)
            peer.told = told
            self.present[told["machine"]] = peer

    def _tell_all(self, message: dict[str, Any]) -> None:
        for peer in {id(peer): peer for peer in (*self._strangers, *self.present.values())}.values():
            peer.send(message)

    def _note(self) -> str:
        """A hint where the others look for machine 0 in a place that does not seem to be this one."""
        host = self.spec.main_process_ip
        if interface_of(resolve_address(host)) is not None:
            return ""
        return f"; they look for machine 0 at {host}, which is no address of this machine"

    def _absent(self) -> str:
        absent = [str(rank) for rank in range(1, self.spec.num_machines) if rank not in self.present]
        return f"machine{'s' if len(absent) > 1 else ''} {', '.join(absent)} of {self.spec.num_machines}"


def join(spec: LaunchSpec, patience: float = PATIENCE) -> Peer:
    """The connection to machine 0, once every machine is there.

    ConfigurationError where the address cannot be or machine 0 refuses; LaunchError where nobody answers in time.
    """
    where = f"machine 0 at {spec.main_process_ip}:{spec.main_process_port}"
    check_address(spec.main_process_ip)
    began, next_word = time.monotonic(), FIRST_WORD
    while True:
        peer = reach(spec, where, patience, began)
        peer.send({"hello": introduction(spec)})
        if _is_complete(peer, where):
            return peer
        # What answered was the store of an attempt that is ending, or a launcher that was stopped: ask again.
        peer.socket.close()
        waited = time.monotonic() - began
        if waited > next_word:
            next_word *= 2
            say(f"{where} hangs up: what answers there has another --engine or is no launcher, or it was stopped")
        time.sleep(0.2)


def _is_complete(peer: Peer, where: str) -> bool:
    """Wait for machine 0's word that all are there. False where the connection ends before."""
    # It speaks after FIRST_WORD seconds at the latest; from then on it may be silent for long.
    if not select.select([peer.socket], [], [], 2 * FIRST_WORD)[0]:
        say(f"{where} is silent: what answers there is no launcher, or one with another --engine")
    while True:
        messages = peer.receive()
        if messages is None:
            return False
        for message in messages:
            if "refused" in message:
                raise ConfigurationError(f"{where} refuses: {message['refused']}")
            if "waiting" in message:
                say(f"{where} waits for {message['waiting']}")
            if message.get("go"):
                return True


def check_address(host: str) -> None:
    resolve_address(host)


def resolve_address(host: str) -> str:
    """The address of a host. ConfigurationError where it has none."""
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except socket.gaierror as error:
        raise ConfigurationError(
            f"main_process_ip={host!r} does not resolve to an address: {error.strerror}"
        ) from None


def reach(spec: LaunchSpec, where: str, patience: float, began: float | None = None) -> Peer:
    """A connection to machine 0. LaunchError where nobody answers within `patience` seconds from `began` on."""
    began = time.monotonic() if began is None else began
    next_word = time.monotonic() - began + FIRST_WORD
    while True:
        try:
            connection = socket.create_connection((spec.main_process_ip, spec.main_process_port), timeout=2.0)
            connection.settimeout(patience)
            return Peer(_ready(connection), {"machine": 0, "host": spec.main_process_ip})
        except OSError as error:
            waited = time.monotonic() - began
            if waited > patience:
                raise LaunchError(f"{where} did not answer within {patience:.0f} s: {error}") from None
            if waited > next_word:
                next_word *= 2
                say(f"{where} does not answer yet ({error}): is it started, and is the address right?")
            time.sleep(0.2)


def _ready(connection: socket.socket) -> socket.socket:
    """A machine whose link goes down is noticed within seconds."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 3), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return connection


def _listen(port: int) -> socket.socket:
    dual = socket.has_dualstack_ipv6()
    server = socket.socket(socket.AF_INET6 if dual else socket.AF_INET, socket.SOCK_STREAM)
    if dual:
        server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    server.bind(("::" if dual else "0.0.0.0", port))
    server.listen(128)
    return server


def interface_of(address: str) -> str | None:
    """The network interface that has an address, for gloo, which would guess it from the host's name."""
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(item.address.split("%")[0] == address for item in addresses):
            return str(name)
    return None


class Link(Others):
    """The other machines while the run lasts: a failure there stops the ranks here, and the other way round."""

    def __init__(self, peers: list[Peer]) -> None:
        self.peers = peers
        for peer in peers:
            peer.socket.setblocking(False)

    def callbacks(self, stop: Stop) -> list[tuple[socket.socket, Callable[[], bool]]]:
        """A socket and what to call when it is readable, for each machine; the call says whether it stays open."""
        return [(peer.socket, partial(self._hear, peer, stop)) for peer in self.peers]

    def _hear(self, peer: Peer, stop: Stop) -> bool:
        messages = peer.receive()
        if messages is None:
            if not peer.done:
                stop(f"{peer.name} is gone: its launcher or its network connection has ended", 1, False)
            return False
        for message in messages:
            peer.done = peer.done or bool(message.get("done"))
            if "failed" in message:
                self._tell(message, but=peer)
                stop(message["failed"], message["code"], message["final"])
        return True

    def failed(self, told: str, code: int, final: bool = False) -> None:
        """Tell the others what failed here; `final` where the run must not be started again."""
        self._tell({"failed": told, "code": code, "final": final})

    def finished(self) -> list[str]:
        return [peer.name for peer in self.peers if peer.done]

    def close(self) -> None:
        self._tell({"done": True})
        for peer in self.peers:
            peer.socket.close()

    def _tell(self, message: dict[str, Any], but: Peer | None = None) -> None:
        for peer in self.peers:
            if peer is not but:
                peer.send(message)


def say(text: str) -> None:
    print(f"accelerate launch: {text}", file=sys.stderr, flush=True)
