# SPDX-License-Identifier: Apache-2.0
"""torch's profiler around some optimizer steps of a run, as `accelerate launch --profile` requests it."""

from __future__ import annotations

import atexit
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ..core.observers import RunObserver


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
