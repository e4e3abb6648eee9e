# SPDX-License-Identifier: Apache-2.0
"""ClearML."""

from __future__ import annotations

from typing import Any

from ..core import env
from ..core.errors import ConfigurationError
from .base import ClientTracker, checked, on_main_process

# Prefixes of names that select the series of a chart: `eval_loss` is the series `eval` of the chart `loss`.
SERIES = ("train", "eval", "test")


class ClearMLTracker(ClientTracker):
    """Logs to ClearML. A task that is already open is used, and stays open at the end.

    Args:
        run_name: the name of the project and of the task. The variables CLEARML_PROJECT and CLEARML_TASK override it.
        kwargs: passed to `clearml.Task.init`.
    """

    name = "clearml"
    _run_key_attribute = "id"
    _resume_argument = "continue_last_task"
    task = ClientTracker.tracker  # the `clearml.Task`

    def __init__(self, run_name: str | None = None, **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)
        self._owns_task = True

    def _open(self) -> Any:
        task_class = self._package.Task
        task = task_class.current_task()
        self._owns_task = task is None
        if task is not None:
            return task
        names = {
            "project_name": env.get("CLEARML_PROJECT", self.run_name),
            "task_name": env.get("CLEARML_TASK", self.run_name),
        }
        return task_class.init(**{**names, **self.init_kwargs})

    def _close(self, client: Any) -> None:
        if self._owns_task:
            client.close()

    @on_main_process
    def finish_at_exit(self) -> None:
        """Write what is pending. ClearML closes the task itself, but too early for the values of the last seconds."""
        if self._is_open:
            self.tracker.flush(wait_for_uploads=True)

    def _store(self, values: dict[str, Any]) -> None:
        self.tracker.connect_configuration(values)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record numbers.

        Args:
            values: {name: number}, possibly nested; nested names are joined by `/`. The prefixes `train_`, `eval_`
                and `test_` of a name select the series of a chart.
            step: the training step; without it the numbers are single values, not points of a curve.
            kwargs: passed to ClearML's `report_scalar` or `report_single_value`.
        """
        board = self.tracker.get_logger()
        for key, scalar in self._numbers(values, "numbers as scalars"):
            if step is None:
                board.report_single_value(name=key, value=scalar, **kwargs)
            else:
                title, series = _chart(key)
                board.report_scalar(
                    title=title, series=series, value=scalar, iteration=step, **kwargs
                )

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record images.

        Args:
            values: {name: array or PIL image}.
            step: the training step.
            kwargs: passed to ClearML's `report_image`.
        """
        board = self.tracker.get_logger()
        for key, image in checked(values, "log_images").items():
            title, series = _chart(key)
            board.report_image(title=title, series=series, iteration=step, image=image, **kwargs)

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
            columns: the names of the columns; None where the first row of `data` holds them.
            data: the rows.
            dataframe: a pandas dataframe, instead of `columns` and `data`.
            step: the training step.
            kwargs: passed to ClearML's `report_table`.

        Raises:
            ConfigurationError: neither `data` nor `dataframe` is given.
        """
        table = dataframe
        if table is None:
            if data is None:
                raise ConfigurationError(
                    "the clearml tracker's log_table needs `dataframe` or rows in `data`"
                )
            table = data if columns is None else [columns, *data]
        title, series = _chart(table_name)
        self.tracker.get_logger().report_table(
            title=title, series=series, table_plot=table, iteration=step, **kwargs
        )


def _chart(name: str) -> tuple[str, str]:
    """Title and series of a name: `eval_loss` is the line `eval` of the chart `loss`."""
    series, separator, title = name.partition("_")
    if separator and series in SERIES:
        return (title, series)
    return (name, "train")
