# SPDX-License-Identifier: Apache-2.0
"""Run a function in several forked processes; the error contains the traceback of the first failure."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import pickle
import re
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, TextIO

from ..core import env
from ..core.errors import LaunchError
from . import tracebacks
from .failure import cause_of, early_cause
from .process import die_with

# Seconds between SIGTERM and SIGKILL.
STOP_TIMEOUT = 4.0
# Seconds in which a rank may turn out to be the cause of another one's failure.
CAUSE_TIMEOUT = 5.0


def run_functions(
    function: Callable[..., Any],
    args: Sequence[Any],
    variables: Sequence[Mapping[str, str | None]],
    marks: Sequence[str] = (),
    return_values: bool = False,
) -> list[Any]:
    """Call `function(*args)` in one forked process for each set of variables, and wait for all.

    The function need not be picklable.

    Args:
        function: the function.
        args: its arguments.
        variables: environment variables of each process.
        marks: what each line of a process's output begins with.
        return_values: whether to return what the calls return, which is then pickled.

    Returns:
        What the calls return, in the order of the processes; without `return_values` an empty list.

    Raises:
        LaunchError: with the traceback of the process that failed first.
    """
    context = multiprocessing.get_context("fork")
    started: list[tuple[BaseProcess, Connection]] = []
    parent = os.getpid()
    try:
        for index, own in enumerate(variables):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_child,
                args=(function, args, dict(own), theirs, parent, marks[index] if marks else "", return_values),
            )
            process.start()
            theirs.close()
            started.append((process, ours))
        return _join(started, return_values)
    finally:
        _end(process for process, _ in started)


def _child(
    function: Callable[..., Any],
    args: Sequence[Any],
    variables: Mapping[str, str | None],
    report: Connection,
    parent: int,
    mark: str,
    return_value: bool,
) -> None:
    prepare = die_with(parent)
    if prepare is not None:
        prepare()
    env.publish(variables)
    forget_parent()
    outputs = [_Lines(sys.stdout, mark), _Lines(sys.stderr, mark)]
    sys.stdout, sys.stderr = outputs
    try:
        value = function(*args)
        # By value: the process ends, and with it memory that it could share.
        sent = pickle.dumps(value) if return_value else None
    except BaseException as error:
        code = error.code if isinstance(error, SystemExit) else 1
        if code not in (None, 0):
            own = error.__traceback__.tb_next if error.__traceback__ else None
            report.send((time.monotonic(), "".join(traceback.format_exception(type(error), error, own))))
            sys.exit(1)
        sent = pickle.dumps(None) if return_value else None
    finally:
        for output in outputs:
            output.finish()
    finish_forked()
    if sent is not None:
        report.send(sent)


class _Lines:
    """An output stream that passes on complete lines, in one write each, so that lines of several ranks do not mix.

    `print` writes a line and its end separately, and a notebook sends each write as a message. An incomplete line is
    passed on by `flush`, as progress bars need it.
    """

    def __init__(self, stream: TextIO, mark: str = "") -> None:
        self._stream = stream
        self._pending = ""
        self._mark = mark
        self._at_start = True

    def write(self, text: str) -> int:
        self._pending += text
        complete, newline, rest = self._pending.rpartition("\n")
        if newline:
            self._pending = rest
            self._stream.write(self._marked(complete + newline))
            self._stream.flush()
        return len(text)

    def _marked(self, text: str) -> str:
        """The text with the mark before each line, and before what replaces a line, as progress bars do."""
        if not self._mark:
            return text
        found = re.sub(r"[\r\n](?=[^\r\n])", lambda end: end[0] + self._mark, text)
        if self._at_start and text[0] not in "\r\n":
            found = self._mark + found
        self._at_start = text[-1] in "\r\n"
        return found

    def writelines(self, lines: Iterable[str]) -> None:
        self.write("".join(lines))

    def flush(self) -> None:
        if self._pending:
            pending, self._pending = self._pending, ""
            self._stream.write(self._marked(pending))
        self._stream.flush()

    def finish(self) -> None:
        """Complete the last line, so that another rank's line does not continue it."""
        if self._pending:
            self.write("\n")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def forget_parent() -> None:
    """Reset what must not be inherited from the parent: the shared states, and torch's threads."""
    if "accelerate.state" in sys.modules:
        from .. import state

        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()
    if "torch" in sys.modules:
        import torch

        # OpenMP's threads do not survive a fork: a parallel region in the child would wait for them for ever.
        torch.set_num_threads(1)


def finish_forked() -> None:
    """Close the process group: a forked process ends without the interpreter's exit handlers."""
    if "accelerate.runtime.group" in sys.modules:
        from ..runtime import group

        group.leave()


def _join(started: Sequence[tuple[BaseProcess, Connection]], return_values: bool) -> list[Any]:
    waiting = {process.sentinel: process for process, _ in started}
    # A process that returns much ends only when its value has been read.
    silent = {connection: rank for rank, (_, connection) in enumerate(started)} if return_values else {}
    values: dict[int, Any] = {}
    reports: dict[int, tuple[float, str]] = {}
    while waiting or silent:
        for ready in multiprocessing.connection.wait([*silent, *waiting]):
            if isinstance(ready, Connection):
                rank = silent.pop(ready)
                try:
                    message = ready.recv()
                except EOFError:
                    continue
                if isinstance(message, bytes):
                    values[rank] = pickle.loads(message)
                else:
                    reports[rank] = message
                continue
            process = waiting.pop(ready)  # type: ignore[arg-type]
            process.join()
            if process.exitcode:
                raise _first_failure(started, reports)
    return [values[rank] for rank in sorted(values)]


def _first_failure(
    started: Sequence[tuple[BaseProcess, Connection]], reports: dict[int, tuple[float, str]]
) -> LaunchError:
    """The error of the process that failed first, which may end after others that lost the connection to it."""
    deadline = time.monotonic() + CAUSE_TIMEOUT
    while True:
        for rank, (_, connection) in enumerate(started):
            if rank not in reports and connection.poll():
                try:
                    message = connection.recv()
                except EOFError:
                    continue
                if not isinstance(message, bytes):  # else the value of a rank that ended well
                    reports[rank] = message
        level = {rank: tracebacks.blame(words, rank) for rank, (_, words) in reports.items()}
        killed = [rank for rank, (process, _) in enumerate(started) if (process.exitcode or 0) < 0]
        early = [rank for rank, (process, _) in enumerate(started) if process.exitcode == 0]
        if killed or early or tracebacks.OWN in level.values() or time.monotonic() > deadline:
            break
        time.sleep(0.02)
    own = [rank for rank in reports if level[rank] == tracebacks.OWN]
    if killed and not own:
        return _error(killed[0], started[killed[0]][0], "")
    first = min(reports, key=lambda rank: (level[rank], reports[rank][0]), default=None)
    if first is None:
        first = next(rank for rank, (process, _) in enumerate(started) if process.exitcode)
        return _error(first, started[first][0], "")
    words = reports[first][1]
    named = tracebacks.named_ranks(tracebacks.message_of(words, first))
    early = [rank for rank in early if level[first] == tracebacks.LOST or (level[first] and rank in named)]
    if early:
        failed = [rank for rank, (process, _) in enumerate(started) if process.exitcode != 0]
        return _error(early[0], started[early[0]][0], words, early_cause(failed))
    return _error(first, started[first][0], words)


def _error(rank: int, process: BaseProcess, words: str, cause: str | None = None) -> LaunchError:
    cause = cause or cause_of(process.exitcode or 1, words, rank)
    message = f"rank {rank} failed: {cause} (host {socket.gethostname()}, pid {process.pid})"
    return LaunchError(f"{message}\n\n{words}" if words else message)


def _end(processes: Iterable[BaseProcess]) -> None:
    alive = [process for process in processes if process.is_alive()]
    for process in alive:
        process.terminate()
    deadline = time.monotonic() + STOP_TIMEOUT
    for process in alive:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()
