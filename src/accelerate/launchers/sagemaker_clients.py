# SPDX-License-Identifier: Apache-2.0
"""The calls of SageMaker's client for a job: the estimator of version 2, the ModelTrainer of version 3."""

from __future__ import annotations

import importlib.metadata
import inspect
import json
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ..core.errors import ConfigurationError, suggestion
from ..core.objects import masked
from ..core.option import brief

# Where ModelTrainer takes an argument of the estimator that it has under another name.
FIELDS = {
    "image_uri": "training_image",
    "input_mode": "training_input_mode",
    "entry_point": "source_code.entry_script",
    "source_dir": "source_code.source_dir",
    "instance_count": "compute.instance_count",
    "instance_type": "compute.instance_type",
    "volume_size": "compute.volume_size_in_gb",
    "volume_kms_key": "compute.volume_kms_key_id",
    "keep_alive_period_in_seconds": "compute.keep_alive_period_in_seconds",
    "training_plan": "compute.training_plan_arn",
    "use_spot_instances": "compute.enable_managed_spot_training",
    "max_run": "stopping_condition.max_runtime_in_seconds",
    "max_wait": "stopping_condition.max_wait_time_in_seconds",
    "subnets": "networking.subnets",
    "security_group_ids": "networking.security_group_ids",
    "enable_network_isolation": "networking.enable_network_isolation",
    "encrypt_inter_container_traffic": "networking.enable_inter_container_traffic_encryption",
    "output_path": "output_data_config.s3_output_path",
    "output_kms_key": "output_data_config.kms_key_id",
    "checkpoint_s3_uri": "checkpoint_config.s3_uri",
    "checkpoint_local_path": "checkpoint_config.local_path",
}
# ModelTrainer's fields that hold an object, and the object's class.
SECTIONS = {
    "source_code": "SourceCode",
    "compute": "Compute",
    "stopping_condition": "StoppingCondition",
    "networking": "Networking",
    "output_data_config": "OutputDataConfig",
    "checkpoint_config": "CheckpointConfig",
    "training_image_config": "TrainingImageConfig",
}
# The estimator's limit for a job, in seconds. ModelTrainer's is one hour.
LONGEST_RUN = 24 * 60 * 60
# The estimator's switches that turn off what ModelTrainer does not do.
OFF = {"debugger_hook_config": False, "disable_profiler": True}
# The estimator's distributions that torchrun stands in for.
DISTRIBUTIONS = ("torch_distributed", "pytorchddp", "smdistributed")


class Job(NamedTuple):
    """A job in the words of the estimator.

    arguments: the estimator's. inputs: channel -> location. following: arguments `wait` and `logs` of the call that
    starts the job. variables: the AWS variables that the client reads.
    """

    arguments: dict[str, Any]
    inputs: dict[str, str] | None
    following: dict[str, Any]
    variables: dict[str, str]


class Call(NamedTuple):
    """A call of a function or class of the client: as text, and to be made."""

    function: str
    arguments: dict[str, Any]

    def __repr__(self) -> str:
        words = [f"{name}={value!r}" for name, value in self.arguments.items()]
        return f"{self.function}({', '.join(words)})"

    def lines(self) -> str:
        """The call with one argument a line."""
        words = [f"    {name}={value!r},\n" for name, value in self.arguments.items()]
        return f"{self.function}(\n{''.join(words)})"


def client_version() -> int | None:
    """The major version of the installed client; None without one."""
    try:
        version = importlib.metadata.version("sagemaker")
    except importlib.metadata.PackageNotFoundError:
        return None
    return int(version.partition(".")[0])


class Client:
    """A version of the client, with the job that it starts."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def text(self) -> str:
        """The calls as Python, without secrets."""
        raise NotImplementedError

    def check(self) -> None:
        """ConfigurationError for arguments that the client does not have."""
        raise NotImplementedError

    def start(self) -> None:
        """Start the job."""
        raise NotImplementedError

    def training_job(self) -> Any:
        """The client's object of the job; None before its start."""
        raise NotImplementedError

    def name(self) -> str:
        """The name of the job, which was started."""
        raise NotImplementedError

    def result(self) -> str:
        """Where the model of the job is, or will be."""
        raise NotImplementedError

    def run(self) -> None:
        """Start the job, and follow it unless `wait` is false.

        The calls that start it can wait too. They turn Ctrl-C into the return of None, and the job would run on.
        """
        self.start()
        job = self.training_job()
        if job is None:
            raise KeyboardInterrupt
        if self.job.following.get("wait", True):
            job.wait(logs=self.job.following.get("logs", True))


class Estimator(Client):
    """Version 2."""

    estimator: Any = None

    def text(self) -> str:
        """The calls as Python, without secrets."""
        made = Call("HuggingFace", masked(self.job.arguments)).lines()
        return f"{made}.{Call('fit', {'inputs': self.job.inputs, **self.job.following})}"

    def check(self) -> None:
        """ConfigurationError for arguments that the client does not have."""
        from sagemaker.huggingface import HuggingFace

        known: set[str] = set()
        for base in HuggingFace.__mro__:
            known.update(inspect.signature(base.__init__).parameters)
        unknown = []
        for name in self.job.arguments:
            # The names of version 1 have a prefix, and are still understood.
            if name.removeprefix("train_") not in known:
                unknown.append(f"HuggingFace does not have {name}{suggestion(name, known)}")
        _refuse(unknown)

    def start(self) -> None:
        """Start the job."""
        from sagemaker.huggingface import HuggingFace

        self.estimator = HuggingFace(**self.job.arguments)
        self.estimator.fit(inputs=self.job.inputs, wait=False)

    def training_job(self) -> Any:
        """The client's object of the job."""
        return getattr(self.estimator, "latest_training_job", None)

    def name(self) -> str:
        """The name of the job."""
        return str(self.training_job().name)

    def result(self) -> str:
        """Where the model of the job is, or will be."""
        return str(self.estimator.model_data)


class Trainer(Client):
    """Version 3."""

    trainer: Any = None

    def text(self) -> str:
        """The calls as Python, without secrets."""
        made, metrics = trainer_calls(self.job._replace(arguments=masked(self.job.arguments)))
        text = made.lines()
        if metrics:
            text += f".with_metric_definitions({metrics!r})"
        train = {"input_data_config": self._channels(), **self.job.following}
        return f"{text}.{Call('train', train)}"

    def check(self) -> None:
        """ConfigurationError for arguments that the client does not have."""
        made, _ = trainer_calls(self.job)
        _refuse(_unknown(made, _functions()))

    def start(self) -> None:
        """Start the job."""
        if not logging.getLogger().handlers:
            # The client logs what the job prints, and leaves it to the program to show that.
            logger = logging.getLogger("sagemaker")
            logger.addHandler(logging.StreamHandler())
            logger.setLevel(logging.INFO)
        functions = _functions()
        made, metrics = trainer_calls(self.job)
        self.trainer = _made(made, functions)
        if metrics:
            self.trainer.with_metric_definitions(_made(metrics, functions))
        self.trainer.train(
            input_data_config=_made(self._channels(), functions), wait=False, logs=False
        )

    def training_job(self) -> Any:
        """The client's object of the job."""
        return getattr(self.trainer, "_latest_training_job", None)

    def name(self) -> str:
        """The name of the job."""
        return str(self.training_job().training_job_name)

    def result(self) -> str:
        """Where the model of the job is, or will be."""
        # Where the client has not asked for the end of the job, it does not know the file.
        file = getattr(self.training_job().model_artifacts, "s3_model_artifacts", None)
        folder = self.trainer.output_data_config.s3_output_path.rstrip("/")
        return file or f"{folder}/{self.name()}/output"

    def _channels(self) -> list[Call] | None:
        if self.job.inputs is None:
            return None
        return [
            Call("InputData", {"channel_name": name, "data_source": source})
            for name, source in self.job.inputs.items()
        ]


def trainer_calls(job: Job) -> tuple[Call, list[Call]]:
    """The call that makes a ModelTrainer, and those of its metrics."""
    arguments = {}
    for name, value in job.arguments.items():
        if value is not None and OFF.get(name) is not value:
            arguments[name] = value
    versions = {
        name: arguments.pop(name, None)
        for name in ("transformers_version", "pytorch_version", "py_version")
    }
    metrics = [
        Call("MetricDefinition", fields)
        for fields in _rows("metric_definitions", arguments.pop("metric_definitions", []))
    ]
    torchrun = _torchrun(
        arguments.pop("distribution", None),
        arguments.pop("distributed", None),
        _mapping("environment", arguments["environment"]).get("CUDA_VISIBLE_DEVICES"),
    )

    fields = {}
    sections: dict[str, dict[str, Any]] = {
        "stopping_condition": {"max_runtime_in_seconds": LONGEST_RUN}
    }
    for name, value in arguments.items():
        field, _, inner = FIELDS.get(name, name).partition(".")
        if inner:
            sections.setdefault(field, {})[inner] = value
        elif field in SECTIONS:
            sections.setdefault(field, {}).update(_mapping(field, value))
        else:
            fields[field] = value

    source = sections["source_code"]
    if (Path(source["source_dir"]) / "requirements.txt").is_file():
        source.setdefault("requirements", "requirements.txt")
    if "training_image" not in fields and "algorithm_name" not in fields:
        region = job.variables["AWS_DEFAULT_REGION"]
        fields["training_image"] = _image(region, sections["compute"], versions, torchrun)
    parameters = _mapping("hyperparameters", fields["hyperparameters"])
    fields["hyperparameters"] = {name: _encoded(value) for name, value in parameters.items()}
    if "tags" in fields:
        fields["tags"] = _rows("tags", fields["tags"])
    if torchrun is not None:
        fields["distributed"] = torchrun
    for field, inner_fields in sections.items():
        fields[field] = Call(SECTIONS[field], inner_fields)
    return Call("ModelTrainer", fields), metrics


def _torchrun(distribution: Any, distributed: Any, gpus: str | None) -> Call | None:
    """The call that has torchrun start a process for each GPU; None where the script runs as one process.

    Args:
        distribution: the estimator's.
        distributed: Torchrun's arguments.
        gpus: the GPUs that the processes see, separated by commas; None for all.
    """
    if distribution is None and distributed is None:
        return None
    distribution = _mapping("distribution", distribution or {})
    for name in distribution:
        if name not in DISTRIBUTIONS:
            raise ConfigurationError(
                f"additional_args: version 3 of sagemaker does not have the distribution {name}: "
                f"choose one of {', '.join(DISTRIBUTIONS)}, or set the arguments of Torchrun as "
                "`distributed`"
            )
    arguments: dict[str, Any] = {}
    if gpus is not None:
        arguments["process_count_per_node"] = len(gpus.split(","))
    model_parallel = distribution.get("smdistributed", {}).get("modelparallel")
    if model_parallel is not None:
        arguments["smp"] = model_parallel.get("parameters", {})
    arguments.update(_mapping("distributed", distributed or {}))
    if "smp" in arguments:
        arguments["smp"] = Call("SMP", dict(arguments["smp"]))
    return Call("Torchrun", arguments)


def _image(
    region: str, compute: Mapping[str, Any], versions: Mapping[str, Any], torchrun: Call | None
) -> Call:
    """The call that finds the image of the versions, one with SageMaker's model parallelism where that is used."""
    common = {
        "region": region,
        "py_version": versions["py_version"],
        "instance_type": compute.get("instance_type"),
    }
    if torchrun is not None and "smp" in torchrun.arguments:
        return Call(
            "image_uris.get_training_image_uri",
            {
                "framework": "pytorch",
                "framework_version": versions["pytorch_version"],
                "distribution": {"torch_distributed": {}, "smdistributed": {"modelparallel": {}}},
                **common,
            },
        )
    return Call(
        "image_uris.retrieve",
        {
            "framework": "huggingface",
            "version": versions["transformers_version"],
            "base_framework_version": f"pytorch{versions['pytorch_version']}",
            "image_scope": "training",
            **common,
        },
    )


def _encoded(value: Any) -> Any:
    """A hyperparameter that the script gets as the estimator would pass it.

    The container of version 3 reads a text as JSON twice and writes it as JSON (5e-5 becomes 5e-05), and an apostrophe
    ends the quotes of its variables. What it would change is written as JSON twice.
    """
    if not isinstance(value, str | int | float):
        return value
    text = str(value)
    try:
        read = json.loads(text)
        changed = isinstance(read, str) or json.dumps(read) != text
    except ValueError:
        changed = False
    if not changed and "'" not in text:
        return text
    return json.dumps(json.dumps(text).replace("'", "\\u0027"))


def _mapping(name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigurationError(
            f"additional_args: {name} must hold `key: value` lines, not {brief(value)}"
        )
    return value


def _rows(name: str, rows: Iterable[Any]) -> list[dict[str, Any]]:
    """Rows with the keys of version 3, where the estimator's are capitalized."""
    return [
        {key.lower(): value for key, value in _mapping(f"each of {name}", row).items()}
        for row in rows
    ]


def _functions() -> dict[str, Any]:
    """Name in a Call -> function or class of version 3."""
    from sagemaker.core import image_uris
    from sagemaker.train import ModelTrainer, configs, distributed

    return {
        **vars(configs),
        "ModelTrainer": ModelTrainer,
        "Torchrun": distributed.Torchrun,
        "SMP": distributed.SMP,
        "image_uris.retrieve": image_uris.retrieve,
        "image_uris.get_training_image_uri": image_uris.get_training_image_uri,
    }


def _unknown(call: Call, functions: Mapping[str, Any]) -> list[str]:
    """What is wrong with the names of a call's arguments, and of the calls in it."""
    errors = []
    known = getattr(functions[call.function], "model_fields", call.arguments)
    for name, value in call.arguments.items():
        if name not in known:
            near = suggestion(name, [*known, *FIELDS])
            errors.append(f"{call.function} has no {name}{near}")
        if isinstance(value, Call):
            errors += _unknown(value, functions)
    return errors


def _made(value: Any, functions: Mapping[str, Any]) -> Any:
    """A value with the results of the calls in it."""
    if isinstance(value, Call):
        return functions[value.function](**_made(value.arguments, functions))
    if isinstance(value, dict):
        return {name: _made(inner, functions) for name, inner in value.items()}
    if isinstance(value, list):
        return [_made(item, functions) for item in value]
    return value


def _refuse(errors: Iterable[str]) -> None:
    if errors:
        raise ConfigurationError(f"additional_args: {'; '.join(errors)}")
