# SPDX-License-Identifier: Apache-2.0
"""Weights & Biases."""

from __future__ import annotations

from typing import Any

from .base import ImageRunTracker, on_main_process


class WandBTracker(ImageRunTracker):
    """Logs to Weights & Biases.

    Args:
        run_name: the name of the project.
        kwargs: passed to `wandb.init`.
    """

    name = "wandb"
    _run_key_attribute = "id"
    _resume_argument = "id"

    def _store(self, values: dict[str, Any]) -> None:
        # A resumed run stores its hyperparameters again.
        self.tracker.config.update(values, allow_val_change=True)

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
        """Record a table.

        Args:
            table_name: the name of the table.
            columns: the names of the columns.
            data: the rows.
            dataframe: a pandas dataframe, instead of `columns` and `data`.
            step: the training step.
            kwargs: passed to `wandb.Run.log`.
        """
        table = self._package.Table(columns=columns, data=data, dataframe=dataframe)
        self.tracker.log({table_name: table}, step=step, **kwargs)
