# SPDX-License-Identifier: Apache-2.0
"""A process on another machine: the worker that starts it there, and the rank that is supervised here."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..core import env
from ..core.errors import LaunchError
from ..core.imports import version_of
from ..core.version import __version__
from .ports import ReservedPort
from .process import Rank, guarded
from .spec import LaunchSpec, ProcessSpec, Program
from .supervisor import Supervisor

# Seconds for which a call waits for output.
READ_WAIT = 10.0
# Seconds in which the end of a killed process must be reported.
GONE_WAIT = 10.0
CHUNK = 65536
_ENDED = 0


class RayWorker:
    """Starts a process on its machine, reads its output and sends it signals. On Linux the process dies with it.

    `read` and the other methods are called from different threads.
    """

    def __init__(self) -> None:
        self._popen: subprocess.Popen[bytes] | None = None
        self._selector = selectors.DefaultSelector()
        self._started = threading.Event()
        self._problem: OSError | None = None
        self._port: ReservedPort | None = None

    def introduce(self) -> dict[str, Any]:
        """The machine and its versions."""
        return {
            "host": socket.gethostname(),
            "accelerate": __version__,
            "torch": version_of("torch").base_version,
        }

    def reserve_port(self, port: int) -> int:
        """Reserve a port for rank 0 (0: any free one) as long as this worker lives. Returns its number."""
        self._port = ReservedPort(port)
        return self._port.number

    def start(self, program: Program, variables: Mapping[str, str | None], folder: str | None) -> int:
        """Start the program in a folder (None: the worker's own). Returns the process id.

        Raises:
            LaunchError: the folder or the program is not on this machine.
        """
        where = Path(folder or ".")
        if not where.is_dir():
            raise LaunchError(f"there is no folder {folder} on {socket.gethostname()}")
        if program.kind == "script" and not (where / program.name).exists():
            raise LaunchError(f"there is no script {program.name} in {where.resolve()} on {socket.gethostname()}")
        # The kernel treats the end of the starting thread as that of the starter: this thread lives as long as the
        # process.
        threading.Thread(target=self._keep, args=(program, variables, where), daemon=True).start()
        self._started.wait()
        if self._popen is None:
            raise LaunchError(f"{program.name} cannot be started on {socket.gethostname()}: {self._problem}")
        return self._popen.pid

    def _keep(self, program: Program, variables: Mapping[str, str | None], where: Path) -> None:
        try:
            self._popen = subprocess.Popen(
                [*guarded(os.getpid()), *program.argv()],
                cwd=where,
                env=env.child_environment(variables),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                process_group=0,
            )
        except OSError as error:
            self._problem = error
            self._started.set()
            return
        for number, stream in ((1, self._popen.stdout), (2, self._popen.stderr)):
            assert stream is not None
            self._selector.register(stream, selectors.EVENT_READ, number)
        with contextlib.suppress(OSError, AttributeError):
            self._selector.register(os.pidfd_open(self._popen.pid), selectors.EVENT_READ, _ENDED)
        self._started.set()
        self._popen.wait()

    def read(self) -> tuple[list[tuple[int, bytes]], int | None]:
        """Wait for output. Returns pieces of it, each with 1 or 2 for its stream, and the exit code.

        The code is None until the process has ended and all its output has been returned.
        """
        assert self._popen is not None
        waited = 0.0
        while waited < READ_WAIT:
            code = self._popen.returncode
            pieces = self._take(0.0 if code is not None else 0.2)
            if pieces or code is not None:
                return pieces, None if pieces else code
            waited += 0.2
        return [], None

    def _take(self, timeout: float) -> list[tuple[int, bytes]]:
        pieces = []
        for key, _ in self._selector.select(timeout):
            if key.data == _ENDED:
                self._selector.unregister(key.fileobj)
                os.close(key.fd)
                continue
            data = os.read(key.fd, CHUNK)
            if data:
                pieces.append((key.data, data))
            else:
                self._selector.unregister(key.fileobj)
        return pieces

    def signal(self, number: int, group: bool) -> None:
        """Send a signal to the process, or to its process group."""
        assert self._popen is not None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            (os.killpg if group else os.kill)(self._popen.pid, number)


class RemoteProcess:
    """A process on another machine, as a rank needs it. `send(number, group)` forwards a signal to its worker."""

    def __init__(self, pid: int, host: str, send: Callable[[int, bool], None]) -> None:
        self.pid = pid
        self.host = host
        self.send = send
        self._code: int | None = None
        self._ended = threading.Event()
        self._sinks: dict[int, int] = {}

    def attach(self, output: int, error: int) -> None:
        """Set the descriptors that receive the output of the process."""
        self._sinks = {1: os.dup(output), 2: os.dup(error)}

    def take(self, pieces: Sequence[tuple[int, bytes]], code: int | None) -> None:
        """Process what its worker has read."""
        for number, data in pieces:
            with contextlib.suppress(OSError):
                while data:
                    data = data[os.write(self._sinks[number], data) :]
        if code is not None:
            self._end(code)

    def lose(self, why: str) -> None:
        """Record the loss of the worker, and with it of the process."""
        message = f"accelerate launch: {self.host} (pid {self.pid}) is lost: {why}\n"
        self.take([(2, message.encode())], -signal.SIGKILL)

    def _end(self, code: int) -> None:
        self._code = code
        self._ended.set()
        # The end of the streams wakes the supervisor.
        for sink in self._sinks.values():
            os.close(sink)
        self._sinks = {}

    @property
    def ended(self) -> bool:
        """Whether the process has ended."""
        return self._code is not None

    def poll(self) -> int | None:
        """Return the exit code, or None while the process runs."""
        return self._code

    def wait(self) -> int:
        """The exit code; SIGKILL's where the worker does not report it in time."""
        if not self._ended.wait(GONE_WAIT):
            self._code = -signal.SIGKILL
        assert self._code is not None
        return self._code


class RemoteRank(Rank):
    """A rank whose process runs on another machine."""

    def __init__(self, spec: LaunchSpec, process: ProcessSpec, folder: Path | None, remote: RemoteProcess) -> None:
        self._remote = remote
        super().__init__(spec, process, folder)

    def _start(self, output: int, error: int) -> RemoteProcess:
        self._remote.attach(output, error)
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

    def __init__(self, spec: LaunchSpec, remote: Sequence[RemoteProcess], started: Callable[[], None]) -> None:
        super().__init__(spec)
        self._remote, self._started = remote, started

    def make_rank(self, process: ProcessSpec, folder: Path | None) -> Rank:
        """Return the rank of a remote process."""
        return RemoteRank(self.spec, process, folder, self._remote[process.rank])

    def _start(self, processes: Sequence[ProcessSpec]) -> None:
        super()._start(processes)
        self._started()
