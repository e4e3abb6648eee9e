# SPDX-License-Identifier: Apache-2.0
"""Comet."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from .base import ClientTracker, checked, on_main_process
from .values import number, plain


class CometMLTracker(ClientTracker):
    """Logs to Comet, which reads the API key from its own settings.

    Args:
        run_name: the name of the project.
        kwargs: passed to `comet_ml.start`.
    """

    name = "comet_ml"
    _run_key_attribute = "id"
    _resume_argument = "experiment_key"
    writer = ClientTracker.tracker  # the Comet experiment

    def _open(self) -> Any:
        return importlib.import_module("comet_ml").start(
            **{"project_name": self.run_name, **self.init_kwargs}
        )

    def _close(self, client: Any) -> None:
        client.end()

    def _store(self, values: dict[str, Any]) -> None:
        self.tracker.log_parameters(values)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record numbers and mappings of numbers as metrics, text as `other`.

        Args:
            values: {name: number, mapping of numbers, or text}.
            step: the training step.
            kwargs: passed to `log_metric`, `log_metrics` and `log_other`.
        """
        experiment = self.tracker
        if step is not None:
            experiment.set_step(step)
        for key, value in checked(values, "log").items():
            if isinstance(value, str):
                experiment.log_other(key, value, **kwargs)
            elif isinstance(value, Mapping):
                experiment.log_metrics(plain(value), step=step, **kwargs)
            elif (scalar := number(value)) is not None:
                # Comet stores a boolean metric as text.
                experiment.log_metric(
                    key, int(scalar) if isinstance(scalar, bool) else scalar, step=step, **kwargs
                )
            else:
                self._warn_unsupported(key, value, "numbers, text and mappings of numbers")
