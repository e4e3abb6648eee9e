# SPDX-License-Identifier: Apache-2.0
"""Aim: a local repository of runs."""

from __future__ import annotations

import importlib
import os
from typing import Any

from .base import ClientTracker, checked, on_main_process
from .values import plain


class AimTracker(ClientTracker):
    """Logs to Aim.

    Args:
        run_name: the name of the run.
        logging_dir: the folder of the Aim repository.
        kwargs: passed to `aim.Run`.
    """

    name = "aim"
    requires_logging_directory = True
    _run_key_attribute = "hash"
    _resume_argument = "run_hash"
    # A run writes to a database on this machine. That threads may share it is not documented.
    background = False
    writer = ClientTracker.tracker  # the `aim.Run`

    def __init__(
        self, run_name: str, logging_dir: str | os.PathLike[str] | None = ".", **kwargs: Any
    ) -> None:
        super().__init__(run_name, **kwargs)
        self.aim_repo_path = logging_dir

    def _open(self) -> Any:
        run = importlib.import_module("aim").Run(repo=self.aim_repo_path, **self.init_kwargs)
        run.name = self.run_name
        return run

    def _close(self, client: Any) -> None:
        client.close()

    def _store(self, values: dict[str, Any]) -> None:
        self.tracker["hparams"] = values

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record values.

        Args:
            values: {name: what `aim.Run.track` accepts}.
            step: the training step.
            kwargs: passed to `aim.Run.track` (`context`, `epoch`).
        """
        for key, value in plain(checked(values, "log")).items():
            self.tracker.track(value, name=key, step=step, **kwargs)

    @on_main_process
    def log_images(
        self,
        values: dict[str, Any],
        step: int | None = None,
        kwargs: dict[str, dict[str, Any]] | None = None,
    ) -> None:
        """Record images.

        Args:
            values: {name: an image or a pair (image, caption)}.
            step: the training step.
            kwargs: {"aim_image": arguments of `aim.Image`, "track": arguments of `aim.Run.track`}.
        """
        aim = importlib.import_module("aim")
        options = kwargs or {}
        for key, value in checked(values, "log_images").items():
            if isinstance(value, tuple):
                image, caption = value
            else:
                image = value
                caption = ""
            shown = aim.Image(image, **{"caption": caption, **options.get("aim_image", {})})
            self.tracker.track(shown, name=key, step=step, **options.get("track", {}))
