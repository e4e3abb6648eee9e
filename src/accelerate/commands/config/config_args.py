# SPDX-License-Identifier: Apache-2.0
"""The API's configuration objects: the content of a configuration file as attributes."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import Enum
from pathlib import Path
from typing import Any

from ...config import launch_file
from ...core import constants
from ...core.enums import ComputeEnvironment, DistributedType, SageMakerDistributedType


@dataclass
class BaseConfig:
    """What every kind of configuration has."""

    compute_environment: ComputeEnvironment
    distributed_type: DistributedType | SageMakerDistributedType
    mixed_precision: str | None
    use_cpu: bool
    debug: bool

    def to_dict(self) -> dict[str, Any]:
        """The keys and plain values of a file; what is not set is left out."""
        plain = {item.name: getattr(self, item.name) for item in fields(self)}
        plain.update(plain.pop("own", {}))
        plain = {
            key: value.value if isinstance(value, Enum) else value for key, value in plain.items()
        }
        return {key: value for key, value in plain.items() if value is not None and value != {}}

    def to_yaml_file(self, yaml_file: str | Path) -> None:
        """Write the configuration to a YAML file."""
        launch_file.write(Path(yaml_file), self.to_dict())

    def to_json_file(self, json_file: str | Path) -> None:
        """Write the configuration to a JSON file."""
        launch_file.write(Path(json_file), self.to_dict())

    @classmethod
    def from_yaml_file(cls, yaml_file: str | Path | None = None) -> BaseConfig:
        """Read a configuration file; None reads the default one."""
        return load_config_from_file(yaml_file)

    from_json_file = from_yaml_file


@dataclass
class ClusterConfig(BaseConfig):
    """The user's own machines: how many processes, where, and how the model is distributed."""

    num_processes: int = -1
    machine_rank: int = 0
    num_machines: int = 1
    gpu_ids: str | None = None
    main_process_ip: str | None = None
    main_process_port: int | None = None
    rdzv_backend: str | None = "static"
    same_network: bool | None = False
    main_training_function: str = "main"
    enable_cpu_affinity: bool = False
    fp8_config: dict[str, Any] = field(default_factory=dict)
    deepspeed_config: dict[str, Any] = field(default_factory=dict)
    fsdp_config: dict[str, Any] = field(default_factory=dict)
    parallelism_config: dict[str, Any] = field(default_factory=dict)
    megatron_lm_config: dict[str, Any] = field(default_factory=dict)
    mpirun_config: dict[str, Any] = field(default_factory=dict)
    downcast_bf16: bool = False
    tpu_name: str | None = None
    tpu_zone: str | None = None
    tpu_use_cluster: bool = False
    tpu_use_sudo: bool = False
    command_file: str | None = None
    commands: list[str] | None = None
    tpu_vm: list[str] | None = None
    tpu_env: list[str] | None = None
    dynamo_config: dict[str, Any] = field(default_factory=dict)
    # Keys of options that the API does not have.
    own: dict[str, Any] = field(default_factory=dict)


@dataclass
class SageMakerConfig(BaseConfig):
    """Machines of Amazon SageMaker."""

    ec2_instance_type: str = ""
    iam_role_name: str = ""
    image_uri: str | None = None
    profile: str | None = None
    region: str = "us-east-1"
    num_machines: int = 1
    gpu_ids: str = "all"
    base_job_name: str = "accelerate-sagemaker-1"
    pytorch_version: str = constants.SAGEMAKER_PYTORCH_VERSION
    transformers_version: str = constants.SAGEMAKER_TRANSFORMERS_VERSION
    py_version: str = constants.SAGEMAKER_PYTHON_VERSION
    sagemaker_inputs_file: str | None = None
    sagemaker_metrics_file: str | None = None
    additional_args: dict[str, Any] = field(default_factory=dict)
    dynamo_config: dict[str, Any] = field(default_factory=dict)
    enable_cpu_affinity: bool = False


def load_config_from_file(config_file: str | Path | None = None) -> ClusterConfig | SageMakerConfig:
    """Read a configuration file, the default one where None is given. ConfigurationError for what is wrong in it."""
    file = launch_file.read(config_file if config_file is not None else launch_file.default_file())
    kind: type[ClusterConfig | SageMakerConfig] = (
        SageMakerConfig if file.is_sagemaker else ClusterConfig
    )
    kinds = SageMakerDistributedType if file.is_sagemaker else DistributedType
    data = {key: value for key, value in file.data.items() if value is not None}
    words: dict[str, Any] = {
        "compute_environment": ComputeEnvironment(data.pop("compute_environment", "LOCAL_MACHINE")),
        "distributed_type": kinds(data.pop("distributed_type", "NO")),
        "mixed_precision": data.pop("mixed_precision", None),
        "use_cpu": data.pop("use_cpu", False),
        "debug": data.pop("debug", False),
    }
    extra = {key: data.pop(key) for key in set(data) - {item.name for item in fields(kind)}}
    if extra:
        words["own"] = extra
    if (
        not file.is_sagemaker
        and "num_processes" not in data
        and words["distributed_type"] == DistributedType.NO
    ):
        data["num_processes"] = 1
    return kind(**words, **data)


def __getattr__(name: str) -> Any:
    # Computed at each use: the folder follows HF_HOME and XDG_CACHE_HOME.
    if name in ("default_config_file", "default_yaml_config_file"):
        return str(launch_file.default_file())
    if name == "default_json_config_file":
        return str(launch_file.default_folder() / "default_config.json")
    if name == "cache_dir":
        return str(launch_file.default_folder())
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
