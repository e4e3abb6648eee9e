# SPDX-License-Identifier: Apache-2.0
"""Weights & Biases."""

from __future__ import annotations

from typing import Any

from .base import checked, named, on_main_process
from .runs import ImageRunTracker
from .values import plain


class WandBTracker(ImageRunTracker):
    """Logs to the project `run_name`; `kwargs` go to `wandb.init`."""

    name = "wandb"

    def _id_of(self, client: Any) -> str | None:
        return named(client, "id")

    @classmethod
    def going_on(cls, run_id: str) -> dict[str, Any]:
        return {"id": run_id, "resume": "allow"}

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        # A run that goes on stores its hyperparameters again.
        self.tracker.config.update(plain(checked(values, "store_init_configuration")), allow_val_change=True)

    @on_main_process
    def log_table(
        self,
        table_name: str,
        columns: list[str] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Record a table given as columns and rows, or as a pandas dataframe."""
        table = self._package.Table(columns=columns, data=data, dataframe=dataframe)
        self.tracker.log({table_name: table}, step=step, **kwargs)
