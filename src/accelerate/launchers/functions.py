# SPDX-License-Identifier: Apache-2.0
"""Run a function in several forked processes; the error contains the traceback of the first failure."""

from __future__ import annotations

import contextlib
import math
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
from .failure import End, first_failure
from .process import die_with

# Seconds between SIGTERM and SIGKILL.
STOP_TIMEOUT = 4.0
# Seconds in which a rank may turn out to be the cause of another one's failure.
CAUSE_TIMEOUT = 5.0


def run_functions(
    function: Callable[..., Any],
    args: Sequence[Any],
    variables: Sequence[Mapping[str, str | None]],
    marks: Sequence[str],
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
    # Where the system cannot fork, the function and its arguments must be importable: Python sends them by name.
    context: Any = multiprocessing.get_context("fork" if hasattr(os, "fork") else "spawn")
    started: list[tuple[BaseProcess, Connection]] = []
    parent = os.getpid()
    try:
        for rank_variables, mark in zip(variables, marks, strict=True):
            ours, theirs = context.Pipe(duplex=False)
            child = context.Process(
                target=_child,
                args=(function, args, rank_variables, theirs, parent, mark, return_values),
            )
            child.start()
            theirs.close()
            started.append((child, ours))
        return _join(started, return_values)
    finally:
        alive = [process for process, _ in started if process.is_alive()]
        for process in alive:
            process.terminate()
        deadline = time.monotonic() + STOP_TIMEOUT
        for process in alive:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()


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
    result = pickle.dumps(None) if return_value else None
    try:
        value = function(*args)
        # By value: the process ends, and with it memory that it could share.
        result = pickle.dumps(value) if return_value else None
    except BaseException as error:
        if not isinstance(error, SystemExit) or error.code not in (None, 0):
            if error.__traceback__:
                frames = error.__traceback__.tb_next
            else:
                frames = None
            report.send(
                (time.monotonic(), "".join(traceback.format_exception(type(error), error, frames)))
            )
            sys.exit(1)
    finally:
        for output in outputs:
            output.finish()
    finish_forked()
    if result is not None:
        report.send(result)


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
        complete, newline, unfinished = self._pending.rpartition("\n")
        if newline:
            self._pending = unfinished
            self._stream.write(self._marked(complete + newline))
            self._stream.flush()
        return len(text)

    def _marked(self, text: str) -> str:
        """The text with the mark before each line, and before what replaces a line, as progress bars do."""
        if not self._mark:
            return text
        at_start, self._at_start = self._at_start, text[-1] in "\r\n"
        marked = re.sub(r"[\r\n](?=[^\r\n])", lambda end: end[0] + self._mark, text)
        if at_start and text[0] not in "\r\n":
            return self._mark + marked
        return marked

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
    """Wait for all processes, and read what they report. LaunchError for the one that failed first."""
    running = {process.sentinel: process for process, _ in started}
    # A process that returns much ends only when its value has been read.
    silent = {connection: rank for rank, (_, connection) in enumerate(started)}
    values: dict[int, Any] = {}
    errors: dict[int, tuple[float, str]] = {}
    deadline = math.inf
    while running:
        timeout = None if deadline == math.inf else 0.02
        for ready in multiprocessing.connection.wait([*silent, *running], timeout):
            if not isinstance(ready, Connection):
                running.pop(ready).join()  # type: ignore[arg-type]
                continue
            rank = silent.pop(ready)
            with contextlib.suppress(EOFError):
                message = ready.recv()
                if isinstance(message, bytes):
                    values[rank] = pickle.loads(message)
                else:
                    errors[rank] = message
        ends = []
        for rank, (process, _) in enumerate(started):
            failed_at, output = errors.get(rank, (math.inf, ""))
            end = End(
                rank,
                process.exitcode or 0,
                failed_at,
                output,
                pid=process.pid or 0,
                host=socket.gethostname(),
                by_itself=process.exitcode is not None,
            )
            ends.append(end)
        failure = first_failure(ends)
        if failure is not None:
            # The process that failed first may end after others that lost the connection to it.
            deadline = min(deadline, time.monotonic() + CAUSE_TIMEOUT)
            is_over = not running or time.monotonic() > deadline
            if is_over or not failure.source.points_elsewhere:
                output = failure.source.output
                raise LaunchError(f"{failure.report(output)}\n\n{output}".rstrip())
    if return_values:
        return [values[rank] for rank in sorted(values)]
    return []
