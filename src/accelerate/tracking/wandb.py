# SPDX-License-Identifier: Apache-2.0
"""Weights & Biases."""

from __future__ import annotations

import importlib
from typing import Any

from .base import ClientTracker, checked, named, on_main_process
from .values import plain


class WandBTracker(ClientTracker):
    """Logs to the project `run_name`; `kwargs` go to `wandb.init`."""

    name = "wandb"
    main_process_only = False

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)

    @property
    def run(self) -> Any:
        return self.tracker

    def _open(self) -> Any:
        return importlib.import_module("wandb").init(**{"project": self.run_name, **self.init_kwargs})

    def _id_of(self, client: Any) -> str | None:
        return named(client, "id")

    @classmethod
    def going_on(cls, run_id: str) -> dict[str, Any]:
        return {"id": run_id, "resume": "allow"}

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.tracker.config.update(plain(checked(values, "store_init_configuration")), allow_val_change=True)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record whatever `wandb` takes; `kwargs` go to `run.log`."""
        self.tracker.log(plain(checked(values, "log")), step=step, **kwargs)

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record lists of images (arrays, PIL images, paths); `kwargs` go to `run.log`."""
        wandb = importlib.import_module("wandb")
        for key, images in checked(values, "log_images").items():
            self.tracker.log({key: [wandb.Image(image) for image in images]}, step=step, **kwargs)

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
        table = importlib.import_module("wandb").Table(columns=columns, data=data, dataframe=dataframe)
        self.tracker.log({table_name: table}, step=step, **kwargs)
