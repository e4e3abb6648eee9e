# SPDX-License-Identifier: Apache-2.0
"""Machines of an elastic run meet: torch's rendezvous says who takes part, and nobody waits in silence."""

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
from ..core.errors import ConfigurationError, LaunchError, nearest
from .generations import Generation, Member
from .messenger import SILENCE, Messenger, Presence, StoreLost, alive_key
from .ports import ReservedPort
from .spec import LaunchSpec
from .static_rendezvous import FIRST_WORD, PATIENCE, interface_of, introduction, reach, resolve_address, say

# A machine that dies is left behind in seconds: torch's own defaults take most of a minute. All in seconds but the
# number of attempts. A heartbeat older than interval times attempts is a dead machine's.
SETTINGS = {
    "join_timeout": int(PATIENCE),
    "last_call_timeout": 1,
    "close_timeout": 30,
    "heartbeat_timeout": 5,
    "keep_alive_interval": 1,
    "keep_alive_max_attempt": 3,
    "read_timeout": 15,
}
# Seconds in which the machines of a round introduce themselves once torch's rendezvous has named them.
FORMING = 15.0
# Seconds in which a machine reads the time of the store's holder, until one reading is near enough to its own.
CLOCKS = 3.0
# Seconds in which a launcher of another engine answers.
REGISTRATION = 0.4
HOST_KEY = "host"
# What all machines of a run must have been started with.
AGREED = {"run": "--rdzv_id", "nnodes": "--nnodes", "num_processes": "--num_processes", "restarts": "--max_restarts"}


def settings_of(spec: LaunchSpec) -> dict[str, int]:
    """The settings of the rendezvous. ConfigurationError for one that there is not, or that is no whole number."""
    found = dict(SETTINGS)
    for key, text in spec.rendezvous_settings().items():
        if key in ("is_host", "store_type"):
            continue
        if key not in SETTINGS:
            hint = nearest(key, [*SETTINGS, "is_host"])
            raise ConfigurationError(
                f"rdzv_conf: there is no setting {key!r}" + (f"; did you mean {hint}?" if hint else "")
            )
        if not text.isdigit() or not int(text):
            raise ConfigurationError(f"rdzv_conf: {key}={text!r} is not a whole number above 0")
        found[key] = int(text)
    return found


class Rendezvous:
    """This machine's way into the run. `address`: its own on the network that leads to the others."""

    def __init__(self, spec: LaunchSpec, address: str) -> None:
        self.spec, self.address = spec, address
        least, _, most = spec.nnodes.partition(":")
        self.least, self.most = int(least), int(most or least)
        self.settings = settings_of(spec)
        own = {"address": address, "nnodes": spec.nnodes, "run": spec.rdzv_id, "restarts": spec.max_restarts}
        self.ours = {**introduction(spec, "elastic"), **own}
        self.held: ReservedPort | None = None
        self.hosts = self._hosts()
        self.port = spec.main_process_port if self.held is None else self.held.number
        self._speakers: list[threading.Thread] = []
        self._store: Any = None
        self._main: Any = None
        self._open()

    def _hosts(self) -> bool:
        """Whether this machine holds the store: it was told so, or it is the one that has the main address."""
        given = self.spec.rendezvous_settings().get("is_host")
        if given is not None:
            hosts = env.parse_bool(given, "rdzv_conf is_host")
        else:
            main = resolve_address(self.spec.main_process_ip)
            loopback = main.startswith("127.") or main == "::1"
            hosts = interface_of(main) is not None and (self.spec.machine_rank == 0 or not loopback)
        if hosts:
            try:
                self.held = ReservedPort(self.spec.main_process_port)
            except ConfigurationError:
                if given is not None or self.spec.machine_rank == 0:
                    raise
                # A second launch on the machine that holds the store already.
                hosts = False
        return hosts

    def _open(self) -> None:
        """Open or reach the store, compare notes with its holder, and take a number in the run."""
        if not self.hosts:
            # Before torch is imported: who cannot be reached is said at once.
            self._register()
        from torch.distributed import PrefixStore
        from torch.distributed.elastic.rendezvous import RendezvousParameters
        from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
        from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

        spec = self.spec
        self._store = self._connect(self.hosts)
        talk_store = self._connect(False)
        base = PrefixStore("accelerate", talk_store)
        self._compare_notes(base)
        number = base.add("members", 1)
        base.set(alive_key(number), "0")
        base.set(f"member/{number}", json.dumps({"host": socket.gethostname(), "address": self.address}))
        self.number = number
        self.talk = Messenger(base, number, keeps_time=self.hosts)
        self.talk.start()
        settings = {key: value for key, value in self.settings.items() if key != "read_timeout"}
        parameters = RendezvousParameters(
            "c10d", self._address, spec.rdzv_id, self.least, self.most, self.address, **settings
        )
        self.handler = create_handler(self._store, C10dRendezvousBackend(self._store, spec.rdzv_id), parameters)

    @property
    def _address(self) -> str:
        return f"{self.spec.main_process_ip}:{self.port}"

    @property
    def where(self) -> str:
        return f"the rendezvous at {self._address}"

    def _register(self) -> None:
        """Reach the main address. A launcher of another engine there says what it thinks of us; a store is silent."""
        peer = reach(self.spec, self.where, float(self.settings["join_timeout"]))
        peer.send({"hello": self.ours})
        peer.socket.settimeout(REGISTRATION)
        refused = [message["refused"] for message in peer.receive() or [] if "refused" in message]
        peer.socket.close()
        if refused:
            raise ConfigurationError(f"{self.where} refuses: {refused[0]}")

    def _connect(self, serve: bool) -> Any:
        """A connection to the store, or the store itself."""
        from torch.distributed import TCPStore

        silent = f"{self.where} is silent: what answers there is no launcher, or one with another --engine"
        timer = threading.Timer(2 * FIRST_WORD, say, (silent,))
        timer.daemon = True
        timer.start()
        try:
            # torch tries several times, each this long.
            patience = timedelta(seconds=FIRST_WORD)
            store = TCPStore(self.spec.main_process_ip, self.port, None, serve, patience, wait_for_workers=False)
        except RuntimeError as error:
            told = f"{self.where} cannot be {'opened' if serve else 'used'}: {_line(error)}"
            raise LaunchError(told) from None
        finally:
            timer.cancel()
        store.set_timeout(timedelta(seconds=self.settings["read_timeout"]))
        return store

    def _compare_notes(self, store: Any) -> None:
        if self.hosts:
            store.set(HOST_KEY, json.dumps(self.ours))
            return
        try:
            store.wait([HOST_KEY], timedelta(seconds=FIRST_WORD))
        except RuntimeError:
            raise LaunchError(
                f"what answers at {self._address} is no launcher of this kind: start every "
                "machine with the same engine, and with the same version"
            ) from None
        wrong = _disagreement(json.loads(store.get(HOST_KEY)), self.ours)
        if wrong is not None:
            store.set(f"refused/{store.add('refused', 1)}", wrong)
            raise ConfigurationError(f"{self.where} refuses: {wrong}")

    def compare_clocks(self) -> None:
        """Torch's rendezvous compares times of different machines: where their clocks differ, the living look dead."""
        if self.hosts:
            return
        allowed = self.settings["keep_alive_interval"] * self.settings["keep_alive_max_attempt"] / 3
        until, least = time.monotonic() + CLOCKS, float("inf")
        while time.monotonic() < until:
            told = self.talk.ask(lambda store: float(store.get("clock")) if store.check(["clock"]) else None)
            if told is not None:
                # What is read is up to a beat old, or older on a busy machine: the least difference is the true one.
                least = min(least, time.time() - told, key=abs)
                if abs(least) <= allowed:
                    return
            time.sleep(0.1)
        if least != float("inf"):
            raise ConfigurationError(
                f"the clock of this machine is {abs(least):.1f} s {'ahead of' if least > 0 else 'behind'} that of "
                f"{self.where}, by which it would look dead: synchronise the clocks (NTP), or give "
                f"--rdzv_conf keep_alive_max_attempt={int(abs(least)) * 3 + 10} on every machine"
            )

    def form(self, restarts: int) -> tuple[Generation, LaunchSpec, int]:
        """The next round, its launch, and the port its ranks meet at.

        LaunchError where too few machines come, where the run is over, or where the store is lost.
        """
        from torch.distributed.elastic.rendezvous import api

        with self._speaking():
            try:
                while True:
                    formed = self._introduce(self.handler.next_rendezvous(), restarts)
                    if formed is not None:
                        return formed
            except (api.RendezvousClosedError, api.RendezvousGracefulExitError):
                raise LaunchError(
                    f"the run {self.spec.rdzv_id!r} at {self.where} is over: there is nothing to join"
                ) from None
            except api.RendezvousTimeoutError:
                patience = self.settings["join_timeout"]
                raise LaunchError(f"gave up after {patience} s (--rdzv_conf join_timeout) {self._word()}") from None
            except (api.RendezvousConnectionError, RuntimeError) as error:
                if isinstance(error, LaunchError):
                    raise
                raise StoreLost(_line(error.__cause__ or error)) from None

    def _introduce(self, info: Any, restarts: int) -> tuple[Generation, LaunchSpec, int] | None:
        """Exchange what the machines of a round need of one another. None where one of them vanished meanwhile."""
        until = time.monotonic() + FORMING
        if info.rank == 0:
            info.store.set("accelerate/round", str(self.talk.ask(lambda store: store.add("rounds", 1))))
        if not _await(lambda: bool(info.store.check(["accelerate/round"])), until):
            return None
        key = f"round/{int(info.store.get('accelerate/round'))}"
        own = Member(self.number, socket.gethostname(), self.address, self.spec.machine_rank, restarts)
        self.talk.ask(lambda store: store.set(f"{key}/member/{info.rank}", json.dumps(asdict(own))))
        keys = [f"{key}/member/{rank}" for rank in range(info.world_size)]
        if not _await(lambda: self.talk.ask(lambda store: bool(store.check(keys))), until):
            return None
        told = self.talk.ask(lambda store: store.multi_get(keys))
        # Ranks follow the machine ranks where they are given; torch's order is that of the addresses' letters.
        members = sorted((Member(**json.loads(text)) for text in told), key=lambda member: member.machine)
        formed = Generation(
            self.talk,
            int(key.split("/")[1]),
            members,
            members.index(own),
            self.handler.num_nodes_waiting,
            self.least,
            self.hosts,
        )
        spec = formed.spec(self.spec, members[0].address)
        if formed.place == 0:
            port = self._open_main(spec)
            self.talk.ask(lambda store: store.set(f"{key}/main", str(port)))
        if not _await(lambda: self.talk.ask(lambda store: bool(store.check([f"{key}/main"]))), until):
            formed.failed(f"{members[0].name} did not open the store of its ranks", 1)
            return None
        return formed, spec, int(self.talk.ask(lambda store: store.get(f"{key}/main")))

    def _open_main(self, spec: LaunchSpec) -> int:
        """A store for the ranks of this round alone: an earlier one's holds the addresses of dead peers."""
        from torch.distributed import TCPStore

        self._main = TCPStore(spec.main_process_ip, 0, None, True, wait_for_workers=False)
        return int(self._main.port)

    @contextlib.contextmanager
    def _speaking(self) -> Iterator[None]:
        """Say for whom this machine waits while it does, and end the launch where the store falls silent."""
        over = threading.Event()
        speaker = threading.Thread(target=self._speak, args=(over,), daemon=True)
        self._speakers.append(speaker)
        speaker.start()
        try:
            yield
        finally:
            over.set()

    def _speak(self, over: threading.Event) -> None:
        began, next_word, refusals = time.monotonic(), FIRST_WORD, 0
        while not over.wait(0.5):
            if self.talk.is_silent() and not over.wait(2.0):
                # The main thread hangs in torch's rendezvous, where nothing interrupts it; no rank runs now.
                say(f"error: {lost(self, self.talk.reason)}")
                os._exit(1)
            with contextlib.suppress(StoreLost):
                refusals = self._show_refusals(refusals)
                if time.monotonic() - began > next_word:
                    next_word *= 2
                    word = self._word()
                    if not over.is_set():
                        say(word)

    def _show_refusals(self, shown: int) -> int:
        count = self.talk.ask(lambda store: store.add("refused", 0)) if self.hosts else 0
        for number in range(shown + 1, count + 1):
            say("refused: " + self.talk.ask(lambda store, number=number: store.get(f"refused/{number}")).decode())  # type: ignore[misc]
        return count

    def _word(self) -> str:
        """Who is here, and how many are not."""
        here = self._present()
        names = ", ".join(f"{told['host']} ({told['address']})" for told in here)
        if len(here) > self.most:
            return f"the run has as many machines as it may have ({self.most}): waiting for a place"
        if len(here) >= self.least:
            return f"waiting for the others to form the group anew: {names}"
        lacking = self.least - len(here)
        return f"waiting for {lacking} more machine{'s' if lacking > 1 else ''} at {self.where}; here: {names}"

    def _present(self) -> list[dict[str, str]]:
        """The machines that give signs of life."""
        count = self.talk.ask(lambda store: store.add("members", 0))
        presence = Presence(list(range(1, count + 1)))
        self.talk.ask(presence.look)
        time.sleep(1.0)
        self.talk.ask(presence.look)
        alive = [number for number, missed in presence.missed.items() if not missed]
        told = self.talk.ask(lambda store: store.multi_get([f"member/{number}" for number in alive]))
        return [json.loads(text) for text in told]

    def close(self, formed: Generation | None) -> None:
        """Leave the run for good. The store's holder goes last."""
        if self.hosts:
            with contextlib.suppress(Exception):
                # Whoever comes now learns that the run is over; where torch cannot write that, nobody is there.
                self.handler.shutdown()
        if formed is not None:
            with contextlib.suppress(StoreLost):
                formed.gather("left", SILENCE if self.hosts else 0.0)
        self._stop_threads()
        if self.held is not None:
            self.held.release()

    def _stop_threads(self) -> None:
        """A thread that comes back from the store while the interpreter goes down would abort the process."""
        if self.talk.is_silent():
            # Those that hang in it do not come back.
            return
        self.talk.stop()
        # torch 2.13 has no public way to end the heartbeats of a machine that leaves a rendezvous which goes on.
        self.handler._stop_heartbeats()
        for thread in (self.talk, *self._speakers):
            thread.join(2.0)


def lost(rendezvous: Rendezvous, reason: str) -> str:
    """What to say when the store is gone."""
    where = f"{rendezvous.spec.main_process_ip}:{rendezvous.port}"
    return (
        f"the machine at {where}, which holds the rendezvous, is gone or out of reach "
        f"({reason or f'silent for {SILENCE:.0f} s'}). No machine can go on without it: start all of "
        "them again, there or with another --main_process_ip; the checkpoints are untouched"
    )


def _disagreement(host: dict[str, Any], ours: dict[str, Any]) -> str | None:
    """Why a machine that comes cannot take part, or None."""
    here, there = (f"{told['host']} ({told['address']})" for told in (ours, host))
    for key, flag in AGREED.items():
        if ours[key] != host[key]:
            return f"{here} was started with {flag} {ours[key]}, {there} with {host[key]}: give all the same"
    for key in ("accelerate", "torch"):
        if ours[key] != host[key]:
            return f"{here} has {key} {ours[key]}, {there} has {host[key]}: install the same"
    return None


def _await(question: Callable[[], bool], until: float) -> bool:
    while not question():
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


def _line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
