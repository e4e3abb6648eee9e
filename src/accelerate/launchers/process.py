# SPDX-License-Identifier: Apache-2.0
"""One rank: its process group, its streams and its end. On Linux it dies with its launcher."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from ..core import env
from .failure import End
from .spec import LaunchSpec, ProcessSpec
from .streams import RANK_FAILED, Stream

PR_SET_PDEATHSIG = 1
# Signals that a starter sends on to what it has started.
FORWARDED = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")


class Running(Protocol):
    """What a rank needs of its process, as subprocess.Popen has it."""

    pid: int

    def poll(self) -> int | None:
        """Return the exit code, or None while the process runs."""

    def wait(self) -> int:
        """Wait for the end of the process, and return its exit code."""


class Rank:
    """A running process of the launch. `code` is None until it has ended; negative for a signal, as in subprocess."""

    def __init__(self, spec: LaunchSpec, process: ProcessSpec, log_folder: Path | None) -> None:
        self.spec = process
        self.code: int | None = None
        self.ended_at: float | None = None
        self.failed_at: float | None = None
        self.stopped: bool = False
        self.log_folder: Path | None = log_folder / f"rank_{process.rank}" if log_folder else None
        self.streams: list[Stream] = []
        output, error = self._open_streams(spec)
        try:
            self.popen: Running = self._start(output, error)
        finally:
            os.close(output)
            os.close(error)

    def _start(self, output: int, error: int) -> Running:
        """Start the process with these descriptors as standard output and error."""
        return subprocess.Popen(
            self.spec.argv,
            env=env.child_environment(self.spec.variables),
            stdin=_stdin(self.spec.local_rank),
            stdout=output,
            stderr=error,
            process_group=None if sys.platform == "win32" else 0,
            preexec_fn=die_with(os.getpid(), self.spec.cpus),
        )

    @property
    def is_child(self) -> bool:
        """Whether it is a child process of this one: one that another program starts may run on another machine."""
        return isinstance(self.popen, subprocess.Popen)

    @property
    def host(self) -> str:
        """The name of the machine it runs on."""
        return socket.gethostname()

    @property
    def rank(self) -> int:
        """The global rank."""
        return self.spec.rank

    @property
    def error(self) -> Stream:
        """The stream of standard error."""
        return self.streams[0]

    @property
    def end(self) -> End:
        """How it has ended by now."""
        code = self.code or 0
        by_itself = self.code is not None and not self.stopped
        if self.stopped and self.failed_at is not None:
            # It failed before it was stopped while it cleaned up.
            code = 1
            by_itself = True
        log = None
        if self.log_folder:
            log = str(self.log_folder / "stderr.log")
        end = End(
            self.rank,
            code,
            self.failed_at or self.ended_at or 0.0,
            self.error.last_output,
            shown=not self.error.is_delayed,
            by_itself=by_itself,
            local_rank=self.spec.local_rank,
            pid=self.popen.pid,
            host=self.host,
            log=log,
            starter=self.spec.starter,
        )
        if code and end.starter:
            return _reported(end, self.error.rank_failure)
        return end

    def _open_streams(self, spec: LaunchSpec) -> tuple[int, int]:
        """The descriptors the process writes to: standard output and standard error."""
        tee = spec.tee_of(self.rank)
        if self.log_folder is not None:
            self.log_folder.mkdir(parents=True, exist_ok=True)
        error = self._open_stream(2, bool(tee & 2))
        output = self._open_stream(1, bool(tee & 1))
        self.streams[0].other, self.streams[1].other = self.streams[1], self.streams[0]
        return output, error

    def _open_stream(self, number: int, prefixed: bool) -> int:
        source, end = _channel(number)
        name = {1: "stdout.log", 2: "stderr.log"}[number]
        log = None
        if self.log_folder:
            log = open(self.log_folder / name, "wb")  # noqa: SIM115
        prefix = f"[rank{self.rank}]: " if prefixed else None
        self.streams.append(Stream(source, number, prefix, log, delay_tracebacks=number == 2))
        return end

    def poll(self) -> bool:
        """Whether the process has ended by now; its code is known then."""
        if self.code is None:
            self.code = self.popen.poll()
            if self.code is not None:
                self.ended_at = time.monotonic()
            if self.code and not self.stopped:
                self.drain()
                self.failed_at = self.error.failing_since or self.ended_at
        return self.code is not None

    def drain(self) -> None:
        """Read the rest of an ended process's output, without waiting for children that keep the streams open."""
        for stream in self.streams:
            while stream.open:
                before = stream.tail
                stream.read()
                if stream.tail == before:
                    break

    def signal(self, number: int) -> None:
        """Send a signal to the process group."""
        if self.code is not None:
            return
        if not self.stopped:
            # It may have written its traceback already and be cleaning up.
            self.failed_at = self.error.failing_since
        self.stopped = True
        self._send(number)

    def forward(self, number: int) -> None:
        """Send a signal that does not end the run to the process alone."""
        if self.code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.popen.pid, number)

    def kill_children(self) -> None:
        """Kill what an ended process left behind in its process group."""
        if sys.platform != "win32":
            self._send(signal.SIGKILL)

    def _send(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if sys.platform != "win32":
                os.killpg(self.popen.pid, number)
            else:
                os.kill(self.popen.pid, signal.SIGTERM)


def _reported(starter: End, output: bytes) -> End:
    """The end of the rank that failed first under a starter, from its report in the starter's output."""
    report = re.search(RANK_FAILED, output)
    if report is None:
        return starter._replace(rank=-1)
    # Later output comes from the starter and from ranks that it stopped. srun labels each line with its task.
    text = output[: report.start()].decode(errors="replace")
    rank = int(report[1])
    labelled = re.findall(rf"^{rank}: .*", text, re.MULTILINE)
    return starter._replace(rank=rank, code=int(report[2]), output="\n".join(labelled) or text)


def _stdin(local_rank: int) -> int | None:
    """Piped input goes to the first process. A terminal goes to none, because it cannot serve several."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        if local_rank == 0 and not sys.stdin.isatty():
            sys.stdin.fileno()
            return None
    return subprocess.DEVNULL


def _channel(number: int) -> tuple[int, int]:
    """Both ends of a stream: a pseudo terminal where the console is one, which keeps colours; otherwise a pipe."""
    if sys.platform != "win32" and os.isatty(number):
        import fcntl
        import pty
        import termios
        import tty

        source, end = pty.openpty()
        tty.setraw(end)
        size = fcntl.ioctl(number, termios.TIOCGWINSZ, b"\0" * 8)
        fcntl.ioctl(end, termios.TIOCSWINSZ, size)
        return source, end
    return os.pipe()


# A shell that waits for a line. If the pipe ends without one, it kills these process groups.
_GUARD = 'read line || kill -s KILL -- "$@"'


@contextlib.contextmanager
def guarded(ranks: Sequence[Rank]) -> Iterator[None]:
    """A block in which another process kills what ranks have started, if this one is killed.

    A rank dies with its launcher by itself, but not what it has started.
    """
    groups = [f"-{rank.popen.pid}" for rank in ranks if rank.is_child]
    shell = shutil.which("sh")
    if not groups or shell is None or sys.platform == "win32":
        yield
        return
    command = [shell, "-c", _GUARD, "sh", *groups]
    silent = subprocess.DEVNULL
    guard = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=silent, stderr=silent, start_new_session=True
    )
    try:
        yield
    finally:
        guard.communicate(b"\n")


def die_with(parent: int, cpus: tuple[int, ...] | None = None) -> Callable[[], None] | None:
    """The first code of a new process (Linux): have the kernel kill it when its launcher dies, bind it to `cpus`.

    Signals that the starter blocks for itself, as Ray's workers block SIGINT, are not blocked for the process.
    """
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None, use_errno=True)

    def prepare() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)
        if cpus:
            os.sched_setaffinity(0, cpus)

    return prepare
