# SPDX-License-Identifier: Apache-2.0
"""Several machines with fixed ranks: their launchers meet in a store of machine 0, compare options, start together.

They stay connected for the whole run, restarts included: a failure, or the loss of a machine, ends the ranks of all.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import signal
import socket
import time
from typing import TYPE_CHECKING, Any

from ..core import messages
from ..core.errors import ConfigurationError, LaunchError
from ..core.objects import ranks_in_words
from ..core.version import __version__
from .base import AGENT, Interrupted, Launcher
from .ports import DEFAULT_PORT, ReservedPort, Waiting, connect, interface_of, resolve_address
from .shared_store import LOOK, News, SharedStore, run_with_store, tcp_store
from .spec import LaunchSpec
from .supervisor import Supervisor, supervise, with_restarts

if TYPE_CHECKING:
    from torch.distributed import Store

# Seconds without a heartbeat after which a machine is lost.
SILENCE = 6.0
# Seconds that machine 0 has more than its `join_timeout` to answer the others.
REPLY = 5.0
# Options and versions that must be equal on all machines.
SHARED = ("--num_machines", "--num_processes", "--max_restarts", "accelerate", "torch")


def identity(spec: LaunchSpec) -> dict[str, Any]:
    """What a launcher reports about itself."""
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "--num_machines": spec.num_machines,
        "--num_processes": spec.num_processes,
        "--max_restarts": spec.max_restarts,
        "accelerate": __version__,
        "torch": importlib.metadata.version("torch").partition("+")[0],
    }


def open_stores(spec: LaunchSpec) -> tuple[Store, Store | None]:
    """The store of a run, in the launcher of machine 0, and on machine 0 the store where the others find its port.

    That one is at the port that all machines know. It is closed before the ranks start, since rank 0 listens there.

    Raises:
        LaunchError: machine 0 cannot be reached in time.
    """
    from torch.distributed import DistError

    timeout = spec.join_timeout + REPLY
    host, port = spec.main_process_ip, spec.main_process_port
    if spec.machine_rank:
        connect(host, port, spec.join_timeout).close()
    try:
        if spec.machine_rank:
            meeting = tcp_store(host, port, False, REPLY)
            run_port = int(meeting.get("accelerate/port"))
            return tcp_store(host, run_port, False, timeout), None
        store = tcp_store("127.0.0.1", 0, True, timeout)
        meeting = tcp_store("127.0.0.1", port, True, timeout)
    except (DistError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise LaunchError(
            f"{host}:{port} does not answer as the launcher of machine 0: {reason}"
        ) from None
    meeting.set("accelerate/port", str(store.port))
    return store, meeting


class Machines(SharedStore):
    """The launchers of a run with fixed ranks. Every attempt has keys of its own in the store.

    Args:
        spec: the launch.
        run_store: the store of the run.
        meeting: the store where the others find its port, on machine 0.
    """

    cause_timeout: float = SILENCE + 3.0
    interval: float = LOOK

    def __init__(self, spec: LaunchSpec, run_store: Store, meeting: Store | None = None) -> None:
        super().__init__(
            f"machine 0 at {spec.main_process_ip}:{spec.main_process_port} is lost: its launcher has ended, or "
            "cannot be reached",
            SILENCE + 3.0,
        )
        self.spec = spec
        self.run_store = run_store
        self._meeting = meeting
        self._others = range(1, spec.num_machines)
        self._signs_of_life: dict[int, tuple[bytes, float]] = {}
        self._signs = 0

    def meet(self, attempt: int) -> None:
        """Wait until the launchers of all machines are ready for an attempt.

        Raises:
            ConfigurationError: a machine has other options or another version, or two have the same rank.
            LaunchError: a machine has not come within `join_timeout`, or machine 0 is lost.
        """
        from torch.distributed import PrefixStore

        self.unfollow()
        store = PrefixStore(f"accelerate/attempt/{attempt}", self.run_store)
        self.store = store
        try:
            self._enter(store, attempt)
            answer = self._await_answer(store, attempt)
        except RuntimeError as error:
            raise LaunchError(self.lost_message) from error
        if "refused" in answer:
            raise ConfigurationError(answer["refused"])
        if "error" in answer:
            raise LaunchError(answer["error"])
        self.follow(store)

    def _enter(self, store: Store, attempt: int) -> None:
        """Report that this machine is ready; before that, refuse the run where it cannot be one of its machines."""
        machine = self.spec.machine_rank
        me = identity(self.spec)
        if machine and not attempt:
            first = json.loads(store.get("ready/0"))
            for name in SHARED:
                if me[name] != first[name]:
                    text = (
                        f"machine {machine} ({me['host']}) has {name} {me[name]}, but machine 0 "
                        f"({first['host']}) has {first[name]}: all machines need the same"
                    )
                    self._settle({"refused": text})
        store.set(f"alive/{machine}", "0")
        entry = json.loads(store.compare_set(f"ready/{machine}", "", json.dumps(me)))
        if entry != me:
            hosts = f"{entry['host']} and {me['host']}"
            self._settle({"refused": f"--machine_rank {machine} was used on two machines: {hosts}"})

    def _await_answer(self, store: Store, attempt: int) -> dict[str, str]:
        """Wait for what becomes of the attempt. Machine 0 starts it once all are ready, or ends it after the limit."""
        spec = self.spec
        waiting = Waiting()
        missing = list(range(spec.num_machines))
        while not store.check(["answer"]):
            missing = [machine for machine in missing if not store.check([f"ready/{machine}"])]
            missing_text = f"{ranks_in_words(missing, 'machine')} of {spec.num_machines}"
            is_due = waiting.is_due()
            if is_due and missing:
                messages.show(f"waiting for {missing_text}")
            if spec.machine_rank:
                if waiting.seconds > spec.join_timeout + REPLY:
                    return {"error": f"machine 0 did not answer within {waiting.seconds:.0f} s"}
            elif not missing:
                # Its port is rank 0's from here on. The others have left it.
                self._meeting = None
                self._settle({})
            elif waiting.seconds > spec.join_timeout:
                text = (
                    f"{missing_text} did not arrive within {spec.join_timeout:.0f} s (--rdzv_conf "
                    "join_timeout)"
                )
                if attempt:
                    text = f"no restart: {text}"
                self._settle({"error": text})
            elif is_due and interface_of(resolve_address(spec.main_process_ip)) is None:
                messages.show(f"{spec.main_process_ip} is not an address of this machine")
            time.sleep(0.05)
        answer: dict[str, str] = json.loads(store.get("answer"))
        return answer

    def _settle(self, answer: dict[str, str]) -> None:
        """Decide what becomes of the attempt, unless that is decided."""
        assert self.store is not None
        self.store.compare_set("answer", "", json.dumps(answer))

    def look(self, store: Store) -> News:
        """Send a heartbeat; machine 0 also looks for those of the others."""
        self._signs += 1
        store.set(f"alive/{self.spec.machine_rank}", str(self._signs))
        if self.spec.machine_rank == 0:
            self._find_lost(store)
        return super().look(store)._replace(finished=int(store.add("finished", 0)))

    def _find_lost(self, store: Store) -> None:
        now = time.monotonic()
        signs = store.multi_get([f"alive/{machine}" for machine in self._others])
        for machine, sign in zip(self._others, signs, strict=True):
            last, since = self._signs_of_life.get(machine, (b"", now))
            if sign != last:
                self._signs_of_life[machine] = (sign, now)
            elif now - since > SILENCE:
                host = json.loads(store.get(f"ready/{machine}"))["host"]
                text = f"machine {machine} ({host}) is lost: its launcher or its network connection has ended"
                self.failed(text, 1, final=True)

    def follow(self, store: Store) -> None:
        """Follow what the launchers write to the store of an attempt."""
        self._signs_of_life = {}
        super().follow(store)

    def interrupted(self, name: str, code: int) -> None:
        """End the run on all machines, because of a signal here."""
        text = f"machine {self.spec.machine_rank} ({socket.gethostname()}) was ended by {name}"
        self.failed(text, code, final=True)
        if self.ended.is_set():
            # The other machines may wait for this one in `meet`.
            with contextlib.suppress(RuntimeError):
                self._settle({"error": text})

    def await_others(self, ended: Supervisor) -> None:
        """After the ranks here have ended without an error: wait for those of the other machines, which may fail."""
        assert self.store is not None

        def fail(reason: str, code: int, final: bool) -> None:
            messages.show(reason)
            ended.code = code
            ended.final = final

        with contextlib.suppress(RuntimeError):
            self.store.add("finished", 1)
        while not ended.code and not ended.final and self.news.finished < self.spec.num_machines:
            time.sleep(LOOK)
            self.tick(fail)

    def close(self) -> None:
        """Leave the run. Machine 0 keeps the store until the others have left, or have had the time for it."""
        if self.is_lost:
            return
        with contextlib.suppress(RuntimeError):
            if self.spec.machine_rank:
                self.run_store.add("accelerate/left", 1)
                return
            deadline = time.monotonic() + self.spec.stop_timeout + SILENCE
            while time.monotonic() < deadline:
                if self.run_store.add("accelerate/left", 0) >= len(self._others):
                    return
                time.sleep(0.05)


class StaticLauncher(Launcher):
    """The launchers meet at machine 0's `main_process_ip` and `main_process_port`; then rank 0 listens there."""

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
                f"without --main_process_ip, machine 0 is expected at {spec.main_process_ip}, so "
                "only launches on this machine can join"
            )
        return run_with_store(spec, self._run_share)

    def _run_share(self, spec: LaunchSpec) -> int:
        self.spec = spec
        reserved: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        if spec.machine_rank == 0:
            # Reserved before the launcher listens on it, and until rank 0 does.
            reserved = ReservedPort(spec.main_process_port)
        with reserved:
            machines = Machines(spec, *open_stores(spec))

            def run_once(attempt: int) -> Supervisor:
                machines.meet(attempt)
                supervisor = supervise(spec, self.processes(attempt=attempt), machines)
                if supervisor.code == 0:
                    machines.await_others(supervisor)
                return supervisor

            try:
                return with_restarts(spec, run_once)
            except Interrupted as error:
                name = signal.Signals(error.number).name
                machines.interrupted(name, 128 + error.number)
                raise
            finally:
                machines.close()
