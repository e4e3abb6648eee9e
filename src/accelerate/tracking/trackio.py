# SPDX-License-Identifier: Apache-2.0
"""Trackio: a local dashboard with the calls of wandb."""

from __future__ import annotations

import importlib
from typing import Any

from .base import ClientTracker, checked, named, on_main_process
from .values import plain


class TrackioTracker(ClientTracker):
    """Logs to the project `run_name`; `kwargs` go to `trackio.init`."""

    name = "trackio"
    main_process_only = False

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)

    @property
    def run(self) -> Any:
        return self.tracker

    def _open(self) -> Any:
        return importlib.import_module("trackio").init(**{"project": self.run_name, **self.init_kwargs})

    def _id_of(self, client: Any) -> str | None:
        return named(client, "name")

    @classmethod
    def going_on(cls, run_id: str) -> dict[str, Any]:
        return {"name": run_id, "resume": "allow"}

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.tracker.config.update(plain(checked(values, "store_init_configuration")))

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record whatever `trackio` takes; `kwargs` go to `run.log`."""
        self.tracker.log(plain(checked(values, "log")), step=step, **kwargs)
