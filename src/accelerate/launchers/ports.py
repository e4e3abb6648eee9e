# SPDX-License-Identifier: Apache-2.0
"""Ports and addresses: the port of rank 0 is reserved until it listens; waiting for another machine."""

from __future__ import annotations

import socket
import sys
import time

from ..core import messages
from ..core.errors import ConfigurationError, LaunchError

# The port of rank 0 where several machines have to know it.
DEFAULT_PORT = 29500


class ReservedPort:
    """A port that the launcher binds while the run lasts, without listening on it.

    Rank 0's store binds the same port a moment later. Linux allows that between sockets with SO_REUSEADDR while
    neither listens, and never hands the port out as a free one. A port that the user chose is also protected from a
    second launch by a named lock.
    """

    def __init__(self, port: int = 0) -> None:
        self._lock: socket.socket | None = None
        self._socket, address = any_address()
        try:
            self._socket.bind((address, port))
            if port:
                self._lock = _lock(port)
        except OSError as error:
            self.release()
            raise ConfigurationError(
                f"port {port} is in use on this machine ({error.strerror}): choose another with "
                "--main_process_port, or omit the option to get a free port"
            ) from None
        self.number: int = self._socket.getsockname()[1]

    def release(self) -> None:
        """Give the port back."""
        for owned in (self._socket, self._lock):
            if owned is not None:
                owned.close()

    def __enter__(self) -> ReservedPort:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def any_address() -> tuple[socket.socket, str]:
    """A socket for a server on all networks, and the address to bind it to: IPv6 and IPv4 where both are there."""
    dual = socket.has_dualstack_ipv6()
    server = socket.socket(socket.AF_INET6 if dual else socket.AF_INET, socket.SOCK_STREAM)
    if dual:
        server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return server, "::" if dual else "0.0.0.0"


def _lock(port: int) -> socket.socket | None:
    """A lock on a port number among launchers, released by the kernel when its owner ends. Linux only."""
    if sys.platform != "linux":
        return None
    lock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        lock.bind(f"\0accelerate-launch-port-{port}")
    except OSError:
        lock.close()
        raise
    return lock


def resolve_address(host: str) -> str:
    """The address of a host; ConfigurationError where it has none."""
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except socket.gaierror as error:
        raise ConfigurationError(
            f"main_process_ip={host!r} does not resolve to an address: {error.strerror}"
        ) from None


def interface_of(address: str) -> str | None:
    """The network interface with an address, for gloo, which would derive it from the host's name."""
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(item.address.split("%")[0] == address for item in addresses):
            return str(name)
    return None


def address_towards(host: str) -> str:
    """This machine's address on the network to `host`."""
    family, _, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigurationError(
            f"main_process_ip={host!r} cannot be reached from here: {error.strerror}"
        ) from None


def get_free_port() -> int:
    """A free port on this machine. Nothing reserves it: a launch with port 0 chooses one and does."""
    with ReservedPort() as port:
        return port.number


def is_port_in_use(port: int | str | None = None) -> bool:
    """Whether a server on this machine answers at `port` (29500 by default)."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(("localhost", int(port) if port is not None else 29500)) == 0


class Waiting:
    """The time of a wait, and when to report it: after three seconds, then at intervals that double."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._next = 3.0

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


def connect(host: str, port: int, timeout: float) -> socket.socket:
    """Connect to the launcher of the machine that the others meet at, and wait until it is there.

    Raises:
        LaunchError: it does not answer within `timeout` seconds.
    """
    waiting = Waiting()
    while True:
        try:
            return socket.create_connection((host, port), timeout=2.0)
        except OSError as error:
            if waiting.seconds > timeout:
                raise LaunchError(
                    f"{host}:{port} did not answer within {timeout:.0f} s: {error}"
                ) from None
            if waiting.is_due():
                messages.show(
                    f"{host}:{port} does not answer yet ({error}): has it been started, and is "
                    "the address correct?"
                )
            time.sleep(0.2)
