# SPDX-License-Identifier: Apache-2.0
"""The base classes for packages with the interface of wandb: `init`, `run.config.update`, `run.log`, `Image`."""

from __future__ import annotations

import importlib
from typing import Any

from .base import ClientTracker, checked, on_main_process
from .values import plain


class RunTracker(ClientTracker):
    """Logs to a project of the package `name`, on every process.

    Args:
        run_name: the name of the project.
        kwargs: passed to the package's `init`.
    """

    main_process_only = False
    run = ClientTracker.tracker  # the run object of the package

    @property
    def _package(self) -> Any:
        return importlib.import_module(self.name)

    def _open(self) -> Any:
        return self._package.init(**{"project": self.run_name, **self.init_kwargs})

    @classmethod
    def resume_kwargs(cls, run_key: str) -> dict[str, Any]:
        """Return the constructor's arguments that continue a former run; empty where the service cannot do that."""
        found = super().resume_kwargs(run_key)
        if found:
            return {**found, "resume": "allow"}
        return {}

    def _store(self, values: dict[str, Any]) -> None:
        self.tracker.config.update(values)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record values.

        Args:
            values: {name: what the package accepts}.
            step: the training step.
            kwargs: passed to `run.log`.
        """
        self.tracker.log(plain(checked(values, "log")), step=step, **kwargs)


class ImageRunTracker(RunTracker):
    """A `RunTracker` for packages that have a class `Image`."""

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record images.

        Args:
            values: {name: list of arrays, PIL images or paths}.
            step: the training step.
            kwargs: passed to `run.log`.
        """
        image_of = self._package.Image
        for key, images in checked(values, "log_images").items():
            self.tracker.log({key: [image_of(image) for image in images]}, step=step, **kwargs)
