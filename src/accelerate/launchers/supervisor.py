# SPDX-License-Identifier: Apache-2.0
"""Supervise the ranks of this machine: forward output and signals, detect failures, leave no process behind."""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from socket import gethostname, socket
from types import FrameType
from typing import TYPE_CHECKING

from ..core import env
from ..core.system import handles_signal
from . import failure as failures
from . import tracebacks
from .failure import Failure
from .process import FORWARDED, Rank
from .spec import LaunchSpec, ProcessSpec
from .streams import LINE_WAIT
from .tracebacks import fingerprint

if TYPE_CHECKING:
    from ..telemetry.status import Status
    from .panel import Display

# When this launcher started: restarted ranks record into the same folder.
_STARTED = time.strftime("%Y%m%d-%H%M%S")
# Seconds from the first failure to the stop of the other ranks, in which one of them may turn out to be the cause:
# where the failure is the rank's own, where it lost the connection to another, where others are writing tracebacks.
GRACE = 0.05
GRACE_LOST = 5.0
GRACE_ENDING = 3.0
# Seconds for ranks with their own handler of SIGTERM, which save a checkpoint first.
SAVE_TIME = 30.0
# Seconds after a signal at which the console shows that processes are still running.
NOTICE_AFTER = 1.5
ENDING = frozenset({"SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT"})
# Stops the ranks here because of another machine: reason, exit code, and whether the run must not be restarted.
Stop = Callable[[str, int, bool], None]


class OtherMachines:
    """The other machines of a run, as the supervisor of this machine's ranks sees them. The base knows none.

    `cause_timeout`: seconds in which another machine may turn out to be the cause of a failure here. `interval`: the
    most seconds between two calls of `tick`.
    """

    cause_timeout: float = 5.0
    interval: float = 1.0

    def callbacks(self, stop: Stop) -> list[tuple[socket, Callable[[], bool]]]:
        """Sockets to wait for, each with the function to call when it is readable; it returns False at its end."""
        return []

    def tick(self, stop: Stop) -> None:
        """Called repeatedly while the ranks run."""

    def failed(self, report: str, code: int, final: bool = False) -> None:
        """Report a failure here to the others; `final` where the run must not be restarted."""

    def finished(self) -> list[str]:
        """The names of the machines whose ranks have all ended without an error."""
        return []


class Supervisor:
    """Starts processes and waits for all of them.

    After `run`, `code` is the run's exit code, `failure` describes the first failure, and `final` is True where the
    run was ended on request and must not be restarted.
    """

    def __init__(self, spec: LaunchSpec, link: OtherMachines | None = None) -> None:
        self.spec = spec
        self.link = link
        self.ranks: list[Rank] = []
        self.failure: Failure | None = None
        self.code: int = 0
        self.final: bool = False
        self._selector = selectors.DefaultSelector()
        self._signals: list[int] = []
        self._interrupted: int | None = None
        self._stopped_by: tuple[str, int] | None = None
        self._reported = False
        # When the remaining ranks are stopped after a failure, and how many had ended when that was decided.
        self._stop_at: float | None = None
        self._ended_count = 0
        # The rank of each traceback on the console, by fingerprint.
        self._shown: dict[str, int] = {}
        self._kill_at: float | None = None
        self._notice_at: float | None = None
        self._oom_kills = failures.oom_kills()
        # Where the ranks publish their states, and what shows them.
        self._status_folder: str | None = None
        self._display: Display | None = None
        # What the ranks have published last.
        self._last_seen: dict[int, Status] = {}

    def run(self, processes: Sequence[ProcessSpec]) -> int:
        """Start the processes and wait until all have ended. Returns the exit code."""
        with self._forwarding_signals(), _restoring_terminal():
            try:
                self._start(processes)
                while not all(rank.poll() for rank in self.ranks):
                    self._wait()
                    self._act()
                self._wait_for_cause()
            except BaseException:
                self._kill_all()
                raise
            finally:
                self._clean_up()
            self.code = self._finish()
            return self.code

    @property
    def interrupted(self) -> str | None:
        """The name of the signal that ended the run; None where none did."""
        return None if self._interrupted is None else signal.Signals(self._interrupted).name

    @property
    def finished(self) -> bool:
        """Whether all ranks ended without an error, by themselves."""
        return self.code == 0 and self._stopped_by is None and self._interrupted is None

    def make_rank(self, process: ProcessSpec, folder: Path | None) -> Rank:
        """Start a process whose logs go to `folder`."""
        return Rank(self.spec, process, folder)

    def _start(self, processes: Sequence[ProcessSpec]) -> None:
        folder = Path(self.spec.log_dir).expanduser() / _run_name() if self.spec.log_dir else None
        if self.spec.progress_interval and not self.spec.quiet:
            from ..telemetry.status import new_folder

            self._status_folder = new_folder()
        for process in processes:
            if self._status_folder is not None:
                added = {"ACCELERATE_STATUS_DIR": self._status_folder, "ACCELERATE_LAUNCH_TIME": _STARTED}
                process = process._replace(variables={**process.variables, **added})
            rank = self.make_rank(process, folder)
            self.ranks.append(rank)
            rank.error.before_showing = partial(self._without_repetition, rank.rank)
            for stream in rank.streams:
                self._selector.register(stream.source, selectors.EVENT_READ, stream.read)
        if self._status_folder is not None:
            # Imported while the ranks start.
            from .panel import Display

            self._display = Display(self.spec, Path(self._status_folder), _can_show_panel())
        for connection, receive in self.link.callbacks(self._stop_for_others) if self.link else []:
            self._selector.register(connection, selectors.EVENT_READ, partial(self._handle_link, connection, receive))

    def _wait(self) -> None:
        """Wait for output, the end of a process, a signal, or the next deadline."""
        # An ended process wakes the selector through SIGCHLD; outside the main thread there is no such signal.
        timeout = 1.0 if threading.current_thread() is threading.main_thread() else 0.05
        if self.link is not None:
            timeout = min(timeout, self.link.interval)
        if any(stream.pending for rank in self.ranks for stream in rank.streams):
            timeout = min(timeout, LINE_WAIT)
        if self._display is not None:
            timeout = min(timeout, self._display.wait)
        now = time.monotonic()
        for deadline in (self._stop_at, self._kill_at, self._notice_at):
            if deadline is not None:
                timeout = min(timeout, max(0.0, deadline - now))
        for key, _ in self._selector.select(timeout):
            key.data()
        delayed = [rank.error.delayed for rank in self.ranks if rank.error.delayed]
        single = len(delayed) == 1 and tracebacks.blame(delayed[0].decode(errors="replace"), -1) == tracebacks.OWN
        for rank in self.ranks:
            for stream in rank.streams:
                if not stream.open and stream.source in self._selector.get_map():
                    self._selector.unregister(stream.source)
                if rank.code is None and not rank.stopped:
                    stream.flush_expired(single)

    def _act(self) -> None:
        while self._signals:
            self._handle_signal(self._signals.pop(0))
        if self.link is not None:
            self.link.tick(self._stop_for_others)
        self._show_progress()
        now = time.monotonic()
        ended = [rank for rank in self.ranks if rank.poll()]
        if self._kill_at is None and any(rank.code for rank in ended) and len(ended) != self._ended_count:
            # Each further end may show the cause, which makes the wait shorter, never longer.
            self._ended_count = len(ended)
            deadline = now + self._grace_period()
            self._stop_at = deadline if self._stop_at is None else min(self._stop_at, deadline)
        if self._stop_at is not None and now >= self._stop_at and self._kill_at is None:
            self._report_failure()
            self._stop(signal.SIGTERM)
        if self._kill_at is not None and now >= self._kill_at:
            self._kill_all()
        if self._notice_at is not None and now >= self._notice_at:
            self._show_notice(now)

    def _show_progress(self) -> None:
        if self._display is not None:
            pids = {rank.rank: rank.popen.pid for rank in self.ranks if rank.code is None and not rank.spec.starter}
            codes = {rank.rank: rank.code for rank in self.ranks if rank.code is not None and not rank.spec.starter}
            text = self._display.tick(pids, codes)
            if text is not None:
                self._print([text])

    def _grace_period(self) -> float:
        """Seconds to wait before the other ranks are stopped."""
        first = failures.find_first(self.ranks)
        if first is None or first.code == 0:
            return GRACE
        if failures.blame(first) != tracebacks.OWN:
            return GRACE_LOST if self.link is None else self.link.cause_timeout
        # A rank whose last output is a traceback ends soon, if that is the cause.
        ending = [rank for rank in self.ranks if rank.code is None and rank.error.failing_since is not None]
        return GRACE_ENDING if ending else GRACE

    def _show_notice(self, now: float) -> None:
        """Show why the launcher has not ended yet after a signal."""
        self._notice_at = None
        running = sum(rank.code is None for rank in self.ranks)
        if self._kill_at is not None and running:
            self._print(
                [
                    f"accelerate launch: waiting up to {max(0.0, self._kill_at - now):.0f} s for {running} "
                    f"process{'es' if running > 1 else ''} to end; a second signal (Ctrl-C) kills them"
                ]
            )

    def _report_failure(self) -> None:
        """Report the first failure to the other machines, once."""
        first = failures.find_first(self.ranks)
        if self.link is not None and first is not None and self._stopped_by is None and not self._reported:
            self._reported = True
            self.link.failed(failures.report(self.ranks, first), failures.exit_code(first.exit_code) or 1)

    def _stop(self, number: int) -> None:
        self._kill_at = time.monotonic() + self.spec.stop_timeout
        for rank in self.ranks:
            rank.signal(number)

    def _kill_all(self) -> None:
        self._kill_at = time.monotonic() + 1.0
        for rank in self.ranks:
            rank.signal(signal.SIGKILL if os.name == "posix" else signal.SIGTERM)

    def _handle_signal(self, number: int) -> None:
        name = signal.Signals(number).name
        if name not in ENDING:
            for rank in self.ranks:
                rank.forward(number)
        elif self._interrupted is None:
            self._interrupted, self.final = number, True
            saves = name == "SIGTERM" and any(handles_signal(rank.popen.pid, number) for rank in self.ranks)
            self._stop(number)
            if saves:
                self._kill_at = time.monotonic() + max(SAVE_TIME, self.spec.stop_timeout)
            self._notice_at = time.monotonic() + NOTICE_AFTER
        else:
            self._kill_all()

    def _wait_for_cause(self) -> None:
        """Wait for another machine's report where all ranks here failed because of another rank."""
        first = failures.find_first(self.ranks)
        if self.link is None or first is None or failures.blame(first) == tracebacks.OWN:
            return
        deadline = time.monotonic() + self.link.cause_timeout
        while self._stopped_by is None and time.monotonic() < deadline:
            for key, _ in self._selector.select(min(0.1, self.link.interval)):
                key.data()
            self.link.tick(self._stop_for_others)

    def _handle_link(self, connection: socket, receive: Callable[[], bool]) -> None:
        if not receive():
            self._selector.unregister(connection)

    def _stop_for_others(self, reason: str, code: int, final: bool) -> None:
        """Stop the ranks here: another machine has failed, is lost, or was interrupted (then the end is final)."""
        self.final = self.final or final
        if self._stopped_by is None:
            self._stopped_by = (reason, code)
        if self._kill_at is None:
            self._stop(signal.SIGTERM)

    def _clean_up(self) -> None:
        if self._display is not None:
            self._display.hide()
        for rank in self.ranks:
            rank.popen.wait()
            rank.poll()
            if rank.stopped or rank.code:
                rank.kill_children()
            rank.drain()
        if self._status_folder is not None:
            from ..telemetry.status import statuses

            self._last_seen = dict(statuses(Path(self._status_folder)))
            shutil.rmtree(self._status_folder, ignore_errors=True)
        self._selector.close()

    def _finish(self) -> int:
        """Show the pending output and the summary. Returns the exit code."""
        if self._interrupted is not None:
            return self._finish_interrupted(self._interrupted)
        first = failures.find_first(self.ranks)
        if self._stopped_by is not None and self._is_caused_elsewhere(first, self._stopped_by[0]):
            return self._finish_for_others(*self._stopped_by)
        if first is None:
            self._finish_streams()
            return 0
        self._report_failure()
        finished = self.link.finished() if self.link is not None and failures.blame(first) else []
        self.failure = failures.describe(self.ranks, first, failures.oom_kills() - self._oom_kills)
        if first.exit_code < 0 and (seen := self._last_seen.get(first.rank)) is not None and seen.step:
            # A signal leaves no traceback.
            batch = f", batch {seen.batch} of epoch {seen.epoch}" if seen.batch else ""
            remark = f"It was at step {seen.step}{batch}."
            self.failure = self.failure._replace(cause=f"{self.failure.cause}\n{remark}")
        if finished:
            remark = f"{', '.join(finished)} had ended without an error before: check why it ended so early."
            self.failure = self.failure._replace(cause=f"{self.failure.cause}\n{remark}")
        self._finish_streams()
        traceback = self.failure.traceback
        if traceback and not self.failure.shown and fingerprint(traceback) not in self._shown:
            self._print(traceback.rstrip("\n").splitlines())
        self._print(self.failure.lines())
        if self.spec.error_file:
            try:
                self.failure.write(self.spec.error_file)
            except OSError as error:
                self._print([f"  error_file={self.spec.error_file!r} cannot be written: {error.strerror}"])
        return self.failure.exit_code

    @staticmethod
    def _is_caused_elsewhere(first: Rank | None, reason: str) -> bool:
        """Whether another machine's reason explains the end better than the first failure here."""
        if first is None or first.stopped or failures.blame(first):
            return True
        return first.code == 0 and not tracebacks.is_lost_connection(reason)

    def _without_repetition(self, rank: int, traceback: bytes) -> bytes:
        """A traceback that is about to be shown, or a reference where another rank's was the same."""
        text = fingerprint(traceback.decode(errors="replace"))
        first = self._shown.setdefault(text, rank)
        # One rank may write the same error twice.
        if first == rank:
            return traceback
        return f"[rank{rank}]: the same traceback as rank {first}'s\n".encode()

    def _finish_for_others(self, reason: str, code: int) -> int:
        self._finish_streams(with_tracebacks=False)
        ranks = ", ".join(str(rank.rank) for rank in self.ranks)
        self._print([f"accelerate launch: {reason}", f"  rank {ranks} on this machine: stopped by the launcher"])
        return code

    def _finish_interrupted(self, number: int) -> int:
        self._finish_streams(with_tracebacks=False)
        # What mpirun returns here is no statement about its ranks.
        if all(rank.code == 0 and not rank.spec.starter for rank in self.ranks):
            return 0
        name = signal.Signals(number).name
        if self.link is not None:
            report = f"machine {self.spec.machine_rank} ({gethostname()}) was ended by {name}"
            self.link.failed(report, 128 + number, final=True)
        self._print([f"accelerate launch: ended by {name}; all processes are gone"])
        return 128 + number

    def _finish_streams(self, with_tracebacks: bool = True) -> None:
        for rank in self.ranks:
            if not with_tracebacks:
                rank.error.take_delayed()
            for stream in rank.streams:
                stream.finish()

    def _print(self, lines: list[str]) -> None:
        """Print lines of our own below what the ranks have written."""
        if any(not rank.error.at_line_start for rank in self.ranks):
            lines = ["", *lines]
            for rank in self.ranks:
                rank.error.at_line_start = True
        # A console that is gone (a closed terminal, a broken pipe) must not change how the run ends.
        with contextlib.suppress(OSError):
            print("\n".join(lines), file=sys.stderr, flush=True)

    @contextlib.contextmanager
    def _forwarding_signals(self) -> Iterator[None]:
        """Forward signals to the ranks; the end of a rank wakes the selector."""
        if threading.current_thread() is not threading.main_thread() or os.name != "posix":
            yield
            return
        wake, alarm = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC) if hasattr(os, "pipe2") else os.pipe()
        os.set_blocking(wake, False)
        os.set_blocking(alarm, False)
        self._selector.register(wake, selectors.EVENT_READ, lambda: os.read(wake, 4096))

        def record(number: int, frame: FrameType | None) -> None:
            self._signals.append(number)

        numbers = [signal.Signals[name] for name in FORWARDED if hasattr(signal, name)]
        former = {number: signal.signal(number, record) for number in numbers}
        former[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda number, frame: None)
        former_wakeup = signal.set_wakeup_fd(alarm, warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(former_wakeup)
            for number, handler in former.items():
                signal.signal(number, handler)
            os.close(wake)
            os.close(alarm)


@contextlib.contextmanager
def _restoring_terminal() -> Iterator[None]:
    """Restore the terminal's settings (echo, line mode, signals) that the ranks may have changed."""
    try:
        import termios

        with open("/dev/tty", "rb", buffering=0) as terminal:
            before = termios.tcgetattr(terminal)
    except (ImportError, OSError):
        yield
        return
    try:
        yield
    finally:
        # The kernel would stop a launcher in the background that touches the terminal.
        with contextlib.suppress(OSError, termios.error), open("/dev/tty", "rb", buffering=0) as terminal:
            if os.tcgetpgrp(terminal.fileno()) == os.getpgrp() and termios.tcgetattr(terminal) != before:
                termios.tcsetattr(terminal, termios.TCSADRAIN, before)


def supervise(spec: LaunchSpec, processes: Sequence[ProcessSpec], link: OtherMachines | None = None) -> Supervisor:
    """Run processes to their end. Returns their supervisor."""
    supervisor = Supervisor(spec, link)
    supervisor.run(processes)
    return supervisor


def with_restarts(spec: LaunchSpec, attempt: Callable[[int], Supervisor]) -> int:
    """Run attempts until one succeeds, the run is ended on request, or `max_restarts` are used up.

    `attempt` is called with the number of earlier attempts. Returns the last exit code.
    """
    for number in range(spec.max_restarts + 1):
        ended = attempt(number)
        if ended.code == 0 or ended.final:
            break
        if number < spec.max_restarts:
            print(f"accelerate launch: restart {number + 1} of {spec.max_restarts}", file=sys.stderr, flush=True)
    return ended.code


def _can_show_panel() -> bool:
    return os.name == "posix" and os.isatty(2) and env.get("TERM") not in (None, "dumb")


def _run_name() -> str:
    """The folder of a run's logs: start time and process id of the launcher, so that runs never mix."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
