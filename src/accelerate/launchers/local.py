# SPDX-License-Identifier: Apache-2.0
"""Processes started directly on this machine: a single one replaces the launcher, several are its children."""

from __future__ import annotations

import os
import sys

from ..core import env
from ..runtime.topology import LAUNCHERS
from .base import AGENT, Launcher
from .script import become
from .spec import ProcessSpec


class LocalLauncher(Launcher):
    """The processes of this machine."""

    name = "local"
    unused: tuple[str, ...] = (*AGENT, "rdzv_conf", "machine_rank", "mpirun_hostfile")

    @property
    def takes_over(self) -> bool:
        """Whether the script runs in this process. Logs, prefixes and reports need a separate one."""
        spec = self.spec
        panel = spec.progress_requested and spec.progress_interval > 0 and not spec.quiet and not self._has_reporter
        watched = spec.log_dir or spec.error_file or spec.tee_of(0) or spec.max_restarts or panel
        return spec.in_place and spec.num_processes == 1 and not watched

    def processes(self, port: int | None = None, attempt: int = 0) -> list[ProcessSpec]:
        """Return the processes of this machine."""
        if self.spec.num_processes == 1:
            # It has no rank: it is the plain script, with the variables of the run.
            return [ProcessSpec(0, 0, tuple(self.spec.program.argv()), self._variables(attempt))]
        return super().processes(port, attempt)

    def run(self) -> int:
        """Run the processes. A single process may replace the launcher. Returns the exit code."""
        if self.takes_over:
            become(self.spec.program, {**self._variables(), **self._reported()})
            return 0
        return super().run()

    def _variables(self, attempt: int | None = None) -> dict[str, str | None]:
        """The variables of a single process. One that a flag requests is no rank of another launcher's run."""
        variables = self.spec.common_variables(attempt)
        if not self.spec.alone:
            return variables
        # A shell that something started by mpirun has opened still has its variables.
        for source in LAUNCHERS[1:]:
            size = env.get_int(source.world_size)
            is_set = source.requires is None or env.get(source.requires) is not None
            if size is None or not is_set or env.get(source.rank) is None:
                continue
            variables |= {source.rank: None, source.world_size: None}
            if size > 1 and not self.spec.quiet:
                print(
                    f"accelerate launch: {source.world_size}={size} is set, and one process was requested: it runs "
                    "alone. Leave the number of processes out to run as one of those ranks.",
                    file=sys.stderr,
                    flush=True,
                )
        return variables

    @property
    def _has_reporter(self) -> bool:
        """Whether another process can report the progress of a script that runs in this one: in a log file."""
        return hasattr(os, "pidfd_open") and not os.isatty(2)

    def _reported(self) -> dict[str, str | None]:
        """Variables of a script in this process whose progress another process reports; empty where none does."""
        if self.spec.quiet or not self.spec.progress_interval or not self._has_reporter:
            return {}
        from . import reporter

        folder = reporter.start(self.spec)
        return {} if folder is None else {"ACCELERATE_STATUS_DIR": folder}
