# SPDX-License-Identifier: Apache-2.0
"""Machines that join and leave: torch's elastic agent with our supervisor of the ranks. Imports torch only to run."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from types import FrameType

from ..core import env, messages
from ..core.errors import ConfigurationError, LaunchError
from .base import Interrupted, Launcher, handling
from .ports import DEFAULT_PORT, interface_of, resolve_address
from .spec import RENDEZVOUS_SETTINGS, LaunchSpec

# Variables of this process alone: its ranks do not get them. The agent and the stores of torch log each event; the
# launcher reports what that means. Each group of ranks has a store of its own: the store that torch's agent
# shares by default keeps the addresses of dead processes, and the restarted ranks wait for those.
QUIET = {
    "LOGLEVEL": "CRITICAL",
    "TORCH_CPP_LOG_LEVEL": "FATAL",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}


class ElasticLauncher(Launcher):
    """`nnodes` is a number of machines or a range as 1:4. torch's rendezvous assigns the ranks."""

    name = "elastic"
    unused: tuple[str, ...] = ("mpirun_hostfile",)

    def __init__(self, spec: LaunchSpec) -> None:
        alone = spec.num_machines == 1 and not spec.main_process_ip_given
        super().__init__(
            spec._replace(
                main_process_port=spec.main_process_port or (0 if alone else DEFAULT_PORT)
            )
        )

    def check(self) -> None:
        """Check what this engine requires."""
        resolve_address(self.spec.main_process_ip)
        if (
            self.spec.num_machines > 1
            and not self.spec.main_process_ip_given
            and ":" not in self.spec.nnodes
        ):
            raise ConfigurationError(
                "several machines need --main_process_ip, the address of the machine that holds the rendezvous"
            )

    def run(self) -> int:
        """Run this machine's share of the launch. Returns the exit code."""
        if self.spec.num_machines > 1 and not self.spec.main_process_ip_given:
            messages.show("no --main_process_ip: only launches on this machine can join the run")
        address = _address_towards(self.spec.main_process_ip)
        settings = {
            name: str(value) for name, value in RENDEZVOUS_SETTINGS.items()
        } | self.spec.rendezvous_settings()
        variables = {**self.spec.variables, **{name: env.get(name) for name in QUIET}}
        if env.get("GLOO_SOCKET_IFNAME") is None and (name := interface_of(address)) is not None:
            variables["GLOO_SOCKET_IFNAME"] = name
        env.publish({name: env.get(name, text) for name, text in QUIET.items()})
        try:
            with _raising_signals():
                from .elastic_agent import run_agent

                code = run_agent(self.spec._replace(variables=variables), address, settings)
        except Interrupted as error:
            messages.show(f"ended by {signal.Signals(error.number).name}")
            code = 128 + error.number
        except LaunchError as error:
            messages.show(f"error: {error}")
            code = 1
        if self.spec.in_place:
            # A thread of torch in a call of its store aborts the interpreter's exit, or holds it up while the network
            # is down.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        return code


def _address_towards(host: str) -> str:
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


def _raising_signals() -> contextlib.AbstractContextManager[None]:
    """Raise Interrupted for signals that end the run. While ranks run, their supervisor handles signals."""
    seen: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        if seen:
            os._exit(128 + number)
        seen.append(number)
        raise Interrupted(number)

    return handling(("SIGINT", "SIGTERM", "SIGHUP"), interrupt)
