# SPDX-License-Identifier: Apache-2.0
"""Amazon SageMaker: from a configuration and the arguments of a launch to the estimator that runs the script."""

from __future__ import annotations

import argparse
import csv
import os
from pathlib import Path
from typing import Any

from ..config.launch_settings import given, resolve
from ..core import env
from ..core.enums import SageMakerDistributedType
from ..core.errors import ConfigurationError
from .variables import DYNAMO

DATA_PARALLEL = {"smdistributed": {"dataparallel": {"enabled": True}}}


def estimator_arguments(config: Any, args: argparse.Namespace) -> tuple[dict[str, Any], dict[str, str] | None]:
    """The estimator's keyword arguments and the job's data inputs. ConfigurationError for a script it cannot run."""
    script = Path(args.training_script)
    if args.module or args.no_python:
        raise ConfigurationError("SageMaker runs a Python script: --module and --no_python cannot be used with it")
    if script.suffix != ".py":
        raise ConfigurationError(f"SageMaker runs a Python script; {args.training_script!r} is none")
    _publish_credentials(config, args)
    settings = resolve(given(args))
    kind = SageMakerDistributedType(getattr(config.distributed_type, "value", config.distributed_type))
    environment = {
        "ACCELERATE_USE_SAGEMAKER": "true",
        "ACCELERATE_MIXED_PRECISION": str(settings["mixed_precision"] or config.mixed_precision or "no"),
        "ACCELERATE_DYNAMO_BACKEND": str(settings["dynamo_backend"] or "no").upper(),
        **{f"ACCELERATE_{name.upper()}": str(settings[name]) for name in DYNAMO},
        "ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE": kind.value,
    }
    arguments = {
        "image_uri": config.image_uri,
        "entry_point": script.name,
        "source_dir": os.path.dirname(args.training_script),
        "role": config.iam_role_name,
        "transformers_version": config.transformers_version,
        "pytorch_version": config.pytorch_version,
        "py_version": config.py_version,
        "base_job_name": config.base_job_name,
        "instance_count": config.num_machines,
        "instance_type": config.ec2_instance_type,
        "debugger_hook_config": False,
        "distribution": DATA_PARALLEL if kind is SageMakerDistributedType.DATA_PARALLEL else None,
        "hyperparameters": hyperparameters(args.training_script_args),
        "environment": environment,
        "metric_definitions": _metrics(config.sagemaker_metrics_file),
    }
    arguments.update(config.additional_args or {})
    return arguments, _inputs(config.sagemaker_inputs_file)


def _publish_credentials(config: Any, args: argparse.Namespace) -> None:
    if config.profile is not None:
        env.publish({"AWS_PROFILE": config.profile})
    elif args.aws_access_key_id is not None and args.aws_secret_access_key is not None:
        env.publish({"AWS_ACCESS_KEY_ID": args.aws_access_key_id, "AWS_SECRET_ACCESS_KEY": args.aws_secret_access_key})
    else:
        raise ConfigurationError(
            "SageMaker needs credentials: a profile in the configuration, or --aws_access_key_id and "
            "--aws_secret_access_key"
        )
    env.publish({"AWS_DEFAULT_REGION": config.region})


def hyperparameters(words: list[str]) -> dict[str, Any]:
    """A script's own arguments as SageMaker passes them: --name value pairs. A flag without a value cannot be."""
    found: dict[str, Any] = {}
    for at, word in enumerate(words):
        if not word.startswith("--"):
            if at == 0 or not words[at - 1].startswith("--"):
                raise ConfigurationError(f"SageMaker passes --name value pairs; {word!r} belongs to no name")
            continue
        value = words[at + 1] if at + 1 < len(words) else None
        if value is None or value.startswith("--"):
            raise ConfigurationError(f"SageMaker passes --name value pairs: give {word} a value, as `{word} True`")
        found[word[2:]] = _typed(value)
    return found


def _typed(text: str) -> Any:
    if text in ("True", "true", "False", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _rows(path: str) -> list[list[str]]:
    try:
        with open(os.path.expanduser(path), newline="") as file:
            return [row for row in csv.reader(file, delimiter="\t") if row][1:]
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror}") from None


def _inputs(path: str | None) -> dict[str, str] | None:
    """Data channels from a tab-separated file of names and places, with a heading line."""
    return None if path is None else {row[0].strip(): row[1].strip() for row in _rows(path)}


def _metrics(path: str | None) -> list[dict[str, str]] | None:
    """Metrics from a tab-separated file of names and regular expressions, with a heading line."""
    return None if path is None else [{"Name": row[0].strip(), "Regex": row[1].strip()} for row in _rows(path)]


def launch(config: Any, args: argparse.Namespace) -> None:
    """Start the job and follow it."""
    try:
        from sagemaker.huggingface import HuggingFace
    except ImportError:
        raise ConfigurationError("the configuration is for SageMaker: pip install sagemaker") from None
    arguments, inputs = estimator_arguments(config, args)
    estimator = HuggingFace(**arguments)
    estimator.fit(inputs=inputs)
    print(f"You can find your model data at: {estimator.model_data}")
