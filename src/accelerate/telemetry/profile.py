# SPDX-License-Identifier: Apache-2.0
"""torch's profiler around a block (`accelerator.profile`), and around steps (`accelerate launch --profile`)."""

from __future__ import annotations

import atexit
import contextlib
import functools
import gzip
import os
import shutil
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from ..config.training import ProfileKwargs
from ..core.constants import PROFILE_PATTERN_NAME
from ..core.errors import ConfigurationError
from ..core.observers import RunObserver


@contextlib.contextmanager
def profile(options: ProfileKwargs | None, rank: int, wait: Callable[[], None]) -> Iterator[Any]:
    """Profile the block with `options` and yield the `torch.profiler.profile` (call its `step()` under a schedule).

    With `output_trace_dir` each rank writes `profile_<rank>.json` there (Chrome's trace format) whenever a trace is
    ready: at the end of the block, or after each active window of a schedule, where it replaces the earlier one. Then
    all ranks call `wait`, so that every file exists when the block ends. An exception in the block is raised at once.

    Raises:
        ConfigurationError: the block ended before the first active window of the schedule.
    """
    options = options or ProfileKwargs()
    profiler = options.build()
    folder = options.output_trace_dir
    if folder is None:
        with profiler:
            yield profiler
        return
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(
            f"ProfileKwargs.output_trace_dir={folder!r} cannot be created: {error.strerror or error}"
        ) from error
    path = os.path.join(folder, PROFILE_PATTERN_NAME.format(suffix=rank))
    ready = _TraceFile(path, options.on_trace_ready)
    profiler.on_trace_ready = ready
    with profiler:
        yield profiler
    wait()
    if not ready.written:
        raise ConfigurationError(
            f"rank {rank}: there is no trace for {path}: the block made fewer `profiler.step()` calls than the first "
            f"active window of schedule_option={options.schedule_option} needs"
        )


class _TraceFile:
    """Handler of a ready trace: write it to `path`, then call the user's own handler."""

    def __init__(self, path: str, then: Callable[[Any], Any] | None) -> None:
        self.path = path
        self.then = then
        self.written = False

    def __call__(self, profiler: Any) -> None:
        partial = f"{self.path}.partial"
        type(profiler).export_chrome_trace(profiler, partial)
        os.replace(partial, self.path)
        self.written = True
        # torch saves each trace only once: further exports by the user are copies.
        profiler.export_chrome_trace = functools.partial(self._copy, profiler)
        if self.then is not None:
            self.then(profiler)

    def _copy(
        self, profiler: Any, target: str | os.PathLike[str], use_python_export: bool = False
    ) -> None:
        target = os.fspath(target)
        if use_python_export:  # another exporter, which has no such limit
            type(profiler).export_chrome_trace(profiler, target, use_python_export=True)
            return
        if not target.endswith(".gz"):
            shutil.copyfile(self.path, target)
            return
        with open(self.path, "rb") as source, gzip.open(target, "wb") as packed:
            shutil.copyfileobj(source, packed)


class StepProfile(RunObserver):
    """Profiles the steps `first` to `last` of this process, and writes a trace.

    Args:
        path: of the trace, in Chrome's format.
        first: the first step that is recorded, from 1.
        last: the last one. If the run ends before it, the trace has the steps until then.
        ended: called with the last recorded step and the path when the trace is written, or with the steps of the run
            and None if it has ended before the first.
    """

    def __init__(
        self, path: Path, first: int, last: int, ended: Callable[[int, Path | None], None]
    ) -> None:
        self._path = path
        self._first, self._last = first, last
        self._ended = ended
        self._optimizer: weakref.ref[Any] | None = None
        self._steps = 0
        self._profiler: Any = None
        self._pid = os.getpid()
        atexit.register(self.close)

    def after_prepare(self, prepared: Any) -> None:
        """Count the steps of the first optimizer."""
        if self._optimizer is None and isinstance(prepared, torch.optim.Optimizer):
            self._optimizer = weakref.ref(prepared)
            self.begin()

    def begin(self) -> None:
        """Start before the first step, if that is recorded."""
        if self._first == self._steps + 1 and self._profiler is None:
            self._profiler = torch.profiler.profile()
            self._profiler.start()

    def after_step(self, optimizer: Any) -> None:
        """Begin or end the trace; does nothing once it is written."""
        if self._optimizer is None or self._optimizer() is not optimizer:
            return
        self._steps += 1
        if self._steps == self._last and self._profiler is not None:
            self.close()
        elif self._steps < self._last:
            self.begin()

    def close(self) -> None:
        """Write the trace, if that was not done: the run has ended."""
        atexit.unregister(self.close)
        if self._pid != os.getpid() or self._first > self._last:
            return
        path = None
        if self._profiler is not None:
            self._profiler.stop()
            if self._steps >= self._first:
                path = self._path
                path.parent.mkdir(parents=True, exist_ok=True)
                partial = f"{path}.partial"
                self._profiler.export_chrome_trace(partial)
                os.replace(partial, path)
        self._ended(self._steps, path)
        self._profiler = None
        self._last = 0  # done
