# SPDX-License-Identifier: Apache-2.0
"""The rendezvous of an elastic run: torch's own decides who takes part; waiting machines report for whom they wait."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from datetime import timedelta
from typing import Any

from ..core import env
from ..core.errors import ConfigurationError, LaunchError, suggestion
from .base import print_message
from .generations import Generation, Member
from .messenger import STORE_TIMEOUT, Messenger, Presence, StoreLost, alive_key
from .ports import ReservedPort
from .spec import JOIN_TIMEOUT, LaunchSpec
from .static import FIRST_NOTICE, Waiting, connect, identity, interface_of, resolve_address

# torch's defaults take most of a minute to notice the loss of a machine. All in seconds but the number of attempts: a
# machine whose last heartbeat is older than interval times attempts is lost.
SETTINGS = {
    "join_timeout": int(JOIN_TIMEOUT),
    "last_call_timeout": 1,
    "close_timeout": 30,
    "heartbeat_timeout": 5,
    "keep_alive_interval": 1,
    "keep_alive_max_attempt": 3,
    "read_timeout": 15,
}
# Seconds in which the machines of a generation exchange their data after torch's rendezvous.
FORMING = 15.0
# Seconds for which a machine reads the clock of the host, until one reading is close enough to its own.
CLOCKS = 3.0
# Seconds in which a launcher of another engine refuses the connection.
REFUSAL = 0.4
HOST_KEY = "host"
# Options that must be equal on all machines.
AGREED = {"run": "--rdzv_id", "nnodes": "--nnodes", "num_processes": "--num_processes", "restarts": "--max_restarts"}


def settings_of(spec: LaunchSpec) -> dict[str, int]:
    """The settings of the rendezvous; ConfigurationError for an unknown one, or one that is not an integer."""
    found = dict(SETTINGS)
    for key, text in spec.rendezvous_settings().items():
        if key in ("is_host", "store_type"):
            continue
        if key not in SETTINGS:
            near = suggestion(key, [*SETTINGS, "is_host"])
            raise ConfigurationError(f"rdzv_conf: there is no setting {key!r}{near}")
        if not text.isdigit() or not int(text):
            raise ConfigurationError(f"rdzv_conf: {key}={text!r} is not an integer above 0")
        found[key] = int(text)
    return found


class Rendezvous:
    """This machine's access to the run. `address` is its own on the network to the other machines."""

    def __init__(self, spec: LaunchSpec, address: str) -> None:
        self.spec = spec
        self.address = address
        least, _, most = spec.nnodes.partition(":")
        self.min_machines: int = int(least)
        self.max_machines: int = int(most or least)
        self.settings: dict[str, int] = settings_of(spec)
        own = {"address": address, "nnodes": spec.nnodes, "run": spec.rdzv_id, "restarts": spec.max_restarts}
        self.identity: dict[str, Any] = {**identity(spec, "elastic"), **own}
        self.reserved: ReservedPort | None = None
        self.is_host: bool = self._hosts()
        self.port: int = spec.main_process_port if self.reserved is None else self.reserved.number
        self._reporters: list[threading.Thread] = []
        self._store: Any = None
        self._main: Any = None
        self._open()

    def _hosts(self) -> bool:
        """Whether this machine holds the store: because of `is_host`, or because it has the main address."""
        given = self.spec.rendezvous_settings().get("is_host")
        if given is not None:
            hosts = env.parse_bool(given, "rdzv_conf is_host")
        else:
            main = resolve_address(self.spec.main_process_ip)
            loopback = main.startswith("127.") or main == "::1"
            hosts = interface_of(main) is not None and (self.spec.machine_rank == 0 or not loopback)
        if hosts:
            try:
                self.reserved = ReservedPort(self.spec.main_process_port)
            except ConfigurationError:
                if given is not None or self.spec.machine_rank == 0:
                    raise
                # A second launch on the machine that already holds the store.
                hosts = False
        return hosts

    def _open(self) -> None:
        """Open the store or connect to it, compare options with the host, and get a number in the run."""
        if not self.is_host:
            # Before torch is imported, so that an unreachable host is reported at once.
            self._register()
        from torch.distributed import PrefixStore
        from torch.distributed.elastic.rendezvous import RendezvousParameters
        from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
        from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, create_handler

        spec = self.spec
        self._store = self._connect(self.is_host)
        talk_store = self._connect(False)
        base = PrefixStore("accelerate", talk_store)
        self._compare_identities(base)
        number = base.add("members", 1)
        base.set(alive_key(number), "0")
        base.set(f"member/{number}", json.dumps({"host": socket.gethostname(), "address": self.address}))
        self.number = number
        self.messenger: Messenger = Messenger(base, number, keeps_time=self.is_host)
        self.messenger.start()
        settings = {key: value for key, value in self.settings.items() if key != "read_timeout"}
        parameters = RendezvousParameters(
            "c10d", self._address, spec.rdzv_id, self.min_machines, self.max_machines, self.address, **settings
        )
        backend = C10dRendezvousBackend(self._store, spec.rdzv_id)
        self.handler: DynamicRendezvousHandler = create_handler(self._store, backend, parameters)

    @property
    def _address(self) -> str:
        return f"{self.spec.main_process_ip}:{self.port}"

    @property
    def where(self) -> str:
        """The address of the rendezvous, for messages."""
        return f"the rendezvous at {self._address}"

    def _register(self) -> None:
        """Connect to the main address. A launcher of another engine there refuses; a store does not reply."""
        peer = connect(self.spec, self.where, float(self.settings["join_timeout"]))
        peer.send({"hello": self.identity})
        peer.socket.settimeout(REFUSAL)
        refused = [message["refused"] for message in peer.receive() or [] if "refused" in message]
        peer.socket.close()
        if refused:
            raise ConfigurationError(f"{self.where} refuses: {refused[0]}")

    def _connect(self, serve: bool) -> Any:
        """A connection to the store, or the store itself."""
        from torch.distributed import TCPStore

        silent = f"{self.where} does not reply: it is not a launcher, or one with another --engine"
        timer = threading.Timer(2 * FIRST_NOTICE, print_message, (silent,))
        timer.daemon = True
        timer.start()
        try:
            # torch tries several times, each with this timeout.
            timeout = timedelta(seconds=FIRST_NOTICE)
            store = TCPStore(self.spec.main_process_ip, self.port, None, serve, timeout, wait_for_workers=False)
        except RuntimeError as error:
            raise LaunchError(f"{self.where} cannot be {'opened' if serve else 'used'}: {_line(error)}") from None
        finally:
            timer.cancel()
        store.set_timeout(timedelta(seconds=self.settings["read_timeout"]))
        return store

    def _compare_identities(self, store: Any) -> None:
        if self.is_host:
            store.set(HOST_KEY, json.dumps(self.identity))
            return
        try:
            store.wait([HOST_KEY], timedelta(seconds=FIRST_NOTICE))
        except RuntimeError:
            raise LaunchError(
                f"the program at {self._address} is not a launcher of this kind: start every "
                "machine with the same engine, and with the same version"
            ) from None
        wrong = disagreement(json.loads(store.get(HOST_KEY)), self.identity)
        if wrong is not None:
            store.set(f"refused/{store.add('refused', 1)}", wrong)
            raise ConfigurationError(f"{self.where} refuses: {wrong}")

    def compare_clocks(self) -> None:
        """Compare clocks: torch's rendezvous compares times of machines, and would count live ones as lost."""
        if self.is_host:
            return
        allowed = self.settings["keep_alive_interval"] * self.settings["keep_alive_max_attempt"] / 3
        until, least = time.monotonic() + CLOCKS, float("inf")
        while time.monotonic() < until:
            clock = self.messenger.request(lambda store: float(store.get("clock")) if store.check(["clock"]) else None)
            if clock is not None:
                # A reading is up to one heartbeat old, more on a busy machine: the smallest difference is the best.
                least = min(least, time.time() - clock, key=abs)
                if abs(least) <= allowed:
                    return
            time.sleep(0.1)
        if least != float("inf"):
            raise ConfigurationError(
                f"the clock of this machine is {abs(least):.1f} s {'ahead of' if least > 0 else 'behind'} that of "
                f"{self.where}, so that it would count as lost: synchronise the clocks (NTP), or give "
                f"--rdzv_conf keep_alive_max_attempt={int(abs(least)) * 3 + 10} on every machine"
            )

    def form(self, restarts: int) -> tuple[Generation, LaunchSpec, int]:
        """The next generation, its launch, and the port of its ranks' store.

        Raises:
            LaunchError: too few machines join, the run is over, or the store is lost.
        """
        from torch.distributed.elastic.rendezvous import api

        with self._reporting_wait():
            try:
                while True:
                    formed = self._exchange_members(self.handler.next_rendezvous(), restarts)
                    if formed is not None:
                        return formed
            except (api.RendezvousClosedError, api.RendezvousGracefulExitError):
                raise LaunchError(
                    f"the run {self.spec.rdzv_id!r} at {self.where} is over: there is nothing to join"
                ) from None
            except api.RendezvousTimeoutError:
                timeout = self.settings["join_timeout"]
                raise LaunchError(f"gave up after {timeout} s (--rdzv_conf join_timeout) {self._status()}") from None
            except (api.RendezvousConnectionError, RuntimeError) as error:
                if isinstance(error, LaunchError):
                    raise
                raise StoreLost(_line(error.__cause__ or error)) from None

    def _exchange_members(self, info: Any, restarts: int) -> tuple[Generation, LaunchSpec, int] | None:
        """Exchange the machines' data within a generation. None where one of them was lost meanwhile."""
        until = time.monotonic() + FORMING
        if info.rank == 0:
            info.store.set(
                "accelerate/generation", str(self.messenger.request(lambda store: store.add("generations", 1)))
            )
        if not _wait_until(lambda: bool(info.store.check(["accelerate/generation"])), until):
            return None
        key = f"generation/{int(info.store.get('accelerate/generation'))}"
        own = Member(self.number, socket.gethostname(), self.address, self.spec.machine_rank, restarts)
        self.messenger.request(lambda store: store.set(f"{key}/member/{info.rank}", json.dumps(asdict(own))))
        keys = [f"{key}/member/{rank}" for rank in range(info.world_size)]
        if not _wait_until(lambda: self.messenger.request(lambda store: bool(store.check(keys))), until):
            return None
        texts = self.messenger.request(lambda store: store.multi_get(keys))
        # Ranks follow the machine ranks where they are given; torch sorts the addresses as text.
        members = sorted((Member(**json.loads(text)) for text in texts), key=lambda member: member.machine)
        formed = Generation(
            self.messenger,
            int(key.split("/")[1]),
            members,
            members.index(own),
            self.handler.num_nodes_waiting,
            self.min_machines,
            self.is_host,
        )
        spec = formed.spec(self.spec, members[0].address)
        if formed.position == 0:
            port = self._open_main(spec)
            self.messenger.request(lambda store: store.set(f"{key}/main", str(port)))
        if not _wait_until(lambda: self.messenger.request(lambda store: bool(store.check([f"{key}/main"]))), until):
            formed.failed(f"{members[0].name} did not open the store of its ranks", 1)
            return None
        return formed, spec, int(self.messenger.request(lambda store: store.get(f"{key}/main")))

    def _open_main(self, spec: LaunchSpec) -> int:
        """A store for the ranks of this generation alone: the former one contains addresses of dead processes."""
        from torch.distributed import TCPStore

        self._main = TCPStore(spec.main_process_ip, 0, None, True, wait_for_workers=False)
        return int(self._main.port)

    @contextlib.contextmanager
    def _reporting_wait(self) -> Iterator[None]:
        """Report for whom this machine waits, and end the launch where the store is lost."""
        over = threading.Event()
        reporter = threading.Thread(target=self._report_wait, args=(over,), daemon=True)
        self._reporters.append(reporter)
        reporter.start()
        try:
            yield
        finally:
            over.set()

    def _report_wait(self, over: threading.Event) -> None:
        waiting, refusals = Waiting(), 0
        while not over.wait(0.5):
            if self.messenger.is_lost() and not over.wait(2.0):
                # The main thread is in torch's rendezvous, which cannot be interrupted; no rank is running.
                print_message(f"error: {lost(self, self.messenger.reason)}")
                os._exit(1)
            with contextlib.suppress(StoreLost):
                refusals = self._show_refusals(refusals)
                if waiting.is_due():
                    word = self._status()
                    if not over.is_set():
                        print_message(word)

    def _show_refusals(self, shown: int) -> int:
        def read(store: Any) -> list[str]:
            count = store.add("refused", 0)
            return [store.get(f"refused/{number}").decode() for number in range(shown + 1, count + 1)]

        new = self.messenger.request(read) if self.is_host else []
        for reason in new:
            print_message(f"refused: {reason}")
        return shown + len(new)

    def _status(self) -> str:
        """Which machines are present, and how many are missing."""
        here = self._present_machines()
        names = ", ".join(f"{machine['host']} ({machine['address']})" for machine in here)
        if len(here) > self.max_machines:
            return f"the run has as many machines as it may have ({self.max_machines}): waiting for a place"
        if len(here) >= self.min_machines:
            return f"waiting for the others to form a new group: {names}"
        lacking = self.min_machines - len(here)
        return f"waiting for {lacking} more machine{'s' if lacking > 1 else ''} at {self.where}; here: {names}"

    def _present_machines(self) -> list[dict[str, str]]:
        """The machines that send heartbeats."""
        count = self.messenger.request(lambda store: store.add("members", 0))
        presence = Presence(list(range(1, count + 1)))
        self.messenger.request(presence.update)
        time.sleep(1.0)
        self.messenger.request(presence.update)
        alive = [number for number, missed in presence.missed.items() if not missed]
        texts = self.messenger.request(lambda store: store.multi_get([f"member/{number}" for number in alive]))
        return [json.loads(text) for text in texts]

    def close(self, formed: Generation | None) -> None:
        """Leave the run. The machine that holds the store leaves last."""
        if self.is_host:
            with contextlib.suppress(Exception):
                # Later machines read that the run is over. Where torch cannot write that, there is no other machine.
                self.handler.shutdown()
        if formed is not None:
            with contextlib.suppress(StoreLost):
                formed.wait_for_members("left", STORE_TIMEOUT if self.is_host else 0.0)
        self._stop_threads()
        if self.reserved is not None:
            self.reserved.release()

    def _stop_threads(self) -> None:
        """Stop the threads: one that returns from the store while the interpreter exits would abort the process."""
        if self.messenger.is_lost():
            # Threads that wait for it do not return.
            return
        self.messenger.stop()
        # torch 2.13 has no public way to stop the heartbeats of a machine that leaves a rendezvous before its end.
        self.handler._stop_heartbeats()
        for thread in (self.messenger, *self._reporters):
            thread.join(2.0)


def lost(rendezvous: Rendezvous, reason: str) -> str:
    """The message for the loss of the store."""
    where = f"{rendezvous.spec.main_process_ip}:{rendezvous.port}"
    return (
        f"the machine at {where}, which holds the rendezvous, is gone or cannot be reached "
        f"({reason or f'no answer for {STORE_TIMEOUT:.0f} s'}). No machine can continue without it: start all of "
        "them again, there or with another --main_process_ip; the checkpoints are untouched"
    )


def disagreement(host: dict[str, Any], ours: dict[str, Any]) -> str | None:
    """Why a machine cannot take part; None where it can."""
    here, there = (f"{machine['host']} ({machine['address']})" for machine in (ours, host))
    for key, flag in AGREED.items():
        if ours[key] != host[key]:
            return f"{here} was started with {flag} {ours[key]}, {there} with {host[key]}: use the same on all"
    for key in ("accelerate", "torch"):
        if ours[key] != host[key]:
            return f"{here} has {key} {ours[key]}, {there} has {host[key]}: install the same"
    return None


def _wait_until(question: Callable[[], bool], until: float) -> bool:
    while not question():
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


def _line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
