# SPDX-License-Identifier: Apache-2.0
"""DVCLive."""

from __future__ import annotations

import importlib
from typing import Any

from .base import ClientTracker, on_main_process


class DVCLiveTracker(ClientTracker):
    """Logs to DVCLive.

    Args:
        run_name: not used; DVCLive names its runs itself.
        live: an open `dvclive.Live`; a new one is created by default.
        kwargs: passed to the new `dvclive.Live`.
    """

    name = "dvclive"
    # `log` is three calls that share the state of one object without a lock, and scripts call the same object.
    background = False
    live = ClientTracker.tracker  # the `dvclive.Live`

    def __init__(self, run_name: str | None = None, live: Any = None, **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)
        self._live = live

    def _open(self) -> Any:
        if self._live is not None:
            return self._live
        return importlib.import_module("dvclive").Live(**self.init_kwargs)

    def _close(self, client: Any) -> None:
        client.end()

    def _store(self, values: dict[str, Any]) -> None:
        self.tracker.log_params(values)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record numbers, then advance DVCLive's step.

        Args:
            values: {name: number}, possibly nested; nested names are joined by `/`.
            step: the training step.
            kwargs: passed to `dvclive.Live.log_metric`.
        """
        live = self.tracker
        if step is not None:
            live.step = step
        for key, scalar in self._numbers(values, "numbers as metrics"):
            live.log_metric(key, scalar, **kwargs)
        live.next_step()
