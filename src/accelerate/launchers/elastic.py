# SPDX-License-Identifier: Apache-2.0
"""Machines that come and go: torch's rendezvous says who takes part, and a round is watched like any launch."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from types import FrameType

from ..core import env
from ..core.errors import ConfigurationError
from .base import Launcher
from .generations import Generation, processes
from .messenger import StoreLost
from .rendezvous import Rendezvous, lost, settings_of
from .spec import LaunchSpec, ProcessSpec
from .static import DEFAULT_PORT
from .static_rendezvous import interface_of, resolve_address, say
from .supervisor import Supervisor

# torch's own stores and agents speak of every connection that ends; what they mean for the run is said by us.
QUIET = {"TORCH_CPP_LOG_LEVEL": "FATAL", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
OWN = ("static", "c10d")


class Interrupted(BaseException):
    """A signal came while no rank was running."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class ElasticLauncher(Launcher):
    """`nnodes` is a number of machines or a range as 1:4. Ranks are handed out by the rendezvous."""

    name = "elastic"

    def __init__(self, spec: LaunchSpec) -> None:
        alone = spec.num_machines == 1 and not spec.main_process_ip_given
        super().__init__(replace(spec, main_process_port=spec.main_process_port or (0 if alone else DEFAULT_PORT)))

    def check(self) -> None:
        super().check()
        resolve_address(self.spec.main_process_ip)
        if self.spec.num_machines > 1 and not self.spec.main_process_ip_given and ":" not in self.spec.nnodes:
            raise ConfigurationError(
                "several machines need --main_process_ip, the address of the machine that holds the rendezvous"
            )
        if self._is_ours:
            settings_of(self.spec)
        elif self.spec.tee != "0" and self.spec.log_dir is None:
            raise ConfigurationError(
                f"under --rdzv_backend {self.spec.rdzv_backend} lines are marked only when they are also kept: give "
                "--log_dir"
            )

    @property
    def _is_ours(self) -> bool:
        """Other backends, and a store in a file, are handled by torch's own agent."""
        stored = self.spec.rendezvous_settings().get("store_type", "tcp")
        return self.spec.rdzv_backend in OWN and stored == "tcp"

    def processes(self, port: int | None = None, attempt: int = 0) -> list[ProcessSpec]:
        """As they are in the first round, if all machines come."""
        return processes(self.spec, 0 if port is None else port, attempt)

    def run(self) -> int:
        address = _address_towards(self.spec.main_process_ip)
        variables = dict(self.spec.variables)
        if env.get("GLOO_SOCKET_IFNAME") is None and (name := interface_of(address)) is not None:
            variables["GLOO_SOCKET_IFNAME"] = name
        spec = replace(self.spec, variables=variables)
        if not self._is_ours:
            from .torch_agent import run_program_elastic

            return run_program_elastic(spec, address)
        if spec.num_machines > 1 and not spec.main_process_ip_given:
            say("no --main_process_ip: only launches on this machine can join the run")
        # What is set for this process alone must not reach the ranks.
        for variable in QUIET:
            variables.setdefault(variable, env.get(variable))
        env.publish({variable: env.get(variable, value) for variable, value in QUIET.items()})
        with _raising_signals():
            return _run(replace(spec, variables=variables), address)


def _run(spec: LaunchSpec, address: str) -> int:
    """Meet, then run rounds until the run is over for this machine; its exit code."""
    import logging

    logging.getLogger("torch.distributed.elastic").setLevel(logging.ERROR)
    rendezvous: Rendezvous | None = None
    rounds: list[Generation] = []
    try:
        rendezvous = Rendezvous(spec, address)
        rendezvous.compare_clocks()
        return _run_rounds(spec, rendezvous, rounds)
    except Interrupted as error:
        name = signal.Signals(error.number).name
        if rounds:
            with contextlib.suppress(StoreLost):
                rounds[-1].interrupted(name, 128 + error.number)
        say(f"ended by {name}")
        return 128 + error.number
    except StoreLost as error:
        if rendezvous is None:
            raise
        raise StoreLost(lost(rendezvous, str(error))) from error
    finally:
        if rendezvous is not None:
            rendezvous.close(rounds[-1] if rounds else None)


def _run_rounds(spec: LaunchSpec, rendezvous: Rendezvous, rounds: list[Generation]) -> int:
    restarts = 0
    while True:
        formed, launch, port = rendezvous.form(restarts)
        rounds.append(formed)
        formed.interval = spec.monitor_interval
        formed.begin()
        if formed.number > 1 or ":" in spec.nnodes:
            _tell_who(formed, launch)
        supervisor = Supervisor(launch, formed)
        supervisor.run(processes(launch, port, formed.restarts))
        if supervisor.interrupted:
            formed.interrupted(supervisor.interrupted, supervisor.code)
            return supervisor.code
        end = formed.settle_end(supervisor.finished)
        code = supervisor.code or end.code
        if end.kind == "finished":
            return 0
        if end.kind == "over":
            return code
        restarts = formed.restarts + int(formed.costs)
        if restarts > spec.max_restarts:
            if end.kind != "failed":
                say(f"{formed.left} of at least {formed.least} machines left, and no restart (--max_restarts)")
            return code
        formed.gather("stopped", spec.stop_timeout + 2.0)
        if restarts > formed.restarts:
            say(f"restart {restarts} of {spec.max_restarts}")


def _tell_who(formed: Generation, launch: LaunchSpec) -> None:
    names = ", ".join(member.name for member in formed.members)
    first = formed.place * launch.local_processes
    last = first + launch.local_processes - 1
    ranks = f"rank {first}" if last == first else f"ranks {first} to {last}"
    count = len(formed.members)
    say(f"{count} machine{'s' if count > 1 else ''} in the group: {names}; here {ranks} of {launch.num_processes}")


def _address_towards(host: str) -> str:
    """This machine's own address on the network that leads to `host`."""
    family, _, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigurationError(f"main_process_ip={host!r} cannot be reached from here: {error.strerror}") from None


@contextlib.contextmanager
def _raising_signals() -> Iterator[None]:
    """Signals that end the run are errors while no rank runs; while ranks run, their supervisor catches them."""
    if threading.current_thread() is not threading.main_thread() or os.name != "posix":
        yield
        return

    seen: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if seen:
            os._exit(128 + number)
        seen.append(number)
        raise Interrupted(number)

    former = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
