# SPDX-License-Identifier: Apache-2.0
"""TensorBoard: event files in a local folder."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Mapping
from typing import Any

import yaml

from ..core.files import atomic_write
from ..core.imports import is_available
from .base import ClientTracker, checked, hyperparameters, number, on_main_process, text


class TensorBoardTracker(ClientTracker):
    """Writes TensorBoard event files to `logging_dir/run_name`.

    Hyperparameters go to the HParams table of the run and to `hparams.yml`; nested names are joined by `/`.

    Args:
        run_name: the name of the run's folder.
        logging_dir: the folder of all runs.
        kwargs: passed to `torch.utils.tensorboard.SummaryWriter`.
    """

    name = "tensorboard"
    requires_logging_directory = True
    writer = ClientTracker.tracker  # the `SummaryWriter`

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str], **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)
        self.logging_dir: str = os.path.join(logging_dir, run_name)

    def _open(self) -> Any:
        if is_available("tensorboard"):
            home = "torch.utils.tensorboard"
        else:
            home = "tensorboardX"
        return importlib.import_module(home).SummaryWriter(self.logging_dir, **self.init_kwargs)

    def _close(self, client: Any) -> None:
        client.close()

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Record the hyperparameters of the run."""
        values_ = hyperparameters(checked(values, "store_init_configuration"))
        writer = self.tracker
        # Written to the run's event file: add_hparams would open a second run, without the curves of this one.
        summary = importlib.import_module(type(writer).__module__.rpartition(".")[0] + ".summary")
        for record in summary.hparams(values_, {}):
            writer.file_writer.add_summary(record)
        writer.flush()
        folder = os.path.join(self.logging_dir, str(time.time()))
        os.makedirs(folder, exist_ok=True)
        with atomic_write(os.path.join(folder, "hparams.yml"), "w") as file:
            yaml.safe_dump(values_, file)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record numbers as scalars, text as text, and mappings of numbers as charts with several lines.

        Args:
            values: {name: number, text, or mapping of numbers}.
            step: the training step.
            kwargs: passed to `add_scalar`, `add_text` and `add_scalars` of `SummaryWriter`.
        """
        writer = self.tracker
        for name, value in checked(values, "log").items():
            key = text(name)
            if isinstance(value, str):
                writer.add_text(key, text(value), global_step=step, **kwargs)
            elif isinstance(value, Mapping):
                self._log_lines(key, value, step, **kwargs)
            else:
                scalar = number(value)
                if scalar is not None:
                    writer.add_scalar(key, scalar, global_step=step, **kwargs)
                else:
                    self._warn_unsupported(key, value, "numbers, text and mappings of numbers")
        writer.flush()

    def _log_lines(
        self, key: str, values: Mapping[str, Any], step: int | None, **kwargs: Any
    ) -> None:
        lines = {}
        for name, value in values.items():
            scalar = number(value)
            if scalar is None:
                self._warn_unsupported(f"{key}/{name}", value, "numbers in a mapping")
            else:
                lines[name] = scalar
        if lines:
            self.tracker.add_scalars(key, lines, global_step=step, **kwargs)

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record batches of images.

        Args:
            values: {name: array or tensor of shape (N, C, H, W), uint8 in [0, 255] or float in [0, 1]}.
            step: the training step.
            kwargs: passed to `SummaryWriter.add_images` (`dataformats="NHWC"` for that order of dimensions).
        """
        writer = self.tracker
        for key, images in checked(values, "log_images").items():
            writer.add_images(key, images, global_step=step, **kwargs)
        writer.flush()
