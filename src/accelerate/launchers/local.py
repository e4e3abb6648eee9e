# SPDX-License-Identifier: Apache-2.0
"""Processes started directly on this machine: a single one replaces the launcher, several are its children."""

from __future__ import annotations

from .base import Launcher
from .script import become
from .spec import LaunchSpec, ProcessSpec


class LocalLauncher(Launcher):
    """`in_place`: a single process may run in this one, because no caller waits for it to return."""

    name = "local"

    def __init__(self, spec: LaunchSpec, in_place: bool = False) -> None:
        super().__init__(spec)
        self.in_place = in_place

    @property
    def takes_over(self) -> bool:
        """Whether the script runs in this process. Logs, prefixes and reports need a separate one."""
        spec = self.spec
        watched = spec.log_dir or spec.error_file or spec.tee_of(0) or spec.max_restarts
        return self.in_place and spec.num_processes == 1 and not watched

    def processes(self, port: int | None = None, attempt: int = 0) -> list[ProcessSpec]:
        """Return the processes of this machine."""
        if self.spec.num_processes == 1:
            return [ProcessSpec(0, 0, tuple(self.spec.program.argv()), self._single_variables(attempt))]
        return super().processes(port, attempt)

    def _single_variables(self, attempt: int = 0) -> dict[str, str | None]:
        """A single process has no rank: it is the plain script, with the variables of the run."""
        variables = dict(self.spec.variables)
        if self.spec.threads is not None:
            variables["OMP_NUM_THREADS"] = str(self.spec.threads)
        if self.spec.max_restarts:
            variables["TORCHELASTIC_RESTART_COUNT"] = str(attempt)
        return variables

    def run(self) -> int:
        """Run the processes. A single process may replace the launcher. Returns the exit code."""
        if self.takes_over:
            become(self.spec.program, self._single_variables())
            return 0
        return super().run()
