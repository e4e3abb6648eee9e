# SPDX-License-Identifier: Apache-2.0
"""The trackers of one run: started together on the main process, logged to together, finished together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .base import GeneralTracker
from .registry import filter_trackers, start_trackers


class TrackerGroup:
    """The trackers that `log_with` asks for.

    Args:
        log_with: names, tracker objects or classes, as `Accelerator(log_with=...)` takes them.
        logging_dir: the folder of trackers that write files.
    """

    def __init__(self, log_with: Any, logging_dir: str | None) -> None:
        self.log_with = filter_trackers(log_with, logging_dir)
        self.logging_dir = logging_dir
        self.trackers: list[GeneralTracker] = []
        # {tracker name: run key} of the run that was resumed: its trackers continue their runs.
        self.resumed_keys: dict[str, str] = {}

    def start(
        self,
        project_name: str,
        config: dict[str, Any] | None = None,
        init_kwargs: dict[str, dict[str, Any]] | None = None,
    ) -> None:
        """Start all of them; only the main process calls this, so that there is one run of each."""
        self.trackers = start_trackers(
            self.log_with, project_name, self.logging_dir, config, init_kwargs, self.resumed_keys
        )

    def get(self, name: str, unwrap: bool = False) -> Any:
        """The tracker of this name (its client object with `unwrap`); a blank one where none has started here.

        Raises ValueError where others have started and this one has not.
        """
        for tracker in self.trackers:
            if tracker.name == name:
                return tracker.tracker if unwrap else tracker
        if self.trackers:
            known = ", ".join(tracker.name for tracker in self.trackers)
            raise ValueError(f"{name} is not a tracker that this run has started (there is: {known})")
        return GeneralTracker(_blank=True)

    def log(
        self,
        values: Mapping[str, Any],
        step: int | None = None,
        log_kwargs: dict[str, dict[str, Any]] | None = None,
    ) -> None:
        """Hand a dict of values to every tracker; `log_kwargs` are {tracker name: further arguments}."""
        for tracker in self.trackers:
            tracker.log(values, step=step, **(log_kwargs or {}).get(tracker.name, {}))  # type: ignore[arg-type]

    def run_keys(self) -> dict[str, str]:
        """{tracker name: key of its run}, of those whose run can be continued."""
        return {tracker.name: tracker.run_key for tracker in self.trackers if tracker.run_key is not None}

    def finish(self) -> None:
        """Close all of them."""
        for tracker in self.trackers:
            tracker.finish()
