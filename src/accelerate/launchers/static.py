# SPDX-License-Identifier: Apache-2.0
"""Several machines whose ranks are given: each starts its own processes, after all launchers have met."""

from __future__ import annotations

from dataclasses import replace

from ..core import env
from ..core.errors import ConfigurationError
from .base import Launcher
from .meeting import PATIENCE, Host, Link, check_address, interface_of, join
from .ports import HeldPort
from .spec import LaunchSpec

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
        if self.spec.machine_rank == 0:
            # Held before anybody listens on it, so that it is ours when the meeting is over and rank 0 takes it.
            with HeldPort(self.spec.main_process_port):
                return self._run(Link(Host(self.spec, self.spec.main_process_port, self._patience()).meet()))
        return self._run(Link([join(self.spec, self._patience())]))

    def _run(self, link: Link) -> int:
        from .supervisor import Supervisor

        try:
            self._use_interface(link)
            return Supervisor(self.spec, link).run(self.processes())
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
