# SPDX-License-Identifier: Apache-2.0
"""Processes started directly on this machine: a single one replaces the launcher, several are its children.

The single one runs as `python script.py` would, without a second interpreter or extra frames.
"""

from __future__ import annotations

import os
import runpy
import socket
import sys
import types

from ..core import env, messages
from ..core.errors import ConfigurationError
from ..core.topology import LAUNCHERS
from .base import AGENT, Launcher
from .spec import ProcessSpec, Program


class LocalLauncher(Launcher):
    """The processes of this machine."""

    name = "local"
    unused: tuple[str, ...] = (*AGENT, "rdzv_conf", "machine_rank", "mpirun_hostfile")

    def check(self) -> None:
        """Check that the processes can reach each other: torch waits for minutes before it says that they cannot."""
        if self.spec.num_processes > 1 and self.spec.main_process_ip == "127.0.0.1":
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                try:
                    probe.connect(("127.0.0.1", 9))
                except OSError as error:
                    raise ConfigurationError(
                        f"127.0.0.1 is not an address of this machine ({error.strerror}): ip link set lo up"
                    ) from None

    @property
    def takes_over(self) -> bool:
        """Whether the script runs in this process. Logs, prefixes and reports need a separate one."""
        spec = self.spec
        panel = spec.progress_requested and spec.progress_interval > 0 and not spec.quiet
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
            become(self.spec.program, self._variables())
            return 0
        return super().run()

    def _variables(self, attempt: int | None = None) -> dict[str, str | None]:
        """The variables of a single process. One that a flag requests is no rank of another launcher's run."""
        variables = self.spec.common_variables(attempt)
        if self.spec.alone:
            # A shell that something started by mpirun has opened still has its variables.
            sizes = []
            for source in LAUNCHERS[1:]:
                for name in (source.rank, source.world_size):
                    if env.get(name) is not None:
                        variables[name] = None
                if (env.get_int(source.world_size) or 1) > 1:
                    sizes.append(source.world_size)
            if sizes and not self.spec.quiet:
                messages.show(f"{sizes[0]} is set, but one process was requested: it runs alone")
        return variables


_entered: list[Program] = []


def is_entered() -> bool:
    """Whether this process has begun to run a script."""
    return bool(_entered)


def become(program: Program, variables: dict[str, str | None]) -> None:
    """Set the variables and run the program here. Another program replaces this process."""
    env.publish(variables)
    if program.kind == "program":
        sys.stdout.flush()
        sys.stderr.flush()
        os.execvp(program.name, program.argv())
    is_module = program.kind == "module"
    if not sys.flags.safe_path and sys.path:
        if is_module:
            sys.path[0] = os.getcwd()
        else:
            sys.path[0] = os.path.dirname(os.path.realpath(program.name))
    sys.argv[:] = [program.name, *program.args]
    _entered.append(program)
    try:
        if is_module:
            runpy.run_module(program.name, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(program.name, run_name="__main__")
    except SystemExit:
        raise
    except BaseException:
        _hide_launcher_frames()
        raise


def _hide_launcher_frames() -> None:
    """Have the traceback of an uncaught exception begin at the script's own first frame."""
    inner = sys.excepthook

    def hook(
        kind: type[BaseException], error: BaseException, trace: types.TracebackType | None
    ) -> None:
        while trace is not None and trace.tb_frame.f_code is not become.__code__:
            trace = trace.tb_next
        while trace is not None and trace.tb_frame.f_globals.get("__name__") in (__name__, "runpy"):
            trace = trace.tb_next
        # An error without a frame of the script has no traceback to keep.
        inner(kind, error.with_traceback(trace), trace)

    sys.excepthook = hook
