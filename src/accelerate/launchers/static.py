# SPDX-License-Identifier: Apache-2.0
"""Several machines whose ranks are given: each starts its own processes, after all launchers have met."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ..core import env
from ..core.errors import ConfigurationError
from .base import Launcher
from .ports import ReservedPort
from .spec import LaunchSpec
from .static_rendezvous import PATIENCE, Host, Link, Peer, check_address, interface_of, join

if TYPE_CHECKING:
    from .supervisor import Supervisor

DEFAULT_PORT = 29500


class StaticLauncher(Launcher):
    """The launchers meet at machine 0's `main_process_ip` and `main_process_port`; then rank 0 listens there."""

    name = "static"

    def __init__(self, spec: LaunchSpec) -> None:
        super().__init__(replace(spec, main_process_port=spec.main_process_port or DEFAULT_PORT))

    def check(self) -> None:
        super().check()
        if not self.spec.main_process_ip:
            raise ConfigurationError("several machines need --main_process_ip, the address of machine 0")
        check_address(self.spec.main_process_ip)

    def run(self) -> int:
        from .supervisor import with_restarts

        if self.spec.machine_rank > 0:
            return with_restarts(self.spec, lambda number: self._attempt(number, [join(self.spec, self._patience())]))
        # Held before anybody listens on it, so that it is ours when the meeting is over and rank 0 takes it.
        with ReservedPort(self.spec.main_process_port):
            return with_restarts(self.spec, lambda number: self._attempt(number, self._host().meet()))

    def _host(self) -> Host:
        return Host(self.spec, self.spec.main_process_port, self._patience())

    def _attempt(self, number: int, peers: list[Peer]) -> Supervisor:
        """One run of all machines' processes, from their meeting to their end."""
        from .supervisor import Supervisor

        link = Link(peers)
        try:
            self._use_interface(link)
            supervisor = Supervisor(self.spec, link)
            supervisor.run(self.processes(attempt=number))
            return supervisor
        finally:
            link.close()

    def _use_interface(self, link: Link) -> None:
        """Have gloo use the network that the launchers have met on, unless the user has named one."""
        if env.get("GLOO_SOCKET_IFNAME") is None and link.peers:
            address = link.peers[0].socket.getsockname()[0].removeprefix("::ffff:")
            name = interface_of(address)
            if name is not None:
                self.spec = replace(self.spec, variables={**self.spec.variables, "GLOO_SOCKET_IFNAME": name})

    def _patience(self) -> float:
        """Seconds to wait for the other machines: `join_timeout` of --rdzv_conf."""
        return float(self.spec.rendezvous_settings().get("join_timeout", PATIENCE))
