# SPDX-License-Identifier: Apache-2.0
"""A process on a machine of a Ray cluster: the actor that starts it there, and the rank that is supervised here."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..core import env
from ..core.device_kinds import VISIBLE
from ..core.errors import LaunchError
from ..core.imports import version_of
from ..core.version import __version__
from .ports import ReservedPort, interface_of
from .process import Rank, die_with
from .spec import LaunchSpec, ProcessSpec, Program
from .streams import write_all
from .supervisor import Supervisor

# Seconds for which a call waits for output, and between two looks at the end of the process.
READ_WAIT, LOOK = 10.0, 0.2
# Seconds in which the end of a killed process must be reported.
GONE_WAIT = 10.0
# The exit code of a process that SIGKILL has ended.
KILLED = -9


def versions() -> dict[str, str]:
    """The versions that have to be equal on all machines."""
    return {"accelerate": __version__, "torch": version_of("torch").base_version}


class RayWorker:
    """Starts a process on its machine, reads its output and sends it signals. On Linux the process dies with it.

    `read` and the other methods are called from different threads.
    """

    def __init__(self) -> None:
        self._popen: subprocess.Popen[bytes] | None = None
        self._selector = selectors.DefaultSelector()
        self._port: ReservedPort | None = None

    def introduce(self) -> dict[str, Any]:
        """The machine of this worker, its place in the cluster, and its versions."""
        import ray

        context, address = ray.get_runtime_context(), ray.util.get_node_ip_address()
        devices: list[str] = []
        for identifiers in context.get_accelerator_ids().values():
            devices += [str(identifier) for identifier in identifiers]
        visible = {}
        for name in VISIBLE:
            text = env.get(name)
            if text is not None:
                visible[name] = text
        return {
            "host": socket.gethostname(),
            "node": str(context.get_node_id()),
            "address": str(address),
            "interface": interface_of(address),
            "devices": devices[:1],
            "visible": visible,
            "versions": versions(),
        }

    def reserve_port(self, port: int) -> int:
        """Reserve a port for rank 0 (0: any free one) as long as this worker lives. Returns its number."""
        self._port = ReservedPort(port)
        return self._port.number

    def start(
        self, program: Program, variables: Mapping[str, str | None], folder: str | None
    ) -> int:
        """Start the program in a folder (None: the worker's own). Returns the process id.

        Raises:
            LaunchError: the folder or the program is not on this machine.
        """
        host, where = socket.gethostname(), Path(folder or ".")
        if not where.is_dir():
            raise LaunchError(f"the folder {folder} does not exist on {host}")
        if program.kind == "script" and not (where / program.name).exists():
            raise LaunchError(
                f"the script {program.name} does not exist in {where.resolve()} on {host}"
            )
        problems: list[OSError] = []
        begun = threading.Event()

        def run() -> None:
            try:
                self._popen = subprocess.Popen(
                    program.argv(),
                    cwd=where,
                    env=env.child_environment(variables),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    process_group=0,
                    preexec_fn=die_with(os.getpid()),
                )
            except OSError as error:
                problems.append(error)
            begun.set()
            if self._popen is not None:
                self._popen.wait()

        # The kernel kills the process at the end of the thread that has started it: this one waits for the process.
        threading.Thread(target=run, daemon=True).start()
        begun.wait()
        if self._popen is None:
            raise LaunchError(f"{program.name} cannot be started on {host}: {problems[0]}")
        for number, stream in ((1, self._popen.stdout), (2, self._popen.stderr)):
            assert stream is not None
            self._selector.register(stream, selectors.EVENT_READ, number)
        return self._popen.pid

    def read(self) -> tuple[list[tuple[int, bytes]], int | None]:
        """Wait for output. Returns pieces of it, each with 1 or 2 for its stream, and the exit code.

        The code is None until the process has ended and all its output has been returned.
        """
        assert self._popen is not None
        for _ in range(int(READ_WAIT / LOOK)):
            code = self._popen.returncode
            pieces = []
            for key, _ in self._selector.select(0.0 if code is not None else LOOK):
                data = os.read(key.fd, 65536)
                if data:
                    pieces.append((key.data, data))
                else:
                    self._selector.unregister(key.fileobj)
            if pieces or code is not None:
                return pieces, None if pieces else code
        return [], None

    def signal(self, number: int, group: bool) -> None:
        """Send a signal to the process, or to its process group."""
        assert self._popen is not None
        send = os.kill
        if group and sys.platform != "win32":
            send = os.killpg
        with contextlib.suppress(ProcessLookupError, PermissionError):
            send(self._popen.pid, number)


class RemoteProcess:
    """A process on another machine, as a rank needs it. `send(number, group)` forwards a signal to its worker."""

    def __init__(self, pid: int, host: str, send: Callable[[int, bool], object]) -> None:
        self.pid = pid
        self.host = host
        self.send = send
        # The descriptors that receive the output of the process.
        self.sinks: dict[int, int] = {}
        self._code: int | None = None
        self._ended = threading.Event()

    def take(self, pieces: Sequence[tuple[int, bytes]], code: int | None) -> None:
        """Process what its worker has read."""
        for number, data in pieces:
            write_all(self.sinks[number], data)
        if code is not None:
            self._code = code
            self._ended.set()
            # The end of the streams wakes the supervisor.
            for sink in self.sinks.values():
                os.close(sink)

    def poll(self) -> int | None:
        """Return the exit code, or None while the process runs."""
        return self._code

    def wait(self) -> int:
        """The exit code; SIGKILL's where the worker does not report it in time."""
        if not self._ended.wait(GONE_WAIT):
            self._code = KILLED
        assert self._code is not None
        return self._code


class RemoteRank(Rank):
    """A rank whose process runs on another machine."""

    def __init__(
        self, spec: LaunchSpec, process: ProcessSpec, folder: Path | None, remote: RemoteProcess
    ) -> None:
        self._remote = remote
        super().__init__(spec, process, folder)

    def _start(self, output: int, error: int) -> RemoteProcess:
        self._remote.sinks = {1: os.dup(output), 2: os.dup(error)}
        return self._remote

    @property
    def host(self) -> str:
        """The name of the machine."""
        return self._remote.host

    def forward(self, number: int) -> None:
        """Send a signal that does not end the run to the process alone."""
        if self.code is None:
            self._remote.send(number, False)

    def _send(self, number: int) -> None:
        self._remote.send(number, True)


class RemoteSupervisor(Supervisor):
    """Supervises processes of other machines. `remote`: the process of each rank; `started` is called at the start."""

    def __init__(
        self, spec: LaunchSpec, remote: Sequence[RemoteProcess], started: Callable[[], None]
    ) -> None:
        super().__init__(spec)
        self._remote, self._started = remote, started

    def make_rank(self, process: ProcessSpec, folder: Path | None) -> Rank:
        """Return the rank of a remote process."""
        return RemoteRank(self.spec, process, folder, self._remote[process.rank])

    def _start(self, processes: Sequence[ProcessSpec]) -> None:
        super()._start(processes)
        self._started()
