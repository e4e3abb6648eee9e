# SPDX-License-Identifier: Apache-2.0
"""Amazon SageMaker: the estimator that runs a script, from a configuration and the arguments of a launch."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config.launch_file import LaunchFile, Setting
from ..config.launch_settings import Settings, given, resolve_settings
from ..core import env
from ..core.enums import SageMakerDistributedType
from ..core.errors import ConfigurationError, LaunchError
from ..core.option import brief
from ..core.options import AWS, options
from .spec import Program
from .variables import variables

DATA_PARALLEL = {"smdistributed": {"dataparallel": {"enabled": True}}}
# Options that are published with Python's True and False, as the API does.
DYNAMO = ("dynamo_mode", "dynamo_use_fullgraph", "dynamo_use_dynamic", "dynamo_use_regional_compilation")
# Flags with a meaning for a job, besides the options that become variables of its processes.
ABOUT_THE_JOB = (
    "cpu", "gpu_ids", "num_machines", "enable_cpu_affinity", "config_file", "dry_run", "quiet", "module", "no_python",
)  # fmt: skip
# Field of the configuration -> option of a launch with the same meaning.
SAME_AS_OPTION = {
    "mixed_precision": "mixed_precision",
    "debug": "debug",
    "use_cpu": "cpu",
    "gpu_ids": "gpu_ids",
    "num_machines": "num_machines",
    "enable_cpu_affinity": "enable_cpu_affinity",
}


@dataclass(frozen=True)
class Job:
    """The estimator's arguments, the data channels that `fit` gets, and the AWS variables that the client reads."""

    arguments: dict[str, Any]
    inputs: dict[str, str] | None
    client: dict[str, str]

    def shown(self) -> str:
        """The calls, as Python. Secrets are left out."""
        lines = [f"export {name}={'***' if 'KEY' in name else text}" for name, text in self.client.items()]
        lines += ["HuggingFace(", *(f"    {name}={value!r}," for name, value in self.arguments.items())]
        return "\n".join([*lines, f").fit(inputs={self.inputs!r})"])


def launch(config: Any, args: argparse.Namespace) -> None:
    """Start the job and follow it to its end, or show its calls with --dry_run. Ctrl-C stops the job.

    Raises:
        ConfigurationError: the job is invalid.
        LaunchError: the client or the job fails.
    """
    _check_flags(args)
    job = job_of(config, args)
    if not {"entry_point", "source_dir", "git_config"} & set(config.additional_args or {}):
        Program(args.training_script).check()
    settings = _settings(config, args)
    if settings["dry_run"]:
        print(job.shown())
        return
    env.publish(job.client)
    estimator = _started(job)
    if not settings["quiet"]:
        print(f"You can find your model data at: {estimator.model_data}")


def _started(job: Job) -> Any:
    estimator_of = _client()
    estimator = None
    try:
        estimator = estimator_of(**job.arguments)
        estimator.fit(inputs=job.inputs)
    except KeyboardInterrupt:
        _stop(estimator)
        raise SystemExit(130) from None
    except Exception as error:
        raise LaunchError(f"SageMaker: {type(error).__name__}: {error}") from error
    return estimator


def _client() -> Any:
    """The estimator of SageMaker's Python client."""
    try:
        from sagemaker.huggingface import HuggingFace
    except ModuleNotFoundError as error:
        # Version 3 of the client has no estimators any more.
        why = "is not installed" if error.name == "sagemaker" else f"has no estimators ({error})"
        raise ConfigurationError(
            f"the configuration is for Amazon SageMaker, and the package sagemaker {why}: pip install 'sagemaker<3'"
        ) from None
    return HuggingFace


def _stop(estimator: Any) -> None:
    """Stop a job whose launch was interrupted, because it would continue to run and cost money."""
    job = getattr(estimator, "latest_training_job", None)
    if job is None:
        return
    try:
        job.stop()
    except Exception as error:
        command = f"aws sagemaker stop-training-job --training-job-name {job.name}"
        raise LaunchError(
            f"the job {job.name} could not be stopped and continues to run ({error}); stop it: {command}"
        ) from error
    print(f"SageMaker: the stop of job {job.name} was requested")


def estimator_arguments(config: Any, args: argparse.Namespace) -> tuple[dict[str, Any], dict[str, str] | None]:
    """The estimator's keyword arguments and the job's data inputs; the AWS variables are set in this process.

    ConfigurationError for a script it cannot run, and for what is missing.
    """
    job = job_of(config, args)
    env.publish(job.client)
    return job.arguments, job.inputs


def job_of(config: Any, args: argparse.Namespace) -> Job:
    """The job for a configuration and the arguments of a launch, checked; nothing is started or set."""
    script = Path(args.training_script)
    if args.module or args.no_python:
        raise ConfigurationError("SageMaker runs a Python script: --module and --no_python cannot be used with it")
    if script.suffix != ".py":
        raise ConfigurationError(f"SageMaker runs a Python script; {args.training_script!r} is none")
    for key in ("ec2_instance_type", "iam_role_name"):
        if not getattr(config, key):
            raise ConfigurationError(f"a job on SageMaker needs {key}: write it into the configuration file")
    settings = _settings(config, args)
    kind = SageMakerDistributedType(getattr(config.distributed_type, "value", config.distributed_type))
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
        "distribution": DATA_PARALLEL if kind is SageMakerDistributedType.DATA_PARALLEL else None,
        "hyperparameters": hyperparameters(args.training_script_args),
        "environment": _environment(settings, kind),
        "metric_definitions": _metrics(config.sagemaker_metrics_file),
    }
    more = config.additional_args or {}
    if not isinstance(more, Mapping):
        raise ConfigurationError(f"additional_args must hold `key: value` lines, not {brief(more)}")
    _check_distribution(arguments, kind, more)
    return Job(_merged(arguments, more), _inputs(config.sagemaker_inputs_file), _client_variables(config, args))


def _settings(config: Any, args: argparse.Namespace) -> Settings:
    """The settings of the processes: flag, then variable, then the configuration."""
    origin = "the SageMaker configuration"
    given_values = {option: getattr(config, field, None) for field, option in SAME_AS_OPTION.items()}
    for key, value in (getattr(config, "dynamo_config", None) or {}).items():
        given_values[key if key.startswith("dynamo_") else f"dynamo_{key}"] = value
    known = options()
    unknown = sorted(set(given_values) - set(known))
    if unknown:
        raise ConfigurationError(f"dynamo_config has no {', '.join(unknown)}")
    values = {
        name: Setting(known[name].convert(value, where=name), origin)
        for name, value in given_values.items()
        if value is not None
    }
    return resolve_settings(given(args), LaunchFile(Path(origin), {}, values))


def _check_flags(args: argparse.Namespace) -> None:
    """ConfigurationError for flags that would have no effect on a job."""
    used = {*ABOUT_THE_JOB, *(option.name for option in AWS.options)}
    for name in given(args):
        if name not in used and not options()[name].is_published:
            raise ConfigurationError(
                f"--{name} has no effect on a job of SageMaker: ec2_instance_type, num_machines and distributed_type "
                "of the configuration file set where its processes run"
            )


def _check_distribution(arguments: dict[str, Any], kind: SageMakerDistributedType, more: Mapping[str, Any]) -> None:
    """ConfigurationError where SageMaker would start processes that do not know of one another."""
    if arguments["distribution"] is not None or "distribution" in more:
        return
    count = more.get("instance_count", arguments["instance_count"])
    way_out = "write the estimator's distribution into additional_args (torch_distributed, smdistributed, mpi)"
    if kind is SageMakerDistributedType.MODEL_PARALLEL:
        raise ConfigurationError(f"distributed_type MODEL_PARALLEL needs to know which: {way_out}")
    if count > 1:
        raise ConfigurationError(
            f"num_machines={count} with distributed_type {kind.value}: each machine would train alone on all data. "
            f"Choose DATA_PARALLEL, or {way_out}"
        )


def _environment(settings: Settings, kind: SageMakerDistributedType) -> dict[str, str]:
    """The variables of the job's processes."""
    found = {name: text for name, text in variables(settings).items() if text is not None}
    found.update({options()[name].variable: str(settings[name]) for name in DYNAMO})
    found["ACCELERATE_USE_SAGEMAKER"] = "true"
    found["ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE"] = kind.value
    ids = settings["gpu_ids"]
    if ids and ids.strip().lower() != "all":
        found["CUDA_VISIBLE_DEVICES"] = ids
    return found


def _client_variables(config: Any, args: argparse.Namespace) -> dict[str, str]:
    """Which account and region the client uses: keys given as flags, then the profile, then this environment's."""
    region = {"AWS_DEFAULT_REGION": config.region}
    key, secret = args.aws_access_key_id, args.aws_secret_access_key
    if (key is None) != (secret is None):
        absent = "--aws_access_key_id" if key is None else "--aws_secret_access_key"
        raise ConfigurationError(f"an access key needs both flags: {absent} is missing")
    if key is not None:
        return {"AWS_ACCESS_KEY_ID": key, "AWS_SECRET_ACCESS_KEY": secret, **region}
    if config.profile:
        return {"AWS_PROFILE": config.profile, **region}
    if env.get("AWS_PROFILE") or (env.get("AWS_ACCESS_KEY_ID") and env.get("AWS_SECRET_ACCESS_KEY")):
        return region
    raise ConfigurationError(
        "SageMaker needs credentials: profile in the configuration file, --aws_access_key_id and "
        "--aws_secret_access_key, or the variables AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
    )


def _merged(ours: dict[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Both, one level after the other; what both name is theirs."""
    merged = dict(ours)
    for key, value in theirs.items():
        former = merged.get(key)
        # Two distributions in one would be refused by the client.
        if isinstance(former, dict) and isinstance(value, Mapping) and key != "distribution":
            value = _merged(former, value)
        merged[key] = value
    return merged


def hyperparameters(words: list[str]) -> dict[str, Any]:
    """A script's own arguments as SageMaker passes them: `--name value`, `--name=value` or `-n value`, each name once.

    ConfigurationError for what it would not hand to the script as it stands: a flag without a value, a lone word.
    """
    found: dict[str, Any] = {}
    at = 0
    while at < len(words):
        name, equals, value = words[at].partition("=")
        if not _is_name(name):
            raise ConfigurationError(f"SageMaker passes --name value pairs; {words[at]!r} belongs to no name")
        at += 1
        if not equals:
            if at == len(words) or _is_name(words[at].partition("=")[0]):
                raise ConfigurationError(f"SageMaker passes --name value pairs: give {name} a value, as `{name} True`")
            value = words[at]
            at += 1
        bare = name.lstrip("-")
        # Its toolkit writes one dash before a name of one letter and two before any other.
        if name != ("-" if len(bare) == 1 else "--") + bare:
            written = ("-" if len(bare) == 1 else "--") + bare
            raise ConfigurationError(f"SageMaker hands {name} to the script as {written}: let the script take that")
        if bare in found:
            raise ConfigurationError(f"SageMaker passes each name once: {name} is there a second time")
        found[bare] = _typed(value)
    return found


def _is_name(word: str) -> bool:
    """Whether a word names an argument; a negative number does not."""
    return re.fullmatch(r"--?[A-Za-z_][\w.-]*", word) is not None


def _typed(text: str) -> Any:
    """The value in its type where the script gets the same text back (1e-4, 007 and true stay text)."""
    if text in ("True", "False"):
        return text == "True"
    numbers = (_number(int, text), _number(float, text))
    return next((value for value in numbers if value is not None and str(value) == text), text)


def _number(kind: Any, text: str) -> Any:
    try:
        value = kind(text)
    except ValueError:
        return None
    # JSON, in which the values travel, has neither infinity nor nan.
    return value if abs(value) < float("inf") else None


def _table(path: str | None, key: str, like: tuple[str, str], content: str) -> list[tuple[str, str]] | None:
    """The rows of a tab-separated file of two columns below its heading line; None without a file.

    Args:
        path: the file.
        key: its key in the configuration.
        like: what the columns hold.
        content: what the second column looks like, by which a file without a heading is found.
    """
    if not path:
        return None
    try:
        lines = Path(path).expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigurationError(f"{key}: {path} cannot be read: {reason}") from None
    rows: list[tuple[str, str]] = []
    for number, line in enumerate(lines, 1):
        row = [part.strip() for part in line.split("\t")]
        if not line.strip():
            continue
        if len(row) != 2 or not all(row):
            raise ConfigurationError(
                f"{key}: {path}:{number}: give {like[0]} and {like[1]}, with one tab between them, not "
                f"{brief(line.split(chr(9)))}"
            )
        rows.append((row[0], row[1]))
    if rows and re.search(content, rows[0][1]):
        raise ConfigurationError(f"{key}: {path}:1: the first line must be a heading; it holds {brief(rows[0][1])}")
    return rows[1:]


def _inputs(path: str | None) -> dict[str, str] | None:
    """The data channels."""
    like = ("a channel's name", "the place of its data")
    rows = _table(path, "sagemaker_inputs_file", like, "^[a-z0-9]+://")
    return None if rows is None else dict(rows)


def _metrics(path: str | None) -> list[dict[str, str]] | None:
    """The names of metrics and their regular expressions."""
    like = ("a metric's name", "the regular expression of its value")
    rows = _table(path, "sagemaker_metrics_file", like, r"\(.*\)")
    return None if rows is None else [{"Name": name, "Regex": regex} for name, regex in rows]
