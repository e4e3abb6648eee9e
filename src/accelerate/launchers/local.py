# SPDX-License-Identifier: Apache-2.0
"""Processes started directly on this machine: a single one replaces the launcher, several are its children."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from .base import AGENT, Launcher
from .script import become
from .spec import LaunchSpec, ProcessSpec

if TYPE_CHECKING:
    from ..config.launch_settings import Settings


class LocalLauncher(Launcher):
    """The processes of this machine.

    Args:
        spec: the launch.
        in_place: a single process may run in this one, because no caller waits for it to return.
        shows_progress: its progress was requested, which another process shows.
    """

    name = "local"

    unused: tuple[str, ...] = (*AGENT, "rdzv_conf", "machine_rank", "mpirun_hostfile")

    def __init__(self, spec: LaunchSpec, in_place: bool = False, shows_progress: bool = False) -> None:
        super().__init__(spec)
        self.in_place = in_place
        self.shows_progress = shows_progress

    @classmethod
    def create(cls, spec: LaunchSpec, settings: Settings, in_place: bool) -> Launcher:
        """The launcher for the settings of a launch. `in_place`: a single process may run in this one."""
        requested = settings.chosen("progress_interval") and settings["progress_interval"] > 0
        # In a log file, a process beside the script can show it.
        beside = hasattr(os, "pidfd_open") and not os.isatty(2)
        return cls(spec, in_place, requested and not spec.quiet and not beside)

    @property
    def takes_over(self) -> bool:
        """Whether the script runs in this process. Logs, prefixes and reports need a separate one."""
        spec = self.spec
        watched = spec.log_dir or spec.error_file or spec.tee_of(0) or spec.max_restarts or self.shows_progress
        return self.in_place and spec.num_processes == 1 and not watched

    def processes(self, port: int | None = None, attempt: int = 0) -> list[ProcessSpec]:
        """Return the processes of this machine."""
        if self.spec.num_processes == 1:
            # It has no rank: it is the plain script, with the variables of the run.
            return [ProcessSpec(0, 0, tuple(self.spec.program.argv()), self.spec.common_variables(attempt))]
        return super().processes(port, attempt)

    def run(self) -> int:
        """Run the processes. A single process may replace the launcher. Returns the exit code."""
        if self.takes_over:
            become(self.spec.program, {**self.spec.common_variables(), **self._reported()})
            return 0
        return super().run()

    def _reported(self) -> dict[str, str | None]:
        """Variables of a script in this process whose progress another process reports; empty where none does."""
        if self.spec.quiet or not self.spec.progress_interval or os.isatty(2) or not hasattr(os, "pidfd_open"):
            return {}
        from . import reporter

        folder = reporter.start(self.spec)
        return {} if folder is None else {"ACCELERATE_STATUS_DIR": folder}
