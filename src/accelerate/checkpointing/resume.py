# SPDX-License-Identifier: Apache-2.0
"""What a run does by itself: go on from its newest checkpoint, and save and leave when it is asked to stop."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

from ..runtime.agreement import Process
from ..state import GradientState
from .loading import LoadReport
from .preemption import PreemptionWatch


class GoingOn:
    """The loaders of a run, and what is done at them: resume before the first pass, stop between two batches.

    Args:
        load: loads the newest checkpoint; None where there is none.
        leave: saves the run and ends this process; it is told why.
        is_training: whether some model of the run is in training mode.

    A run stops between batches of the loaders that it trains on, so that an evaluation is never cut in two: those
    that were read at an optimizer's step; or any, while models are in training mode, where no step shows itself
    (an engine that steps in its backward).
    """

    def __init__(
        self, load: Callable[[], LoadReport | None], leave: Callable[[str], None], is_training: Callable[[], bool]
    ) -> None:
        self._load = load
        self._leave = leave
        self._is_training = is_training
        self._report: LoadReport | None = None
        self._asked = False  # a resume that waits for the first use
        self._watch: PreemptionWatch | None = None
        self._loaders: list[Any] = []
        self._trained: list[Any] = []

    # -- go on

    def at_first_use(self) -> None:
        """Resume when a loader is first read, or the report first asked for: all objects are known by then."""
        self._asked = True

    @property
    def is_asked(self) -> bool:
        """Whether a resume waits for the first use."""
        return self._asked

    @property
    def report(self) -> LoadReport | None:
        """What the resume has loaded; None where it found nothing. One that waits is done now."""
        self.resume_if_asked()
        return self._report

    def resume(self) -> LoadReport | None:
        """Load the newest checkpoint now."""
        self._asked = False
        self._report = self._load()
        return self._report

    def resume_if_asked(self) -> None:
        """Do now what waits for the first use."""
        if self._asked:
            self.resume()

    # -- the loaders

    def attend(self, loader: Any) -> None:
        """Take a prepared loader in."""
        self._loaders.append(loader)
        loader.before_pass = (self.resume_if_asked,)
        if self._watch is not None:
            loader.between_batches = (functools.partial(self._between, loader),)

    def note_step(self) -> None:
        """An optimizer steps: the loader that is being read is trained on."""
        loader = getattr(GradientState().active_dataloader, "origin", None)
        if loader is not None and not any(loader is known for known in self._trained):
            self._trained.append(loader)

    @property
    def main_loader(self) -> Any:
        """The loader whose epoch is the run's: the first that was trained on, or the first of all before a step."""
        return next(iter(self._trained or self._loaders), None)

    @property
    def main_index(self) -> int | None:
        """Its place among the loaders, where the run has trained."""
        return next((i for i, one in enumerate(self._loaders) if self._trained and one is self._trained[0]), None)

    def take_main(self, index: int | None) -> None:
        """The main loader of the run that was loaded, until this one has stepped."""
        if index is not None and index < len(self._loaders):
            self._trained = [self._loaders[index]]

    def forget(self) -> None:
        """The run's objects are given back."""
        self._loaders.clear()
        self._trained.clear()

    # -- stop

    def listen(self, process: Process, signals: Sequence[str]) -> bool:
        """From here on the run stops when one of `signals` has reached any process. False from another thread."""
        if not signals or self._watch is not None or threading.current_thread() is not threading.main_thread():
            return self._watch is not None
        self._watch = PreemptionWatch(process, signals)
        for loader in self._loaders:
            loader.between_batches = (functools.partial(self._between, loader),)
        return True

    @property
    def is_listening(self) -> bool:
        return self._watch is not None

    def _between(self, loader: Any) -> None:
        watch = self._watch
        if watch is None:
            return
        here = any(loader is one for one in self._trained) if self._trained else self._is_training()
        if here and watch.requested():
            self._leave(watch.received or "another process was")

    def close(self) -> None:
        """Give the signals back."""
        if self._watch is not None:
            self._watch.close()
            self._watch = None
