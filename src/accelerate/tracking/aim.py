# SPDX-License-Identifier: Apache-2.0
"""Aim: a local repository of runs."""

from __future__ import annotations

import importlib
import os
from typing import Any

from .base import ClientTracker, checked, named, on_main_process
from .values import plain


class AimTracker(ClientTracker):
    """Logs the run `run_name` to the repository in `logging_dir`; `kwargs` go to `aim.Run`."""

    name = "aim"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str] | None = ".", **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)
        self.aim_repo_path = logging_dir

    @property
    def writer(self) -> Any:
        return self.tracker

    def _open(self) -> Any:
        run = importlib.import_module("aim").Run(repo=self.aim_repo_path, **self.init_kwargs)
        run.name = self.run_name
        return run

    def _id_of(self, client: Any) -> str | None:
        return named(client, "hash")

    @classmethod
    def going_on(cls, run_id: str) -> dict[str, Any]:
        return {"run_hash": run_id}

    def _close(self, client: Any) -> None:
        client.close()

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.tracker["hparams"] = plain(checked(values, "store_init_configuration"))

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record what `aim.Run.track` takes; `kwargs` go to it (`context`, `epoch`)."""
        for key, value in plain(checked(values, "log")).items():
            self.tracker.track(value, name=key, step=step, **kwargs)

    @on_main_process
    def log_images(
        self, values: dict[str, Any], step: int | None = None, kwargs: dict[str, dict[str, Any]] | None = None
    ) -> None:
        """Record images, each an image or a pair (image, caption).

        `kwargs` holds the arguments of `aim.Image` under `aim_image` and those of `Run.track` under `track`.
        """
        aim = importlib.import_module("aim")
        options = kwargs or {}
        for key, value in checked(values, "log_images").items():
            image, caption = value if isinstance(value, tuple) else (value, "")
            shown = aim.Image(image, **{"caption": caption, **options.get("aim_image", {})})
            self.tracker.track(shown, name=key, step=step, **options.get("track", {}))
