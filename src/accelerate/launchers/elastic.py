# SPDX-License-Identifier: Apache-2.0
"""Machines that join and leave: the rendezvous forms the group, and our supervisor runs each generation of it.

torch's own rendezvous and agent are not used. Measured with torch 2.13 on gloo, two nodes, `keep_alive_interval=1`:

- Where a rank failed on one node, the agent of the other did not notice within 120 s (here: both end within seconds,
  and both name the rank).
- Where an agent was killed, its ranks continued to run, and the other node did not notice within 75 s (here: less than
  10 s).
- Where a node was lost and the remaining ranks did not communicate, the agent did not notice within 75 s; where they
  did, it took 10 s and a restart.
- Restarts: the first of 20 hung with the store that the c10d rendezvous shares by default, because dead processes'
  addresses stay in it; 20 of 20 succeeded with `TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`. Here each generation has a new
  store.
- torch's rendezvous compares times of different machines, and counts one as lost whose clock is seconds behind.

`tests/distributed/test_launch_elastic.py` repeats the first one. When torch passes it, this engine can host its agent.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from types import FrameType

from ..core import env
from ..core.errors import ConfigurationError
from .base import Launcher, handling, print_message
from .generations import Generation, StoreLost, processes
from .ports import DEFAULT_PORT
from .rendezvous import Rendezvous, lost, settings_of
from .spec import LaunchSpec, ProcessSpec
from .static import interface_of, resolve_address
from .supervisor import supervise

# torch's stores log every connection that ends; the launcher reports what that means for the run.
LOG_LEVEL = "TORCH_CPP_LOG_LEVEL"
OWN_BACKENDS = ("static", "c10d")


class Interrupted(BaseException):
    """A signal arrived while no rank was running."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class ElasticLauncher(Launcher):
    """`nnodes` is a number of machines or a range as 1:4. The rendezvous assigns the ranks."""

    name = "elastic"
    unused: tuple[str, ...] = ("mpirun_hostfile",)

    def __init__(self, spec: LaunchSpec) -> None:
        alone = spec.num_machines == 1 and not spec.main_process_ip_given
        super().__init__(spec._replace(main_process_port=spec.main_process_port or (0 if alone else DEFAULT_PORT)))

    def _check(self) -> None:
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
        """Whether this engine runs the launch; torch's own agent handles other backends and a store in a file."""
        stored = self.spec.rendezvous_settings().get("store_type", "tcp")
        return self.spec.rdzv_backend in OWN_BACKENDS and stored == "tcp"

    def processes(self, port: int | None = None, attempt: int = 0) -> list[ProcessSpec]:
        """Those of the first generation, if all machines join."""
        return processes(self.spec, 0 if port is None else port, attempt)

    def run(self) -> int:
        """Run this machine's share of the launch. Returns the exit code."""
        address = _address_towards(self.spec.main_process_ip)
        variables = dict(self.spec.variables)
        if env.get("GLOO_SOCKET_IFNAME") is None and (name := interface_of(address)) is not None:
            variables["GLOO_SOCKET_IFNAME"] = name
        spec = self.spec._replace(variables=variables)
        if not self._is_ours:
            from .torch_agent import run_program_elastic

            return run_program_elastic(spec, address)
        if spec.num_machines > 1 and not spec.main_process_ip_given:
            print_message("no --main_process_ip: only launches on this machine can join the run")
        # Set for this process alone: it must not reach the ranks.
        variables.setdefault(LOG_LEVEL, env.get(LOG_LEVEL))
        env.publish({LOG_LEVEL: env.get(LOG_LEVEL, "FATAL")})
        with _raising_signals():
            return _run(spec._replace(variables=variables), address)


def _run(spec: LaunchSpec, address: str) -> int:
    """Join the rendezvous and run generations until the run is over for this machine. Returns the exit code."""
    rendezvous: Rendezvous | None = None
    try:
        rendezvous = Rendezvous(spec, address)
        return _run_generations(spec, rendezvous)
    except Interrupted as error:
        name = signal.Signals(error.number).name
        if rendezvous is not None and rendezvous.formed is not None:
            rendezvous.formed.interrupted(name, 128 + error.number)
        print_message(f"ended by {name}")
        return 128 + error.number
    except StoreLost as error:
        if rendezvous is None:
            raise
        raise StoreLost(lost(rendezvous, str(error))) from error
    finally:
        if rendezvous is not None:
            rendezvous.close()


def _run_generations(spec: LaunchSpec, rendezvous: Rendezvous) -> int:
    restarts = 0
    while True:
        formed, launch, port = rendezvous.form(restarts)
        formed.interval = spec.monitor_interval
        if formed.number > 1 or ":" in spec.nnodes:
            _report_group(formed, launch)
        supervisor = supervise(launch, processes(launch, port, formed.restarts), formed)
        if supervisor.interrupted:
            formed.interrupted(supervisor.interrupted, supervisor.code)
            return supervisor.code
        end = formed.wait_for_end(supervisor.finished)
        code = supervisor.code or end.code
        if end.kind == "finished":
            return 0
        if end.kind == "over":
            return code
        restarts = formed.restarts + int(formed.uses_restart)
        if restarts > spec.max_restarts:
            if end.kind != "failed":
                print_message(
                    f"{formed.remaining} of at least {formed.min_machines} machines left, no restart (--max_restarts)"
                )
            return code
        if restarts > formed.restarts:
            print_message(f"restart {restarts} of {spec.max_restarts}")


def _report_group(formed: Generation, launch: LaunchSpec) -> None:
    names = ", ".join(member.name for member in formed.members)
    first = formed.position * launch.local_processes
    last = first + launch.local_processes - 1
    ranks = f"rank {first}" if last == first else f"ranks {first} to {last}"
    count = len(formed.members)
    print_message(
        f"{count} machine{'s' if count > 1 else ''} in the group: {names}; here {ranks} of {launch.num_processes}"
    )


def _address_towards(host: str) -> str:
    """This machine's address on the network to `host`."""
    family, _, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigurationError(f"main_process_ip={host!r} cannot be reached from here: {error.strerror}") from None


def _raising_signals() -> contextlib.AbstractContextManager[None]:
    """Raise Interrupted for signals that end the run. While ranks run, their supervisor handles signals."""
    seen: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        if seen:
            os._exit(128 + number)
        seen.append(number)
        raise Interrupted(number)

    return handling(("SIGINT", "SIGTERM", "SIGHUP"), interrupt)
