# SPDX-License-Identifier: Apache-2.0
"""Processes started directly on this machine: one is this very process, several are its children."""

from __future__ import annotations

from .base import Launcher
from .ports import ReservedPort
from .script import become
from .spec import LaunchSpec, ProcessSpec


class LocalLauncher(Launcher):
    """`in_place`: a lone process may take this one over, because nobody waits for it to return."""

    name = "local"

    def __init__(self, spec: LaunchSpec, in_place: bool = False) -> None:
        super().__init__(spec)
        self.in_place = in_place

    @property
    def takes_over(self) -> bool:
        """Whether the script runs as this very process. Logs, marks and reports need a process of its own."""
        spec = self.spec
        watched = spec.log_dir or spec.error_file or spec.tee_of(0) or spec.max_restarts
        return self.in_place and spec.num_processes == 1 and not watched

    def processes(self, port: int | None = None, attempt: int = 0) -> list[ProcessSpec]:
        if self.spec.num_processes == 1:
            return [ProcessSpec(0, 0, tuple(self.spec.program.argv()), self._lone_variables(attempt))]
        return super().processes(port, attempt)

    def _lone_variables(self, attempt: int = 0) -> dict[str, str | None]:
        """A lone process has no rank: it is the plain script, with the variables of the run."""
        variables = dict(self.spec.variables)
        if self.spec.threads is not None:
            variables["OMP_NUM_THREADS"] = str(self.spec.threads)
        if self.spec.max_restarts:
            variables["TORCHELASTIC_RESTART_COUNT"] = str(attempt)
        return variables

    def run(self) -> int:
        if self.takes_over:
            become(self.spec.program, self._lone_variables())
            return 0
        # Imported here: a lone process needs none of it, and starts faster without.
        from .supervisor import Supervisor, with_restarts

        def attempt(number: int) -> Supervisor:
            supervisor = Supervisor(self.spec)
            # Each attempt meets at a port of its own: nobody can reach a dead one's peers.
            with ReservedPort(self.spec.main_process_port) as port:
                supervisor.run(self.processes(port.number, number))
            return supervisor

        return with_restarts(self.spec, attempt)
