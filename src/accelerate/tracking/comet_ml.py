# SPDX-License-Identifier: Apache-2.0
"""Comet."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from .base import ClientTracker, checked, named, on_main_process
from .values import number, plain


class CometMLTracker(ClientTracker):
    """Logs to the project `run_name`; `kwargs` go to `comet_ml.start`. The key comes from Comet's own settings."""

    name = "comet_ml"

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)

    @property
    def writer(self) -> Any:
        return self.tracker

    def _open(self) -> Any:
        return importlib.import_module("comet_ml").start(**{"project_name": self.run_name, **self.init_kwargs})

    def _id_of(self, client: Any) -> str | None:
        return named(client, "id")

    @classmethod
    def going_on(cls, run_id: str) -> dict[str, Any]:
        return {"experiment_key": run_id}

    def _close(self, client: Any) -> None:
        client.end()

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.tracker.log_parameters(plain(checked(values, "store_init_configuration")))

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record numbers and mappings of numbers as metrics, text as `other`; `kwargs` go to those calls."""
        experiment = self.tracker
        if step is not None:
            experiment.set_step(step)
        for key, value in checked(values, "log").items():
            if isinstance(value, str):
                experiment.log_other(key, value, **kwargs)
            elif isinstance(value, Mapping):
                experiment.log_metrics(plain(value), step=step, **kwargs)
            elif (scalar := number(value)) is not None:
                experiment.log_metric(key, scalar, step=step, **kwargs)
            else:
                self._refuse(key, value, "numbers, text and mappings of numbers")
