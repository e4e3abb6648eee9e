# SPDX-License-Identifier: Apache-2.0
"""Automatic actions of a run: resume from its newest checkpoint, and save and exit on a signal."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from ..data_loader.loader import PreparedLoader
from ..runtime.agreement import Process
from ..runtime.step_exchange import StepExchange
from ..state import GradientState
from .loading import LoadReport
from .preemption import PreemptionWatch


class ResumeController:
    """Resumes before the first pass over a loader, and stops a run between two batches.

    Args:
        load: bound method that loads the newest checkpoint and returns None where there is none.
        leave: bound method that saves the run and ends this process; its argument is the reason.
        exchange: by which the ranks agree on the step after which they stop.

    References to the methods and the loaders are weak, so that a run is freed with its last reference.

    A run stops between two batches of the loaders that it trains on, so that an evaluation is never cut in two: those
    that were read at an optimizer's step.
    """

    def __init__(
        self,
        load: Callable[[], LoadReport | None],
        leave: Callable[[str], None],
        exchange: StepExchange,
    ) -> None:
        self._load = weakref.WeakMethod(load)
        self._leave = weakref.WeakMethod(leave)
        self._exchange = exchange
        self._report: LoadReport | None = None
        # Whether to resume when a loader is first read, or the report is first requested: all objects are known then.
        self.is_pending: bool = False
        self._watch: PreemptionWatch | None = None
        self._loaders: list[weakref.ref[PreparedLoader]] = []
        self._trained: list[weakref.ref[PreparedLoader]] = []

    # -- resume

    @property
    def report(self) -> LoadReport | None:
        """What was resumed; None where nothing was found. A pending resume is done now."""
        self.resume_if_pending()
        return self._report

    def resume(self) -> LoadReport | None:
        """Load the newest checkpoint now."""
        self.is_pending = False
        load = self._load()
        self._report = None if load is None else load()
        return self._report

    def resume_if_pending(self) -> None:
        """Do now what waits for the first use."""
        if self.is_pending:
            self.resume()

    # -- the loaders

    def add_loader(self, loader: Any) -> None:
        """Take a prepared loader in."""
        self._loaders.append(weakref.ref(loader))

    def record_step(self) -> None:
        """An optimizer steps: the loader that is being read is trained on."""
        loader = getattr(GradientState().active_dataloader, "origin", None)
        if loader is not None and not self._is_trained(loader):
            self._trained.append(weakref.ref(loader))

    def _is_trained(self, loader: object) -> bool:
        return any(loader is trained for trained in _alive(self._trained))

    @property
    def main_loader(self) -> PreparedLoader | None:
        """The loader whose epoch is the run's: the first that was trained on, or the first of all before a step."""
        return next(iter(_alive(self._trained) or _alive(self._loaders)), None)

    @property
    def main_index(self) -> int | None:
        """Its place among the loaders, where the run has trained."""
        for trained in _alive(self._trained):
            for i, loader in enumerate(_alive(self._loaders)):
                if loader is trained:
                    return i
            break
        return None

    def set_main_loader(self, index: int | None) -> None:
        """The main loader of the run that was loaded, until this one has stepped."""
        if index is not None and index < len(self._loaders):
            self._trained = [self._loaders[index]]

    def clear(self) -> None:
        """Forget the loaders."""
        self._loaders.clear()
        self._trained.clear()

    # -- stop

    def watch_signals(self, process: Process, signals: Sequence[str]) -> bool:
        """From here on the run stops when one of `signals` has reached any process. False from another thread."""
        if (
            not signals
            or self._watch is not None
            or threading.current_thread() is not threading.main_thread()
        ):
            return self._watch is not None
        self._watch = PreemptionWatch(process, signals, exchange=self._exchange)
        return True

    def stop_if_requested(self, loader: object) -> None:
        """Stop the run between two batches of a loader, if the ranks have agreed to."""
        watch = self._watch
        if watch is None or not watch.is_agreed:
            return
        leave = self._leave()
        # The rest of an epoch (`skip_first_batches`) is read for the loader that the user prepared.
        # Where `leave` is None the run was freed, and one of its loaders is still being read.
        if leave is not None and self._is_trained(getattr(loader, "origin", loader)):
            assert watch.received is not None
            leave(watch.received)

    def close(self) -> None:
        """Restore the handlers of the signals."""
        if self._watch is not None:
            self._watch.close()
            self._watch = None


def _alive(references: list[weakref.ref[PreparedLoader]]) -> list[PreparedLoader]:
    loaders = [reference() for reference in references]
    return [loader for loader in loaders if loader is not None]
