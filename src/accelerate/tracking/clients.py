# SPDX-License-Identifier: Apache-2.0
"""Weights & Biases, SwanLab, Trackio, Aim, Comet and DVCLive: each passes the values to its client package."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from .base import ClientTracker, checked, number, on_main_process, plain

# -- packages with the interface of wandb: `init`, `run.config.update`, `run.log`, `Image`


class RunTracker(ClientTracker):
    """Logs to a project of the package `name`, on every process.

    Args:
        run_name: the name of the project.
        kwargs: passed to the package's `init`.
    """

    main_process_only = False
    run = ClientTracker.tracker  # the run object of the package

    def _open(self) -> Any:
        return self._package.init(**{"project": self.run_name, **self.init_kwargs})

    @classmethod
    def resume_kwargs(cls, run_key: str) -> dict[str, Any]:
        """Return the constructor's arguments that continue a former run; empty where the service cannot do that."""
        arguments = super().resume_kwargs(run_key)
        if arguments:
            return {**arguments, "resume": "allow"}
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


class SwanLabTracker(ImageRunTracker):
    """Logs to SwanLab.

    Args:
        run_name: the name of the project.
        kwargs: passed to `swanlab.init`.
    """

    name = "swanlab"
    # It sends values from a thread of its own, and its hooks for errors and Ctrl-C close the run before ours could log
    # the values that wait in another one.
    background = False


class TrackioTracker(RunTracker):
    """Logs to Trackio.

    Args:
        run_name: the name of the project.
        kwargs: passed to `trackio.init`.
    """

    name = "trackio"
    _run_key_attribute = "name"
    _resume_argument = "name"


# -- other packages


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
        run = self._package.Run(repo=self.aim_repo_path, **self.init_kwargs)
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
        aim = self._package
        options = kwargs or {}
        for key, value in checked(values, "log_images").items():
            if isinstance(value, tuple):
                image, caption = value
            else:
                image = value
                caption = ""
            shown = aim.Image(image, **{"caption": caption, **options.get("aim_image", {})})
            self.tracker.track(shown, name=key, step=step, **options.get("track", {}))


class CometMLTracker(ClientTracker):
    """Logs to Comet, which reads the API key from its own settings.

    Args:
        run_name: the name of the project.
        kwargs: passed to `comet_ml.start`.
    """

    name = "comet_ml"
    _run_key_attribute = "id"
    _resume_argument = "experiment_key"
    writer = ClientTracker.tracker  # the Comet experiment

    def _open(self) -> Any:
        return self._package.start(**{"project_name": self.run_name, **self.init_kwargs})

    def _close(self, client: Any) -> None:
        client.end()

    def _store(self, values: dict[str, Any]) -> None:
        self.tracker.log_parameters(values)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record numbers and mappings of numbers as metrics, text as `other`.

        Args:
            values: {name: number, mapping of numbers, or text}.
            step: the training step.
            kwargs: passed to `log_metric`, `log_metrics` and `log_other`.
        """
        experiment = self.tracker
        if step is not None:
            experiment.set_step(step)
        for key, value in checked(values, "log").items():
            if isinstance(value, str):
                experiment.log_other(key, value, **kwargs)
            elif isinstance(value, Mapping):
                experiment.log_metrics(plain(value), step=step, **kwargs)
            else:
                scalar = number(value)
                if scalar is None:
                    self._warn_unsupported(key, value, "numbers, text and mappings of numbers")
                    continue
                if isinstance(scalar, bool):
                    # Comet stores a boolean metric as text.
                    scalar = int(scalar)
                experiment.log_metric(key, scalar, step=step, **kwargs)


class DVCLiveTracker(ClientTracker):
    """Logs to DVCLive.

    Args:
        run_name: not used; DVCLive names its runs itself.
        live: an open `dvclive.Live`; a new one is created by default.
        kwargs: passed to the new `dvclive.Live`.
    """

    name = "dvclive"
    # `log` is three calls that share the state of one object without a lock, and scripts call the same object.
    background = False
    live = ClientTracker.tracker  # the `dvclive.Live`

    def __init__(self, run_name: str | None = None, live: Any = None, **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)
        self._live = live

    def _open(self) -> Any:
        if self._live is not None:
            return self._live
        return self._package.Live(**self.init_kwargs)

    def _close(self, client: Any) -> None:
        client.end()

    def _store(self, values: dict[str, Any]) -> None:
        self.tracker.log_params(values)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record numbers, then advance DVCLive's step.

        Args:
            values: {name: number}, possibly nested; nested names are joined by `/`.
            step: the training step.
            kwargs: passed to `dvclive.Live.log_metric`.
        """
        live = self.tracker
        if step is not None:
            live.step = step
        for key, scalar in self._numbers(values, "numbers as metrics"):
            live.log_metric(key, scalar, **kwargs)
        live.next_step()
