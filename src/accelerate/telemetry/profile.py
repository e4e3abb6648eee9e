# SPDX-License-Identifier: Apache-2.0
"""`accelerator.profile`: torch's profiler around a block, with one trace file a rank."""

from __future__ import annotations

import contextlib
import functools
import gzip
import os
import shutil
from collections.abc import Callable, Iterator
from typing import Any

from ..config.training import ProfileKwargs
from ..core.constants import PROFILE_PATTERN_NAME
from ..core.errors import ConfigurationError


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
