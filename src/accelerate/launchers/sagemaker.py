# SPDX-License-Identifier: Apache-2.0
"""Amazon SageMaker: the job that runs a script, from a configuration and the arguments of a launch."""

from __future__ import annotations

import argparse
import contextlib
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..config.launch_file import LaunchFile, Setting
from ..config.launch_settings import Settings, given, resolve_settings
from ..core import env, messages
from ..core.enums import SageMakerDistributedType
from ..core.errors import ConfigurationError, LaunchError
from ..core.objects import masked
from ..core.option import brief
from ..core.options import AWS, options
from .plan import variables
from .sagemaker_clients import Client, Estimator, Job, Trainer, client_version
from .spec import Program

TORCHRUN = {"torch_distributed": {"enabled": True}}
DATA_PARALLEL = {"smdistributed": {"dataparallel": {"enabled": True}}}
MODEL_PARALLEL = {"smdistributed": {"modelparallel": {"enabled": True}}, **TORCHRUN}
# Options that are published with Python's True and False, as the API does.
DYNAMO = (
    "dynamo_mode",
    "dynamo_use_fullgraph",
    "dynamo_use_dynamic",
    "dynamo_use_regional_compilation",
)
# Flags with a meaning for a job, besides the options that become variables of its processes.
ABOUT_THE_JOB = (
    "cpu", "gpu_ids", "num_machines", "enable_cpu_affinity", "config_file", "dry_run", "quiet", "module", "no_python",
)  # fmt: skip
# Fields of the configuration that mean what the option of the same name means.
SAME_AS_OPTION = ("mixed_precision", "debug", "gpu_ids", "num_machines", "enable_cpu_affinity")


def launch(config: Any, args: argparse.Namespace) -> None:
    """Start the job and follow it to its end, or show its calls with --dry_run. Ctrl-C stops the job.

    Raises:
        ConfigurationError: the job is invalid.
        LaunchError: the client or the job fails.
    """
    used = {*ABOUT_THE_JOB, *(option.name for option in AWS.options)}
    for name in given(args):
        if name not in used and not options()[name].is_published:
            raise ConfigurationError(
                f"--{name} has no effect on a SageMaker job: ec2_instance_type, num_machines and "
                "distributed_type in the configuration file determine where its processes run"
            )
    version = client_version()
    job = job_of(config, args, version or 3)
    elsewhere = {"entry_point", "source_dir", "git_config", "source_code"}
    if not elsewhere & set(config.additional_args or {}):
        Program(args.training_script).check()
    settings = _settings(config, args)
    client: Client
    if version is None or version >= 3:
        client = Trainer(job)
    else:
        client = Estimator(job)
    if version is not None:
        env.publish(job.variables)
        try:
            client.check()
        except ImportError as error:
            raise ConfigurationError(
                f"version {version} of the sagemaker package cannot be used ({error}): pip "
                "install -U sagemaker"
            ) from error
    if settings["dry_run"]:
        # The calls, as Python. Secrets are left out.
        for name, text in masked(job.variables).items():
            print(f"export {name}={text}")
        print(client.text())
        if version is None:
            messages.show(
                "SageMaker: a client is not installed. These are the calls of version 3; their "
                "names were not checked"
            )
        return
    if version is None:
        raise ConfigurationError(
            "the configuration is for Amazon SageMaker, but its client is not installed: pip "
            "install sagemaker"
        )
    try:
        client.run()
    except KeyboardInterrupt:
        # The job would continue to run and cost money.
        training_job = client.training_job()
        if training_job is not None:
            training_job.stop()
            messages.show(f"SageMaker: requested job {client.name()} to stop")
        raise SystemExit(130) from None
    except Exception as error:
        raise LaunchError(f"SageMaker: {type(error).__name__}: {error}") from error
    if settings["quiet"]:
        return
    if job.following.get("wait", True):
        messages.show(f"SageMaker: the trained model is at {client.result()}")
    else:
        messages.show(f"SageMaker: the job was started; its model will be at {client.result()}")


def estimator_arguments(
    config: Any, args: argparse.Namespace
) -> tuple[dict[str, Any], dict[str, str] | None]:
    """The estimator's keyword arguments and the job's data inputs; the AWS variables are set in this process.

    ConfigurationError for a script it cannot run, and for what is missing.
    """
    job = job_of(config, args, version=2)
    env.publish(job.variables)
    return job.arguments, job.inputs


def job_of(config: Any, args: argparse.Namespace, version: int) -> Job:
    """The job for a configuration and the arguments of a launch, checked; nothing is started or set.

    Args:
        config: the configuration of the file.
        args: of `accelerate launch`.
        version: of the client.
    """
    script = Path(args.training_script)
    if args.module or args.no_python:
        raise ConfigurationError(
            "SageMaker runs a Python script: --module and --no_python cannot be used"
        )
    if script.suffix != ".py":
        raise ConfigurationError(
            f"SageMaker runs a Python script; {args.training_script!r} is not one"
        )
    for key in ("ec2_instance_type", "iam_role_name"):
        if not getattr(config, key):
            raise ConfigurationError(
                f"a SageMaker job needs {key}: set it in the configuration file"
            )
    settings = _settings(config, args)
    kind = SageMakerDistributedType(
        getattr(config.distributed_type, "value", config.distributed_type)
    )
    metrics = _table(config.sagemaker_metrics_file, "sagemaker_metrics_file")
    channels = _table(config.sagemaker_inputs_file, "sagemaker_inputs_file")
    arguments = {
        "image_uri": config.image_uri,
        "entry_point": script.name,
        "source_dir": str(script.parent),
        "role": config.iam_role_name,
        "transformers_version": config.transformers_version,
        "pytorch_version": config.pytorch_version,
        "py_version": config.py_version,
        "base_job_name": config.base_job_name,
        "instance_count": settings["num_machines"],
        "instance_type": config.ec2_instance_type,
        "debugger_hook_config": False,
        "distribution": _distribution(kind, version),
        "hyperparameters": hyperparameters(args.training_script_args),
        "environment": _environment(settings, kind),
        "metric_definitions": None
        if metrics is None
        else [{"Name": name, "Regex": regex} for name, regex in metrics],
    }
    more = config.additional_args or {}
    if not isinstance(more, Mapping):
        raise ConfigurationError(f"additional_args must hold `key: value` lines, not {brief(more)}")
    if version < 3:
        _check_distribution(arguments, kind, more)
    else:
        _check_names(args.training_script_args)
    inputs = None if channels is None else dict(channels)
    for key, value in more.items():
        former = arguments.get(key)
        # Two distributions in one would be refused by the client.
        both = isinstance(former, dict) and isinstance(value, Mapping) and key != "distribution"
        if both and former is not None:
            arguments[key] = {**former, **value}
        else:
            arguments[key] = value
    following: dict[str, Any] = {
        key: arguments.pop(key) for key in ("wait", "logs") if key in arguments
    }
    return Job(arguments, inputs, following, _client_variables(config, args))


def _settings(config: Any, args: argparse.Namespace) -> Settings:
    """The settings of the processes: flag, then variable, then the configuration."""
    origin = "the SageMaker configuration"
    given_values = {name: getattr(config, name, None) for name in SAME_AS_OPTION} | {
        "cpu": config.use_cpu
    }
    for key, value in (getattr(config, "dynamo_config", None) or {}).items():
        given_values[key if key.startswith("dynamo_") else f"dynamo_{key}"] = value
    rows = options()
    unknown = sorted(set(given_values) - set(rows))
    if unknown:
        raise ConfigurationError(f"dynamo_config does not have {', '.join(unknown)}")
    values = {
        name: Setting(rows[name].convert(value, where=name), origin)
        for name, value in given_values.items()
        if value is not None
    }
    return resolve_settings(given(args), LaunchFile(Path(origin), {}, values))


def _distribution(kind: SageMakerDistributedType, version: int) -> dict[str, Any] | None:
    """The estimator's distribution for a kind of parallelism; None where the configuration has to say more."""
    if kind is SageMakerDistributedType.DATA_PARALLEL:
        return DATA_PARALLEL
    if version < 3:
        return None
    if kind is SageMakerDistributedType.MODEL_PARALLEL:
        return MODEL_PARALLEL
    return TORCHRUN


def _check_names(words: list[str]) -> None:
    """ConfigurationError for names of one letter, which the containers of version 3 write with two hyphens."""
    for word in words:
        if re.fullmatch(r"-[A-Za-z_](=.*)?", word):
            raise ConfigurationError(
                f"version 3 of sagemaker passes {word} as -{word}: use the option's long name"
            )


def _check_distribution(
    arguments: dict[str, Any], kind: SageMakerDistributedType, more: Mapping[str, Any]
) -> None:
    """ConfigurationError where SageMaker would start processes that do not know of one another."""
    if arguments["distribution"] is not None or "distribution" in more:
        return
    count = more.get("instance_count", arguments["instance_count"])
    way_out = (
        "set the estimator's distribution in additional_args (torch_distributed, "
        "smdistributed, mpi)"
    )
    if kind is SageMakerDistributedType.MODEL_PARALLEL:
        raise ConfigurationError(
            f"distributed_type MODEL_PARALLEL does not say which kind: {way_out}"
        )
    if count > 1:
        raise ConfigurationError(
            f"num_machines={count} with distributed_type {kind.value}: each machine would train alone on all data. "
            f"Choose DATA_PARALLEL, or {way_out}"
        )


def _environment(settings: Settings, kind: SageMakerDistributedType) -> dict[str, str]:
    """The variables of the job's processes."""
    published = {name: text for name, text in variables(settings).items() if text is not None}
    published.update({options()[name].variable: str(settings[name]) for name in DYNAMO})
    published["ACCELERATE_USE_SAGEMAKER"] = "true"
    published["ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE"] = kind.value
    ids = settings["gpu_ids"]
    if ids and ids.strip().lower() != "all":
        published["CUDA_VISIBLE_DEVICES"] = ids
    return published


def _client_variables(config: Any, args: argparse.Namespace) -> dict[str, str]:
    """Which account and region the client uses: keys given as flags, then the profile, then what it finds itself."""
    region = {"AWS_DEFAULT_REGION": config.region}
    key, secret = args.aws_access_key_id, args.aws_secret_access_key
    if (key is None) != (secret is None):
        if key is None:
            absent = "--aws_access_key_id"
        else:
            absent = "--aws_secret_access_key"
        raise ConfigurationError(f"an access key needs both options: {absent} is missing")
    if key is not None:
        return {"AWS_ACCESS_KEY_ID": key, "AWS_SECRET_ACCESS_KEY": secret, **region}
    if config.profile:
        return {"AWS_PROFILE": config.profile, **region}
    return region


def hyperparameters(words: list[str]) -> dict[str, Any]:
    """A script's own arguments as SageMaker passes them: `--name value`, `--name=value` or `-n value`, each name once.

    ConfigurationError for what it would not hand to the script as it stands: a flag without a value, a lone word.
    """
    parameters: dict[str, Any] = {}
    remaining = list(words)
    while remaining:
        word = remaining.pop(0)
        name, equals, value = word.partition("=")
        if not _is_name(name):
            raise ConfigurationError(
                f"SageMaker passes --name value pairs, but {word!r} does not follow a name"
            )
        if not equals:
            if not remaining or _is_name(remaining[0].partition("=")[0]):
                raise ConfigurationError(
                    f"SageMaker passes --name value pairs: give {name} a value, as in `{name} True`"
                )
            value = remaining.pop(0)
        key = name.lstrip("-")
        if key in parameters:
            raise ConfigurationError(f"SageMaker passes each name once, but {name} appears twice")
        parameters[key] = _typed(value)
    return parameters


def _is_name(word: str) -> bool:
    """Whether a word names an argument; a negative number does not."""
    return re.fullmatch(r"--?[A-Za-z_][\w.-]*", word) is not None


def _typed(text: str) -> Any:
    """The value in its type where the script gets the same text back (1e-4, 007, true and inf stay text)."""
    if text in ("True", "False"):
        return text == "True"
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            value = kind(text)
            if str(value) == text and math.isfinite(value):
                return value
    return text


def _table(path: str | None, key: str) -> list[tuple[str, str]] | None:
    """The rows of a tab-separated file of two columns below its heading line; None without a file."""
    if not path:
        return None
    try:
        lines = Path(path).expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigurationError(f"{key}: {path} cannot be read: {reason}") from None
    rows = []
    for number, line in enumerate(lines[1:], 2):
        if line.strip():
            name, tab, text = line.partition("\t")
            if not tab or not name.strip() or not text.strip():
                raise ConfigurationError(
                    f"{key}: {path}:{number}: use two columns separated by a tab"
                )
            rows.append((name.strip(), text.strip()))
    return rows
