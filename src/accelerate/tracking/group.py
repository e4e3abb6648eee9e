# SPDX-License-Identifier: Apache-2.0
"""The trackers of one run, as a group that is started, logged to and finished together."""

from __future__ import annotations

import atexit
import multiprocessing.util
import os
from collections.abc import Callable, Mapping
from typing import Any

from ..core.errors import ConfigurationError
from ..core.stacks import user_line
from ..state import PartialState
from .background import END_LIMIT, BackgroundLog, NotCopiedError, log_later, snapshot
from .base import ClientTracker, GeneralTracker, checked, logger
from .registry import filter_trackers, start_trackers

# {group with open trackers: the process that opened them}
_open: dict[TrackerGroup, int] = {}


def _finish_open() -> None:
    """Finish the trackers of a process that ends without `end_training`."""
    # A child of multiprocessing, such as a rank of `notebook_launcher`, runs no `atexit` function, with which client
    # packages close their runs.
    in_child = multiprocessing.parent_process() is not None
    while _open:
        group, process = _open.popitem()
        if process == os.getpid():
            group.drain(END_LIMIT)
            _each(
                group._all,
                lambda tracker: tracker.finish() if in_child else tracker.finish_at_exit(),
            )


def _each(
    trackers: list[GeneralTracker], finish: Callable[[GeneralTracker], None]
) -> list[Exception]:
    """Finish these trackers, log what fails, and return the errors."""
    errors = []
    for tracker in trackers:
        try:
            finish(tracker)
        except Exception as error:
            logger.error(
                "the tracker %s failed when it was finishing; the last values may be lost: %r",
                tracker.name,
                error,
            )
            errors.append(error)
    return errors


class TrackerGroup:
    """The trackers of a run.

    Args:
        log_with: names, tracker objects or classes, as `Accelerator(log_with=...)` takes them.
        logging_dir: the folder of trackers that write files.
    """

    def __init__(self, log_with: Any, logging_dir: str | None) -> None:
        self.log_with: list[Any] = filter_trackers(log_with, logging_dir)
        self.logging_dir = logging_dir
        self.trackers: list[GeneralTracker] = []
        # Without `log_with`, the run's values are written to its project folder.
        self._local: list[GeneralTracker] = []
        # {tracker name: run key} from a loaded checkpoint: these trackers continue their runs.
        self.resumed_keys: dict[str, str] = {}
        self._warned = False
        # The first call of `log` before trackers were started.
        self._early_line = ""
        self._is_finished = False
        # Calls `log` in a thread; None calls it in the loop.
        self._background: BackgroundLog | None = None

    def start(
        self,
        project_name: str,
        config: dict[str, Any] | None = None,
        init_kwargs: dict[str, dict[str, Any]] | None = None,
        *,
        background: bool = False,
    ) -> None:
        """Start the trackers. Call it on the main process only, so that each service has one run."""
        self.drain()
        self._is_finished = False
        self.trackers = start_trackers(
            self.log_with, project_name, self.logging_dir, config, init_kwargs, self.resumed_keys
        )
        if not self.log_with and self.logging_dir is not None:
            # Not among `trackers`, which the user requested.
            try:
                self._local = start_trackers(["local"], str(project_name), self.logging_dir, config)
            except (OSError, ConfigurationError) as error:
                logger.warning(
                    "the values of this run are not written to its project folder: %s", error
                )
        if self._early_line and self._all and not self._warned:
            self._warn(self._early_line, "before accelerator.init_trackers(project_name)")
        _open[self] = os.getpid()
        # Before the functions of the client packages, which were registered earlier.
        if multiprocessing.parent_process() is None:
            atexit.register(_finish_open)
        else:
            multiprocessing.util.Finalize(None, _finish_open, exitpriority=0)
        self._background = BackgroundLog.shared() if background else None
        for tracker in self._all:
            if isinstance(tracker, ClientTracker):
                if self._background and tracker.background:
                    tracker._drain = self._background.drain
                else:
                    tracker._drain = None

    @property
    def _all(self) -> list[GeneralTracker]:
        return [*self.trackers, *self._local]

    def get(self, name: str, unwrap: bool = False) -> Any:
        """Return a started tracker.

        Args:
            name: the tracker's `name`.
            unwrap: return the client's run object instead.

        Returns:
            The tracker; a blank one on processes where none has started.

        Raises:
            ValueError: other trackers have started, but not this one.
        """
        self.drain()
        for tracker in self.trackers:
            if tracker.name == name:
                if unwrap:
                    return tracker.tracker
                return tracker
        if self.trackers:
            names = ", ".join(tracker.name for tracker in self.trackers)
            raise ValueError(f"this run has not started the tracker {name} (started: {names})")
        return GeneralTracker(_blank=True)

    def log(
        self,
        values: Mapping[str, Any],
        step: int | None = None,
        log_kwargs: dict[str, dict[str, Any]] | None = None,
    ) -> None:
        """Log values to every tracker; `log_kwargs` is {tracker name: further arguments of its `log`}."""
        if self._is_finished or (not self.trackers and self.log_with):
            if not self._warned and PartialState().is_main_process:
                when = "after accelerator.end_training()"
                if not self._is_finished:
                    when = "before accelerator.init_trackers(project_name)"
                self._warn(user_line(), when)
            return
        if not self._all and not self._early_line:
            self._early_line = user_line()
        if self._background is not None:
            self._log_later(self._background, values, step, log_kwargs or {})
            return
        for tracker in self._all:
            tracker.log(values, step=step, **(log_kwargs or {}).get(tracker.name, {}))  # type: ignore[arg-type]

    def _warn(self, line: str, when: str) -> None:
        self._warned = True
        logger.warning(f"{line}: accelerator.log was called {when}: the values are not logged")

    def _log_later(
        self, log: BackgroundLog, values: Any, step: Any, log_kwargs: dict[str, dict[str, Any]]
    ) -> None:
        """Have a thread log a copy of the values, unless there are objects among them that cannot be copied."""
        try:
            (copy, options, step), ready = snapshot(
                (dict(checked(values, "log")), log_kwargs, step)
            )
        except NotCopiedError:
            self.drain()
            copy = None
        for tracker in self._all:
            if copy is None or not tracker.background:
                tracker.log(values, step=step, **log_kwargs.get(tracker.name, {}))
            else:
                log_later(log, tracker, copy, ready, step=step, **options.get(tracker.name, {}))

    def drain(self, limit: float | None = None) -> None:
        """Wait until what was logged is with the trackers, at most `limit` seconds."""
        if self._background is not None and not self._background.drain(limit):
            logger.error(
                "the trackers did not accept all values within %g seconds: the last ones are lost",
                limit,
            )

    def run_keys(self) -> dict[str, str]:
        """Return {tracker name: run key} for the trackers whose run has a key."""
        return {
            tracker.name: tracker.run_key
            for tracker in self.trackers
            if tracker.run_key is not None
        }

    def finish(self) -> None:
        """Close the trackers. If one cannot be closed, the others are, and its error is raised."""
        _open.pop(self, None)
        self.drain(END_LIMIT)
        self._is_finished = bool(self._all)
        errors = _each(self._all, lambda tracker: tracker.finish())
        if errors:
            raise errors[0]
