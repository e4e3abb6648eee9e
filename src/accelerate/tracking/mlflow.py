# SPDX-License-Identifier: Apache-2.0
"""MLflow: a tracking server or a local store."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Mapping
from typing import Any

from ..core import env
from ..core.errors import ConfigurationError
from .base import ClientTracker, on_main_process


class MLflowTracker(ClientTracker):
    """Logs to MLflow.

    The variables MLFLOW_EXPERIMENT_NAME, MLFLOW_RUN_ID, MLFLOW_TAGS (JSON) and MLFLOW_NESTED_RUN override the
    arguments.

    Args:
        experiment_name: the experiment, which is created if it does not exist.
        logging_dir: the folder for the artifacts of a new experiment.
        run_id: the run to resume.
        tags: tags of the run, as a dict or as JSON text.
        nested_run: whether to open the run inside the active one.
        run_name: the name of the run.
        description: the description of the run.
    """

    name = "mlflow"
    _run_key_attribute = "info.run_id"
    _resume_argument = "run_id"
    active_run = ClientTracker.tracker  # the `mlflow.ActiveRun`

    def __init__(
        self,
        experiment_name: str | None = None,
        logging_dir: str | os.PathLike[str] | None = None,
        run_id: str | None = None,
        tags: dict[str, Any] | str | None = None,
        nested_run: bool | None = False,
        run_name: str | None = None,
        description: str | None = None,
    ) -> None:
        super().__init__(run_name)
        self.experiment_name: str | None = env.get("MLFLOW_EXPERIMENT_NAME", experiment_name)
        self.logging_dir = logging_dir
        self.run_id: str | None = env.get("MLFLOW_RUN_ID", run_id)
        self.tags: dict[str, Any] | None = _tags(env.get("MLFLOW_TAGS"), "MLFLOW_TAGS") or _tags(
            tags, "tags"
        )
        self.nested_run: bool = env.get_flag("MLFLOW_NESTED_RUN", bool(nested_run))
        self.description = description

    def _open(self) -> Any:
        mlflow = self._package
        experiment_id = None
        if self.experiment_name is not None:
            experiment = mlflow.get_experiment_by_name(self.experiment_name)
            location = self.logging_dir
            if location is not None:
                location = os.fspath(location)
            if experiment is not None:
                experiment_id = experiment.experiment_id
            else:
                experiment_id = mlflow.create_experiment(
                    name=self.experiment_name, artifact_location=location, tags=self.tags
                )
        return mlflow.start_run(
            run_id=self.run_id,
            experiment_id=experiment_id,
            run_name=self.run_name,
            nested=self.nested_run,
            tags=self.tags,
            description=self.description,
        )

    def background_options(self) -> dict[str, Any]:
        """Name the run: the active run of MLflow is that of the thread that has started it."""
        return {"run_id": self._client.info.run_id}

    def _close(self, client: Any) -> None:
        self._package.end_run()

    def _store(self, values: dict[str, Any]) -> None:
        """Record hyperparameters; values too long for MLflow are left out with a warning."""
        limits = importlib.import_module("mlflow.utils.validation")
        accepted = []
        for key, value in values.items():
            if len(str(value)) > limits.MAX_PARAM_VAL_LENGTH:
                self._warn_unsupported(
                    key, value, f"parameters of at most {limits.MAX_PARAM_VAL_LENGTH} characters"
                )
            else:
                accepted.append((key, value))
        size = limits.MAX_PARAMS_TAGS_PER_BATCH
        for begin in range(0, len(accepted), size):
            self._package.log_params(dict(accepted[begin : begin + size]))

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record numbers.

        Args:
            values: {name: number}, possibly nested; nested names are joined by `/`.
            step: the training step.
            kwargs: passed to `mlflow.log_metrics`.
        """
        metrics = dict(self._numbers(values, "numbers as metrics"))
        self._package.log_metrics(metrics, step=step, **kwargs)

    @on_main_process
    def log_figure(self, figure: Any, artifact_file: str, **save_kwargs: Any) -> None:
        """Record a figure as an artifact.

        Args:
            figure: a matplotlib or plotly figure.
            artifact_file: the path of the artifact in the run.
            save_kwargs: passed to `mlflow.log_figure`.
        """
        self._package.log_figure(figure=figure, artifact_file=artifact_file, **save_kwargs)

    @on_main_process
    def log_artifacts(self, local_dir: str, artifact_path: str | None = None) -> None:
        """Record the files of a folder as artifacts.

        Args:
            local_dir: the folder.
            artifact_path: the folder of the artifacts in the run.
        """
        self._package.log_artifacts(local_dir=local_dir, artifact_path=artifact_path)

    @on_main_process
    def log_artifact(self, local_path: str, artifact_path: str | None = None) -> None:
        """Record one file as an artifact.

        Args:
            local_path: the file.
            artifact_path: the folder of the artifact in the run.
        """
        self._package.log_artifact(local_path=local_path, artifact_path=artifact_path)


def _tags(tags: dict[str, Any] | str | None, origin: str) -> dict[str, Any] | None:
    if tags is None or isinstance(tags, Mapping):
        return tags
    try:
        parsed = json.loads(tags)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"{origin} of the mlflow tracker is not a JSON object: {error}"
        ) from None
    if not isinstance(parsed, dict):
        raise ConfigurationError(
            f"{origin} of the mlflow tracker must be a JSON object, not {tags!r}"
        )
    return parsed
