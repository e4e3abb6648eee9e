# SPDX-License-Identifier: Apache-2.0
"""Machines that join and leave: torch's elastic agent with our supervisor of the ranks. Imports torch only to run."""

from __future__ import annotations

from ..core import messages
from ..core.errors import ConfigurationError
from .base import Launcher
from .ports import DEFAULT_PORT, address_towards, resolve_address
from .shared_store import run_with_store
from .spec import RENDEZVOUS_SETTINGS, LaunchSpec


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
                "several machines need --main_process_ip, the address of the machine that hosts "
                "the rendezvous"
            )

    def run(self) -> int:
        """Run this machine's share of the launch. Returns the exit code."""
        if self.spec.num_machines > 1 and not self.spec.main_process_ip_given:
            messages.show(
                "without --main_process_ip, only launches on this machine can join the run"
            )
        return run_with_store(self.spec, self._run_share)

    def _run_share(self, spec: LaunchSpec) -> int:
        # Imports torch, after the variables that silence it are set.
        from .elastic_agent import run_agent

        settings = {name: str(value) for name, value in RENDEZVOUS_SETTINGS.items()}
        settings |= spec.rendezvous_settings()
        return run_agent(spec, address_towards(spec.main_process_ip), settings)
