# SPDX-License-Identifier: Apache-2.0
"""A launcher starts the processes of a LaunchSpec and waits for them. The base runs them on this machine."""

from __future__ import annotations

import shlex
import socket
import sys
from typing import TYPE_CHECKING

from .ports import ReservedPort
from .spec import LaunchSpec, ProcessSpec

if TYPE_CHECKING:
    from .supervisor import Supervisor


class Launcher:
    """One way to start processes. Subclasses override `processes`, and `attempt` or `run` where theirs differ."""

    name = "base"

    def __init__(self, spec: LaunchSpec) -> None:
        self.spec = spec

    def check(self) -> None:
        """Check before anything starts.

        Raises:
            ConfigurationError: this launcher cannot run the launch.
        """
        self.spec.check()

    def processes(self, port: int | None = None, attempt: int = 0) -> list[ProcessSpec]:
        """The processes of this machine; `attempt` counts restarts, `port` is that of rank 0."""
        port = self.spec.main_process_port if port is None else port
        return [self.spec.process(local_rank, port, attempt) for local_rank in range(self.spec.local_processes)]

    def attempt(self, number: int) -> Supervisor:
        """Run all processes once, after `number` failed attempts."""
        from .supervisor import supervise

        # Each attempt has its own port, so that no rank connects to a process of an earlier one.
        with ReservedPort(self.spec.main_process_port) as port:
            return supervise(self.spec, self.processes(port.number, number))

    def run(self) -> int:
        """Run the launch to its end, with restarts. Returns the exit code."""
        # Imported here: a single process that runs in place does not need it, and starts faster.
        from .supervisor import with_restarts

        return with_restarts(self.spec, self.attempt)

    def dry_run(self) -> str:
        """What `run` would start: command and variables of each process of this machine."""
        lines = []
        for process in self.processes():
            lines.append(f"# rank {process.rank} on {socket.gethostname()}")
            lines += [f"unset {name}" for name, text in sorted(process.variables.items()) if text is None]
            lines += [_assignment(name, text) for name, text in sorted(process.variables.items()) if text is not None]
            lines.append(shlex.join(process.argv))
            lines.append("")
        return "\n".join(lines).rstrip()


def print_message(text: str) -> None:
    """Print a message of the launcher."""
    print(f"accelerate launch: {text}", file=sys.stderr, flush=True)


def _assignment(name: str, text: str) -> str:
    if name == "MASTER_PORT" and text == "0":
        return "export MASTER_PORT=<a free port>"
    return f"export {name}={shlex.quote(text)}"
