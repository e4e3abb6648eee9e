# SPDX-License-Identifier: Apache-2.0
"""What the packages share that have wandb's calls: `init`, `run.config.update`, `run.log`, `Image`."""

from __future__ import annotations

import importlib
from typing import Any

from .base import ClientTracker, checked, on_main_process
from .values import plain


class RunTracker(ClientTracker):
    """Logs to the project `run_name` of the package `name`, each process for itself; `kwargs` go to its `init`."""

    main_process_only = False

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)

    @property
    def run(self) -> Any:
        return self.tracker

    @property
    def _package(self) -> Any:
        return importlib.import_module(self.name)

    def _open(self) -> Any:
        return self._package.init(**{"project": self.run_name, **self.init_kwargs})

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.tracker.config.update(plain(checked(values, "store_init_configuration")))

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record whatever the package takes; `kwargs` go to `run.log`."""
        self.tracker.log(plain(checked(values, "log")), step=step, **kwargs)


class ImageRunTracker(RunTracker):
    """The same of a package that has a class `Image`."""

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record lists of images (arrays, PIL images, paths); `kwargs` go to `run.log`."""
        image_of = self._package.Image
        for key, images in checked(values, "log_images").items():
            self.tracker.log({key: [image_of(image) for image in images]}, step=step, **kwargs)
