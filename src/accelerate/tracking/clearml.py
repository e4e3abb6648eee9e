# SPDX-License-Identifier: Apache-2.0
"""ClearML."""

from __future__ import annotations

import importlib
from typing import Any

from ..core import env
from ..core.errors import ConfigurationError
from .base import ClientTracker, checked, named, on_main_process
from .values import flat, number, plain

# A name that begins so is drawn as this series of the chart named by the rest.
SERIES = ("train", "eval", "test")


class ClearMLTracker(ClientTracker):
    """Logs to the task `run_name`; `kwargs` go to `clearml.Task.init`.

    A task that is open already is used, and left open at the end. The variables CLEARML_PROJECT and CLEARML_TASK go
    before `run_name`.
    """

    name = "clearml"

    def __init__(self, run_name: str | None = None, **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)
        self._own = True

    @property
    def task(self) -> Any:
        return self.tracker

    def _open(self) -> Any:
        task_class = importlib.import_module("clearml").Task
        task = task_class.current_task()
        self._own = task is None
        if task is not None:
            return task
        names = {
            "project_name": env.get("CLEARML_PROJECT", self.run_name),
            "task_name": env.get("CLEARML_TASK", self.run_name),
        }
        return task_class.init(**{**names, **self.init_kwargs})

    def _close(self, client: Any) -> None:
        if self._own:
            client.close()

    def _id_of(self, client: Any) -> str | None:
        return named(client, "id")

    @classmethod
    def going_on(cls, run_id: str) -> dict[str, Any]:
        return {"continue_last_task": run_id}

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.tracker.connect_configuration(plain(checked(values, "store_init_configuration")))

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record numbers: single values where `step` is None, points of a curve else.

        `train_`, `eval_` and `test_` at the head of a name choose the series; nested names are joined by `/`.
        """
        board = self.tracker.get_logger()
        for key, value in flat(checked(values, "log")):
            scalar = number(value)
            if scalar is None:
                self._refuse(key, value, "numbers as scalars")
            elif step is None:
                board.report_single_value(name=key, value=scalar, **kwargs)
            else:
                title, series = _chart(key)
                board.report_scalar(title=title, series=series, value=scalar, iteration=step, **kwargs)

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record images (arrays, PIL images); `kwargs` go to `report_image`."""
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
        """Record a table: a pandas dataframe, or rows under `columns` (the first row names them where None)."""
        table = dataframe
        if table is None:
            if data is None:
                raise ConfigurationError("log_table of the clearml tracker needs `dataframe`, or rows in `data`")
            table = data if columns is None else [columns, *data]
        title, series = _chart(table_name)
        self.tracker.get_logger().report_table(title=title, series=series, table_plot=table, iteration=step, **kwargs)


def _chart(name: str) -> tuple[str, str]:
    """Title and series of a name: `eval_loss` is the line `eval` of the chart `loss`."""
    series, found, title = name.partition("_")
    return (title, series) if found and series in SERIES else (name, "train")
