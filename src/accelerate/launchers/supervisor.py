# SPDX-License-Identifier: Apache-2.0
"""Supervise the ranks of this machine: forward output and signals, detect failures, leave no process behind."""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from ..core import env, messages
from ..core.objects import ranks_in_words
from ..core.system import handles_signal, is_stopped
from .base import handling
from .failure import (
    Failure,
    comparable,
    first_failure,
    is_lost_connection,
    oom_kills,
    points_elsewhere,
)
from .process import FORWARDED, Rank, guarded
from .spec import LaunchSpec, ProcessSpec
from .streams import LINE_WAIT, Stream, write_all

if TYPE_CHECKING:
    from .panel import Display

# When this launcher started: restarted ranks record into the same folder.
_STARTED = time.strftime("%Y%m%d-%H%M%S")
# Seconds from the first failure to the stop of the other ranks, in which one of them may turn out to be the cause:
# where the failure is the rank's own, and where it lost the connection to another or names one.
GRACE = 0.05
GRACE_LOST = 5.0
# Seconds between two looks for ranks that a signal has stopped.
PAUSE = 5.0
# Seconds for ranks with their own handler of SIGTERM, which save a checkpoint first.
SAVE_TIME = 30.0
ENDING = frozenset({"SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT"})
# Stops the ranks here because of another machine: reason, exit code, and whether the run must not be restarted.
Stop = Callable[[str, int, bool], None]


class OtherMachines:
    """The other machines of a run, as the supervisor of this machine's ranks sees them. The base has none.

    `cause_timeout`: seconds in which another machine may turn out to be the cause of a failure here. `interval`: the
    most seconds between two calls of `tick`.
    """

    cause_timeout: float = 0.0
    interval: float = 1.0

    def tick(self, stop: Stop) -> None:
        """Called repeatedly while the ranks run."""

    def failed(self, report: str, code: int) -> None:
        """Report a failure here to the others."""

    def interrupted(self, name: str, code: int) -> None:
        """Report that a signal, of this name, has ended the ranks here."""


class Supervisor:
    """Starts processes and waits for all of them.

    After `run`, `code` is the run's exit code, `failure` describes the first failure, and `final` is True where the
    run was ended on request and must not be restarted.
    """

    def __init__(self, spec: LaunchSpec, link: OtherMachines | None = None) -> None:
        self.spec = spec
        self.link: OtherMachines = link or OtherMachines()
        self.ranks: list[Rank] = []
        self.failure: Failure | None = None
        self.code: int = 0
        self.final: bool = False
        self._contexts = contextlib.ExitStack()
        self._selector = selectors.DefaultSelector()
        self._signals: list[int] = []
        # Tracebacks on the console, without what differs between ranks, and the ranks whose they are.
        self._shown: dict[str, int] = {}
        # The signal that ended the run, if one did.
        self.interrupted: int | None = None
        # Whether SIGTERM has ended the run, and no process could save.
        self._is_unsaved = False
        self._stopped_by: tuple[str, int] | None = None
        self._reported = False
        # Until when the cause of a failure may turn out to be another one: then the other ranks are stopped. How many
        # had ended when that was decided.
        self._stop_at = math.inf
        self._ended_count = 0
        self._kill_at = math.inf
        self._oom_kills = oom_kills()
        # When the states of the processes were looked at, and at how many looks in a row each was stopped by a signal.
        self._looked = 0.0
        self._paused: dict[Rank, int] = {}
        # What shows the states that the ranks publish.
        self._display: Display | None = None

    def run(self, processes: Sequence[ProcessSpec]) -> int:
        """Start the processes and wait until all have ended. Returns the exit code."""
        self.start(processes)
        while self.is_running:
            self.step()
        return self.finish()

    def start(self, processes: Sequence[ProcessSpec]) -> None:
        """Start the processes. From here on signals are forwarded, until `finish`."""
        self._contexts.enter_context(self._forwarding_signals())
        with self._killing_on_error():
            self._start(processes)

    @property
    def is_running(self) -> bool:
        """Whether a rank runs, or all have failed because of another machine that has not reported yet."""
        if not all(rank.poll() for rank in self.ranks):
            return True
        if not self.link.cause_timeout or self._kill_at < math.inf:
            return False
        failure = self._first_failure()
        return failure is not None and failure.source.points_elsewhere

    def step(self, most: float = 1.0) -> None:
        """Wait up to `most` seconds for output, the end of a process or a signal, and act on it."""
        with self._killing_on_error():
            self._wait(most)
            self._act()

    def stop(self, reason: str) -> None:
        """Stop the ranks for a reason outside this machine, and wait for their end."""
        self._stop_for_others(reason, 1, False)
        while self.is_running:
            self.step()

    def finish(self) -> int:
        """Show the pending output and a failure, after the end of all ranks. Returns the exit code."""
        with self._contexts:
            self._clean_up()
            self.code = self._finish()
            for stream in self._streams():
                if stream.lost is not None and not self.final:
                    self._print([f"accelerate: output is lost: {stream.lost.strerror}"])
                    self.code = self.code or 1
                    self.final = True
        return self.code

    @contextlib.contextmanager
    def _killing_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            with self._contexts:
                self._kill_all()
                self._clean_up()
            raise

    def make_rank(self, process: ProcessSpec, folder: Path | None) -> Rank:
        """Start a process whose logs go to `folder`."""
        return Rank(self.spec, process, folder)

    def _start(self, processes: Sequence[ProcessSpec]) -> None:
        folder = None
        if self.spec.log_dir:
            # Time and process id of the launcher, so that runs never mix.
            run_name = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
            folder = Path(self.spec.log_dir).expanduser() / run_name
        status_folder = None
        added: dict[str, str | None] = {}
        if self.spec.progress_interval > 0 and not self.spec.quiet:
            from ..telemetry.status import new_folder

            status_folder = new_folder()
            added["ACCELERATE_STATUS_DIR"] = status_folder
            added["ACCELERATE_LAUNCH_TIME"] = _STARTED
        for process in processes:
            process = process._replace(variables={**process.variables, **added})
            rank = self.make_rank(process, folder)
            self.ranks.append(rank)
            for stream in rank.streams:
                if sys.platform != "win32":
                    self._selector.register(stream.source, selectors.EVENT_READ, stream.read)
        self._contexts.enter_context(guarded(self.ranks))
        if status_folder is not None:
            self._contexts.callback(shutil.rmtree, status_folder, ignore_errors=True)
            # Imported while the ranks start.
            from .panel import Display

            terminal = os.isatty(2) and env.get("TERM") not in (None, "dumb")
            self._display = Display(self.spec, Path(status_folder), terminal)
            for stream in self._streams():
                stream.show = self._display.write

    def _wait(self, most: float) -> None:
        """Wait for output, the end of a process, a signal, or the next deadline."""
        timeout = min(most, self.link.interval)
        if threading.current_thread() is not threading.main_thread():
            # An ended process wakes the selector through SIGCHLD, which only the main thread gets.
            timeout = 0.05
        if any(stream.pending for stream in self._streams()):
            timeout = min(timeout, LINE_WAIT)
        if self._display is not None:
            timeout = min(timeout, self._display.wait)
        now = time.monotonic()
        timeout = max(0.0, min(timeout, self._stop_at - now, self._kill_at - now))
        open_streams = [stream for stream in self._streams() if stream.open]
        if sys.platform != "win32":
            for key, _ in self._selector.select(timeout):
                key.data()
        elif open_streams:
            for stream in open_streams:
                stream.read()
        else:
            time.sleep(min(timeout, LINE_WAIT))
        for stream in open_streams:
            if not stream.open and stream.source in self._selector.get_map():
                self._selector.unregister(stream.source)
        for rank in self.ranks:
            if rank.code is None and not rank.stopped:
                for stream in rank.streams:
                    stream.flush_old_line()
                self._show_delayed(rank)

    def _show_delayed(self, rank: Rank) -> None:
        """Show a traceback whose delay has passed: the process goes on, or takes long to end.

        The same one of other ranks is not shown again. One that points to another rank waits for that rank's.
        """
        text = rank.error.delayed
        if not text or not rank.error.is_expired(points_elsewhere(text, rank.rank)):
            return
        shown, _ = comparable(text, rank.rank)
        source = self._shown.setdefault(shown, rank.rank)
        if not shown or source == rank.rank:
            rank.error.flush()
        if not shown:
            return
        repeated = []
        for other in self.ranks:
            traceback, after = comparable(other.error.delayed, other.rank)
            if traceback == shown:
                other.error.drop_delayed(after)
                repeated.append(other.rank)
        if repeated:
            self._print(
                [f"accelerate: {ranks_in_words(repeated)}: the same error as rank {source}"]
            )

    def _streams(self) -> list[Stream]:
        streams: list[Stream] = []
        for rank in self.ranks:
            streams += rank.streams
        return streams

    def _act(self) -> None:
        while self._signals:
            self._handle_signal(self._signals.pop(0))
        self.link.tick(self._stop_for_others)
        if self._display is not None:
            self._show_progress(self._display)
        now = time.monotonic()
        self._look_for_paused(now)
        ended = [rank for rank in self.ranks if rank.poll()]
        is_stopping = self._kill_at < math.inf
        if not is_stopping and len(ended) != self._ended_count:
            # Each further end may show the cause, which makes the wait shorter, never longer.
            self._ended_count = len(ended)
            failure = self._first_failure()
            if failure is not None:
                grace = GRACE
                if failure.end.requested_by:
                    # The others end by themselves.
                    grace = GRACE_LOST
                elif failure.source.points_elsewhere:
                    grace = max(GRACE_LOST, self.link.cause_timeout)
                self._stop_at = min(self._stop_at, now + grace)
        if now >= self._stop_at:
            self._report_failure(self._first_failure())
            self._stop(signal.SIGTERM)
        if now >= self._kill_at:
            self._kill_all()

    def _look_for_paused(self, now: float) -> None:
        """Name ranks that a signal has stopped for a while: the others wait for them."""
        if now - self._looked < PAUSE or len(self.ranks) == 1:
            return
        self._looked = now
        for rank in self.ranks:
            if rank.code is not None or not rank.is_child or not is_stopped(rank.popen.pid):
                self._paused[rank] = 0
                continue
            self._paused[rank] = self._paused.get(rank, 0) + 1
            if self._paused[rank] == 2:
                pid = rank.popen.pid
                text = (
                    f"accelerate: rank {rank.rank} (pid {pid}) was stopped by a signal, and the "
                    f"other ranks wait for it: `kill -CONT {pid}` lets it continue"
                )
                self._print([text])

    def _show_progress(self, display: Display) -> None:
        pids = {}
        codes = {}
        for rank in self.ranks:
            if rank.spec.starter:
                continue
            if rank.code is None:
                pids[rank.rank] = rank.popen.pid
            else:
                codes[rank.rank] = rank.code
        text = display.tick(pids, codes)
        if text is not None:
            self._print([text])

    def _first_failure(self) -> Failure | None:
        return first_failure([rank.end for rank in self.ranks], self._oom_kills)

    def _report_failure(self, failure: Failure | None) -> None:
        """Report the first failure to the other machines, once."""
        if failure is None or self._stopped_by is not None or self._reported:
            return
        self._reported = True
        self.link.failed(failure.report(), failure.exit_code)

    def _stop(self, number: int) -> None:
        self._stop_at = math.inf
        self._kill_at = time.monotonic() + self.spec.stop_timeout
        for rank in self.ranks:
            rank.signal(number)

    def _kill_all(self) -> None:
        self._kill_at = time.monotonic() + 1.0
        number = signal.SIGTERM
        if sys.platform != "win32":
            number = signal.SIGKILL
        for rank in self.ranks:
            rank.signal(number)

    def _handle_signal(self, number: int) -> None:
        name = signal.Signals(number).name
        if name not in ENDING:
            for rank in self.ranks:
                rank.forward(number)
        elif self.interrupted is not None:
            self._kill_all()
        else:
            self.interrupted = number
            self.final = True
            # Asked before the ranks get the signal, which may end them.
            saves = name == "SIGTERM" and any(
                handles_signal(rank.popen.pid, number) for rank in self.ranks
            )
            self._is_unsaved = name == "SIGTERM" and not saves
            self._stop(number)
            if saves:
                seconds = self.spec.stop_within or max(SAVE_TIME, self.spec.stop_timeout)
                self._kill_at = time.monotonic() + seconds
                messages.show(
                    f"waiting up to {seconds:.0f} s for processes that handle {name}; a second signal kills them"
                )

    def _stop_for_others(self, reason: str, code: int, final: bool) -> None:
        """Stop the ranks here: another machine has failed, is lost, or was interrupted (then the end is final)."""
        self.final = self.final or final
        if self._stopped_by is None:
            self._stopped_by = (reason, code)
        if self._kill_at == math.inf:
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
        self._selector.close()

    def _finish(self) -> int:
        """Show the pending output and the summary. Returns the exit code."""
        if self.interrupted is not None:
            return self._finish_interrupted(self.interrupted)
        failure = self._first_failure()
        if self._stopped_by is not None and self._is_caused_elsewhere(failure, self._stopped_by[0]):
            return self._finish_for_others(*self._stopped_by)
        if failure is None:
            self._finish_streams()
            return 0
        self._report_failure(failure)
        self.failure = failure
        name = failure.end.requested_by
        if name and all(rank.code == failure.end.code for rank in self.ranks):
            self._finish_streams()
            self._print(
                [
                    f"accelerate: all ranks stopped on request; exit code {self.ranks[0].code} ({name})"
                ]
            )
            return failure.exit_code
        self._finish_streams(with_tracebacks=False)
        if failure.source.traceback and not failure.source.shown:
            self._print([failure.source.traceback.rstrip("\n")])
        self._print([failure.summary()])
        if self.spec.error_file:
            try:
                failure.write(self.spec.error_file)
            except OSError as error:
                self._print(
                    [f"  error_file={self.spec.error_file!r} cannot be written: {error.strerror}"]
                )
        return failure.exit_code

    def _is_caused_elsewhere(self, failure: Failure | None, reason: str) -> bool:
        """Whether another machine's reason explains the end better than the first failure here."""
        if failure is None or failure.end.points_elsewhere:
            return True
        stopped = [rank.rank for rank in self.ranks if rank.stopped]
        if failure.end.rank in stopped:
            return True
        return failure.end.code == 0 and not is_lost_connection(reason)

    def _finish_for_others(self, reason: str, code: int) -> int:
        self._finish_streams(with_tracebacks=False)
        ranks = ranks_in_words([rank.rank for rank in self.ranks])
        self._print(
            [f"accelerate: {reason}", f"  {ranks} on this machine: stopped by the launcher"]
        )
        return code

    def _finish_interrupted(self, number: int) -> int:
        self._finish_streams(with_tracebacks=False)
        # What mpirun returns here is no statement about its ranks.
        if all(rank.code == 0 and not rank.spec.starter for rank in self.ranks):
            return 0
        name = signal.Signals(number).name
        self.link.interrupted(name, 128 + number)
        lines = [f"accelerate: ended by {name}; all processes are gone"]
        if self._is_unsaved and self.spec.stop_within is not None:
            lines.append(
                "  --stop_within: nothing was saved, because the script was stopped before it called "
                'accelerator.resume(), or does not call it (Accelerator(resume="auto") does)'
            )
        self._print(lines)
        return 128 + number

    def _finish_streams(self, with_tracebacks: bool = True) -> None:
        for rank in self.ranks:
            if not with_tracebacks:
                rank.error.drop_delayed()
            for stream in rank.streams:
                stream.finish()
        if os.isatty(2) and any(rank.stopped or rank.code for rank in self.ranks):
            # A progress bar that was killed leaves the cursor hidden.
            write_all(2, b"\x1b[?25h\x1b[0m")

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
        if threading.current_thread() is not threading.main_thread() or sys.platform == "win32":
            yield
            return
        wake, alarm = os.pipe()
        os.set_blocking(wake, False)
        os.set_blocking(alarm, False)
        self._selector.register(wake, selectors.EVENT_READ, lambda: os.read(wake, 4096))

        def record(number: int, frame: FrameType | None) -> None:
            if number != signal.SIGCHLD:
                self._signals.append(number)

        former_wakeup = signal.set_wakeup_fd(alarm, warn_on_full_buffer=False)
        try:
            with handling((*FORWARDED, "SIGCHLD"), record):
                yield
        finally:
            signal.set_wakeup_fd(former_wakeup)
            os.close(wake)
            os.close(alarm)


def supervise(
    spec: LaunchSpec, processes: Sequence[ProcessSpec], link: OtherMachines | None = None
) -> Supervisor:
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
            messages.show(f"restart {number + 1} of {spec.max_restarts}")
    return ended.code
