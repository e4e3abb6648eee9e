# SPDX-License-Identifier: Apache-2.0
"""DVCLive."""

from __future__ import annotations

import importlib
from typing import Any

from .base import ClientTracker, checked, on_main_process
from .values import configuration, flat, number


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

    def __init__(self, run_name: str | None = None, live: Any = None, **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)
        self._live = live

    @property
    def live(self) -> Any:
        """The `dvclive.Live`."""
        return self.tracker

    def _open(self) -> Any:
        return self._live if self._live is not None else importlib.import_module("dvclive").Live(**self.init_kwargs)

    def _close(self, client: Any) -> None:
        client.end()

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Record the hyperparameters of the run."""
        self.tracker.log_params(configuration(checked(values, "store_init_configuration")))

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
        for key, value in flat(checked(values, "log")):
            scalar = number(value)
            if scalar is None:
                self._warn_unsupported(key, value, "numbers as metrics")
            else:
                live.log_metric(key, scalar, **kwargs)
        live.next_step()
