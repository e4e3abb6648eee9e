# SPDX-License-Identifier: Apache-2.0
"""A launcher starts the processes of a LaunchSpec and waits for them. The base shows what would be started."""

from __future__ import annotations

import shlex
import socket

from .spec import LaunchSpec, ProcessSpec


class Launcher:
    """One way to start processes. Subclasses override `processes` where theirs differ, and `run`."""

    name = "base"

    def __init__(self, spec: LaunchSpec) -> None:
        self.spec = spec

    def check(self) -> None:
        """ConfigurationError for what this launcher cannot do, before anything is started."""
        self.spec.check()

    def processes(self, port: int | None = None, attempt: int = 0) -> list[ProcessSpec]:
        """The processes of this machine; `attempt` counts restarts."""
        shown = self.spec.main_process_port if port is None else port
        return [self.spec.process(local_rank, shown, attempt) for local_rank in range(self.spec.local_processes)]

    def run(self) -> int:
        """Start everything, wait, and return the exit code. The base only shows it."""
        print(self.dry_run())
        return 0

    def dry_run(self) -> str:
        """What `run` would start: command and variables of each process of this machine."""
        told = []
        for process in self.processes():
            told.append(f"# rank {process.rank} on {socket.gethostname()}")
            told += [f"unset {name}" for name, text in sorted(process.variables.items()) if text is None]
            told += [_assignment(name, text) for name, text in sorted(process.variables.items()) if text is not None]
            told.append(shlex.join(process.argv))
            told.append("")
        return "\n".join(told).rstrip()


def _assignment(name: str, text: str) -> str:
    if name == "MASTER_PORT" and text == "0":
        return "export MASTER_PORT=<a free port>"
    return f"export {name}={shlex.quote(text)}"
