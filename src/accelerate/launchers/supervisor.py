# SPDX-License-Identifier: Apache-2.0
"""The ranks of this machine from start to end: output passed on, failures noticed at once, nobody left behind."""

from __future__ import annotations

import contextlib
import os
import selectors
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

from ..core.system import handles_signal
from . import failure as failures
from . import tracebacks
from .failure import Failure
from .process import Rank
from .spec import LaunchSpec, ProcessSpec
from .streams import LINE_WAIT, Stream
from .tracebacks import fingerprint

if TYPE_CHECKING:
    from .others import Others

# Seconds that a rank gets to show whether another one's failure is its own doing.
SETTLE = 0.05
SETTLE_VICTIM = 5.0
SETTLE_ENDING = 3.0
# Seconds that ranks get which handle SIGTERM themselves: they save what they have.
SAVE_TIME = 30.0
FORWARDED = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
ENDING = frozenset({"SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT"})


class Supervisor:
    """Starts processes, waits for all, and returns the run's exit code."""

    def __init__(self, spec: LaunchSpec, link: Others | None = None) -> None:
        self.spec = spec
        self.link = link
        self.ranks: list[Rank] = []
        self.failure: Failure | None = None
        self.code = 0
        # Whether somebody wants the run to end, so that it must not be started again.
        self.final = False
        self._selector = selectors.DefaultSelector()
        self._signals: list[int] = []
        self._interrupted: int | None = None
        self._stopped_by: tuple[str, int] | None = None
        self._told_others = False
        self._settle_until: float | None = None
        self._settled_with = 0
        # Tracebacks on the console, by their fingerprints, with the rank each came from.
        self._shown: dict[str, int] = {}
        self._kill_at: float | None = None
        self._oom_kills = failures.oom_kills()

    def run(self, processes: Sequence[ProcessSpec]) -> int:
        """Start, watch and end the processes; the exit code, also kept in `code`."""
        with self._catching_signals(), _keeping_terminal():
            try:
                self._start(processes)
                while not all(rank.poll() for rank in self.ranks):
                    self._wait()
                    self._act()
                self._drain_others()
            except BaseException:
                self._kill_all()
                raise
            finally:
                self._clean_up()
            self.code = self._finish()
            return self.code

    @property
    def interrupted(self) -> str | None:
        """The name of the signal that asked for the end."""
        return None if self._interrupted is None else signal.Signals(self._interrupted).name

    @property
    def finished(self) -> bool:
        """Whether all ranks ended well, and by themselves."""
        return self.code == 0 and self._stopped_by is None and self._interrupted is None

    def make_rank(self, process: ProcessSpec, folder: Path | None) -> Rank:
        """Start a process; its logs go to `folder`."""
        return Rank(self.spec, process, folder)

    def _start(self, processes: Sequence[ProcessSpec]) -> None:
        folder = Path(self.spec.log_dir).expanduser() / _run_name() if self.spec.log_dir else None
        for process in processes:
            rank = self.make_rank(process, folder)
            self.ranks.append(rank)
            rank.error.before_showing = partial(self._once, rank.rank)
            for stream in rank.streams:
                self._selector.register(stream.source, selectors.EVENT_READ, stream.read)
        for connection, hear in self.link.callbacks(self._stop_for_others) if self.link else []:
            self._selector.register(connection, selectors.EVENT_READ, partial(self._handle_link, connection, hear))

    def _wait(self) -> None:
        """Until something happens: output, an end, a signal, or a time that was set."""
        # An ended process wakes us through SIGCHLD; outside the main thread there is no such call.
        patience = 1.0 if threading.current_thread() is threading.main_thread() else 0.05
        if self.link is not None:
            patience = min(patience, self.link.interval)
        if any(stream.waiting for rank in self.ranks for stream in rank.streams):
            patience = min(patience, LINE_WAIT)
        now = time.monotonic()
        for moment in (self._settle_until, self._kill_at):
            if moment is not None:
                patience = min(patience, max(0.0, moment - now))
        for key, _ in self._selector.select(patience):
            key.data()
        held = [rank.error.held for rank in self.ranks if rank.error.held]
        alone = len(held) == 1 and tracebacks.blame(held[0].decode(errors="replace"), -1) == tracebacks.OWN
        for rank in self.ranks:
            for stream in rank.streams:
                if not stream.open and stream.source in self._selector.get_map():
                    self._selector.unregister(stream.source)
                if rank.code is None and not rank.stopped:
                    stream.release_if_old(alone)

    def _act(self) -> None:
        for number in self._take_signals():
            self._handle_signal(number)
        if self.link is not None:
            self.link.tick(self._stop_for_others)
        now = time.monotonic()
        ended = [rank for rank in self.ranks if rank.poll()]
        if self._kill_at is None and any(rank.code for rank in ended) and len(ended) != self._settled_with:
            # Each further end may show the cause: then there is less to wait for, never more.
            self._settled_with = len(ended)
            until = now + self._settling_time()
            self._settle_until = until if self._settle_until is None else min(self._settle_until, until)
        if self._settle_until is not None and now >= self._settle_until and self._kill_at is None:
            self._notify_others()
            self._stop(signal.SIGTERM)
        if self._kill_at is not None and now >= self._kill_at:
            self._kill_all()

    def _settling_time(self) -> float:
        first = failures.find_first(self.ranks)
        if first is None:
            return SETTLE
        if first.code == 0:
            return SETTLE
        # A rank that has written its traceback ends within moments, if its last words are the cause.
        ending = [rank for rank in self.ranks if rank.code is None and rank.error.trouble_since is not None]
        if failures.blame(first) == tracebacks.OWN:
            return SETTLE_ENDING if ending else SETTLE
        return SETTLE_VICTIM if self.link is None else self.link.settle

    def _notify_others(self) -> None:
        first = failures.find_first(self.ranks)
        if self.link is not None and first is not None and self._stopped_by is None and not self._told_others:
            self._told_others = True
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
                rank.hand_on(number)
        elif self._interrupted is None:
            self._interrupted, self.final = number, True
            saves = name == "SIGTERM" and any(handles_signal(rank.popen.pid, number) for rank in self.ranks)
            self._stop(number)
            if saves:
                self._kill_at = time.monotonic() + max(SAVE_TIME, self.spec.stop_timeout)
        else:
            self._kill_all()

    def _drain_others(self) -> None:
        """All ranks here may have failed only because one elsewhere did: its machine says so a moment later."""
        first = failures.find_first(self.ranks)
        if self.link is None or first is None or failures.blame(first) == tracebacks.OWN:
            return
        deadline = time.monotonic() + self.link.settle
        while self._stopped_by is None and time.monotonic() < deadline:
            for key, _ in self._selector.select(min(0.1, self.link.interval)):
                key.data()
            self.link.tick(self._stop_for_others)

    def _handle_link(self, connection: socket, hear: Callable[[], bool]) -> None:
        if not hear():
            self._selector.unregister(connection)

    def _stop_for_others(self, reason: str, code: int, final: bool) -> None:
        """Another machine has failed, is gone or was interrupted (then the end is final)."""
        self.final = self.final or final
        if self._stopped_by is None:
            self._stopped_by = (reason, code)
        if self._kill_at is None:
            self._stop(signal.SIGTERM)

    def _clean_up(self) -> None:
        for rank in self.ranks:
            if rank.stopped:
                rank.kill_remains()
            rank.popen.wait()
            rank.poll()
            rank.drain()
        self._selector.close()

    def _finish(self) -> int:
        """Show what is left to show, once, and say how it ended."""
        if self._interrupted is not None:
            return self._finish_interrupted(self._interrupted)
        first = failures.find_first(self.ranks)
        if self._stopped_by is not None and self._is_for_others(first, self._stopped_by[0]):
            return self._finish_for_others(*self._stopped_by)
        if first is None:
            self._release_all()
            return 0
        self._notify_others()
        left = self.link.finished() if self.link is not None and failures.blame(first) else []
        self.failure = failures.describe(self.ranks, first, failures.oom_kills() - self._oom_kills)
        if left:
            self.failure.cause += f"\nBy then {', '.join(left)} had ended without an error: see why it ended so early."
        self._release_all()
        if self.failure.traceback and not self.failure.shown and not self._is_swapped_in(self.failure.traceback):
            sys.stderr.flush()
            sys.stderr.write(self.failure.traceback.rstrip("\n") + "\n")
        self._say(self.failure.lines())
        if self.spec.error_file:
            self.failure.write(self.spec.error_file)
        return self.failure.exit_code

    @staticmethod
    def _is_for_others(first: Rank | None, reason: str) -> bool:
        """Whether another machine's reason explains the end better than the first failure here."""
        if first is None or first.stopped or failures.blame(first):
            return True
        return first.code == 0 and not tracebacks.speaks_of_lost_rank(reason)

    def _once(self, rank: int, traceback: bytes) -> bytes:
        """A traceback that is about to be shown, or a word on it where another rank's was the same."""
        text = fingerprint(traceback.decode(errors="replace"))
        first = self._shown.setdefault(text, rank)
        # One rank may well write the same error twice.
        if first == rank:
            return traceback
        return f"[rank{rank}]: the same traceback as rank {first}'s\n".encode()

    def _is_swapped_in(self, traceback: str) -> bool:
        return fingerprint(traceback) in self._shown

    def _finish_for_others(self, reason: str, code: int) -> int:
        for rank in self.ranks:
            rank.error.drop()
        self._release_all()
        ranks = ", ".join(str(rank.rank) for rank in self.ranks)
        self._say([f"accelerate launch: {reason}", f"  rank {ranks} on this machine: stopped by the launcher"])
        return code

    def _finish_interrupted(self, number: int) -> int:
        for rank in self.ranks:
            rank.error.drop()
        self._release_all()
        # What mpirun returns then says nothing of its ranks.
        if all(rank.code == 0 and not rank.spec.starter for rank in self.ranks):
            return 0
        if self.link is not None:
            host, name = gethostname(), signal.Signals(number).name
            told = f"machine {self.spec.machine_rank} ({host}) was ended by {name}"
            self.link.failed(told, 128 + number, final=True)
        self._say([f"accelerate launch: ended by {signal.Signals(number).name}; all processes are gone"])
        return 128 + number

    def _release_all(self) -> None:
        for rank in self.ranks:
            for stream in rank.streams:
                stream.release()
                stream.close()
                self._restore_modes(stream)

    def _restore_modes(self, stream: Stream) -> None:
        undoing = stream.modes.undoing()
        if undoing and os.isatty(stream.sink):
            with contextlib.suppress(OSError):
                os.write(stream.sink, undoing)

    def _say(self, lines: list[str]) -> None:
        print("\n".join(lines), file=sys.stderr, flush=True)

    def _take_signals(self) -> list[int]:
        taken, self._signals = self._signals, []
        return taken

    @contextlib.contextmanager
    def _catching_signals(self) -> Iterator[None]:
        """Signals to the launcher become signals to the ranks; the end of a rank wakes the loop."""
        if threading.current_thread() is not threading.main_thread() or os.name != "posix":
            yield
            return
        wake, alarm = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC) if hasattr(os, "pipe2") else os.pipe()
        os.set_blocking(wake, False)
        os.set_blocking(alarm, False)
        self._selector.register(wake, selectors.EVENT_READ, lambda: os.read(wake, 4096))

        def note(number: int, frame: FrameType | None) -> None:
            self._signals.append(number)

        numbers = [signal.Signals[name] for name in FORWARDED if hasattr(signal, name)]
        former = {number: signal.signal(number, note) for number in numbers}
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
def _keeping_terminal() -> Iterator[None]:
    """Give the terminal its settings (echo, lines, signals) back, whatever the ranks have made of them."""
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
        # A launcher in the background would be stopped by the kernel for touching the terminal.
        with contextlib.suppress(OSError, termios.error), open("/dev/tty", "rb", buffering=0) as terminal:
            if os.tcgetpgrp(terminal.fileno()) == os.getpgrp() and termios.tcgetattr(terminal) != before:
                termios.tcsetattr(terminal, termios.TCSADRAIN, before)


def with_restarts(spec: LaunchSpec, attempt: Callable[[int], Supervisor]) -> int:
    """Run attempts until one ends well, somebody wants an end, or `max_restarts` are used up; the last exit code."""
    for number in range(spec.max_restarts + 1):
        ended = attempt(number)
        if ended.code == 0 or ended.final:
            break
        if number < spec.max_restarts:
            print(f"accelerate launch: restart {number + 1} of {spec.max_restarts}", file=sys.stderr, flush=True)
    return ended.code


def _run_name() -> str:
    """The folder of a run's logs: time of the start and the launcher's process id, so that runs never mix."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
