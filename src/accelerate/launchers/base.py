# SPDX-License-Identifier: Apache-2.0
"""A launcher starts the processes of a LaunchSpec and waits for them. The base runs them on this machine."""

from __future__ import annotations

import contextlib
import shlex
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import TYPE_CHECKING

from .ports import ReservedPort
from .spec import LaunchSpec, ProcessSpec

if TYPE_CHECKING:
    from .supervisor import Supervisor

# Options of the elastic agent, and those of the supervisor.
AGENT = ("monitor_interval", "rdzv_id", "role")
SUPERVISION = ("tee", "log_dir", "error_file", "stop_timeout", "max_restarts")


class Interrupted(BaseException):
    """A signal has ended this launcher's part of a run."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Launcher:
    """One way to start processes. Subclasses override `processes`, and `attempt` or `run` where theirs differ."""

    name = "base"
    # Options that this launcher does not use.
    unused: tuple[str, ...] = ()
    # Whether the processes run on machines whose devices this one cannot count.
    remote: bool = False
    # Whether the processes of this launch share this machine's processors and memory.
    uses_this_machine: bool = True
    # Whether rank 0 is on this machine, where its port can be reserved.
    reserves_port: bool = True

    def __init__(self, spec: LaunchSpec) -> None:
        self.spec = spec

    @classmethod
    def create(cls, spec: LaunchSpec) -> Launcher:
        """The launcher of a launch: this one, or a variant of it."""
        return cls(spec)

    def check(self) -> None:
        """Check before anything starts.

        Raises:
            ConfigurationError: this launcher cannot run the launch.
        """

    def processes(self, port: int | None = None, attempt: int = 0) -> list[ProcessSpec]:
        """The processes of this machine; `attempt` counts restarts, `port` is that of rank 0."""
        port = self.spec.main_process_port if port is None else port
        return [
            self.spec.process(local_rank, port, attempt)
            for local_rank in range(self.spec.local_processes)
        ]

    def attempt(self, number: int) -> Supervisor:
        """Run all processes once, after `number` failed attempts."""
        from .supervisor import supervise

        if not self.reserves_port:
            return supervise(self.spec, self.processes(attempt=number))
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
            variables = sorted(process.variables.items())
            lines += [f"unset {name}" for name, text in variables if text is None]
            for name, text in variables:
                if name == "MASTER_PORT" and text == "0":
                    lines.append("export MASTER_PORT=<a free port>")
                elif text is not None:
                    lines.append(f"export {name}={shlex.quote(text)}")
            lines.append(shlex.join(process.argv))
            lines.append("")
        return "\n".join(lines).rstrip()


@contextlib.contextmanager
def handling(
    names: Sequence[str], handler: Callable[[int, FrameType | None], None]
) -> Iterator[None]:
    """Call a handler for signals that arrive in the block. Outside the main thread nothing can."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    former = {}
    for name in names:
        if hasattr(signal, name):
            number = getattr(signal, name)
            former[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, handler_before in former.items():
            signal.signal(number, handler_before)
