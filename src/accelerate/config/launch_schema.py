# SPDX-License-Identifier: Apache-2.0
"""The keys a launch configuration file may hold, with their types, older spellings and where each one belongs."""

from __future__ import annotations

import functools
from typing import Any

from ..core.constants import FSDP_SHARDING_STRATEGY
from ..core.enums import ComputeEnvironment, DistributedType, SageMakerDistributedType
from ..core.option import Option
from ..core.options import options

_KINDS = tuple(kind.value for kind in DistributedType)

# Keys that no flag of `accelerate launch` stands for.
CLUSTER_ONLY = (
    Option("compute_environment", "text", choices=tuple(kind.value for kind in ComputeEnvironment)),
    Option("distributed_type", "text", choices=_KINDS),
    Option("tpu_name", "text"),
    Option("tpu_zone", "text"),
    Option("command_file", "text"),
    Option("commands", "list"),
    Option("mpirun_ccl", "int", key="mpirun_config.mpirun_ccl"),
    # The API's files hold it with DeepSpeed's options; our own may hold it for every strategy.
    Option("deepspeed_accumulation", "int", key="deepspeed_config.gradient_accumulation_steps"),
)

SAGEMAKER = (
    Option("compute_environment", "text", choices=tuple(kind.value for kind in ComputeEnvironment)),
    Option("distributed_type", "text", choices=tuple(kind.value for kind in SageMakerDistributedType)),
    Option("mixed_precision", "text", choices=options()["mixed_precision"].choices),
    Option("num_machines", "int"),
    *(Option(name, "switch") for name in ("use_cpu", "debug", "enable_cpu_affinity")),
    *(
        Option(name, "text")
        for name in (
            "ec2_instance_type", "iam_role_name", "image_uri", "profile", "region", "gpu_ids", "base_job_name",
            "pytorch_version", "transformers_version", "py_version", "sagemaker_inputs_file", "sagemaker_metrics_file",
        )
    ),
)  # fmt: skip

# Spellings of older files. None: the key is gone and has no effect any more.
FORMER: dict[str, str | None] = {
    "dynamo_backend": "dynamo_config.dynamo_backend",
    "fsdp_config.fsdp_backward_prefetch_policy": "fsdp_config.fsdp_backward_prefetch",
    "fsdp_config.min_num_params": "fsdp_config.fsdp_min_num_params",
    "fsdp_config.fsdp_sync_module_state": "fsdp_config.fsdp_sync_module_states",
    "use_mps_device": None,
    "mpirun_config.num_processes": None,
}
FORMER_VALUES: dict[str, dict[Any, str]] = {
    "fsdp_config.fsdp_sharding_strategy": dict(enumerate(FSDP_SHARDING_STRATEGY, start=1)),
    "distributed_type": {"TPU": "XLA", "MPS": "NO"},
    "fp8_config.backend": {"FP8": "te"},
}


@functools.cache
def cluster_keys() -> dict[str, Option]:
    """Dotted key -> what it holds, for files of LOCAL_MACHINE."""
    table = {option.file_key: option for option in options().values() if option.file_key}
    table.update({option.file_key: option for option in CLUSTER_ONLY})
    return table


@functools.cache
def sagemaker_keys() -> dict[str, Option]:
    """Dotted key -> what it holds, for files of AMAZON_SAGEMAKER."""
    table = {option.name: option for option in SAGEMAKER}
    table.update(
        {key: option for key, option in cluster_keys().items() if key.startswith("dynamo_config.")}
    )
    return table


def canonical(key: str, table: dict[str, Option]) -> str | None:
    """The key under which the table has it: itself, an older spelling, or with or without its section's prefix.

    The empty string for a key that is gone, None for one that never was.
    """
    if key in table:
        return key
    if key in FORMER:
        return FORMER[key] or ""
    section, dot, name = key.partition(".")
    # `fsdp_config` has options fsdp_..., `parallelism_config` has parallelism_config_...
    if not dot:
        return None
    for prefix in (section.removesuffix("config"), f"{section}_"):
        for spelling in (prefix + name, name.removeprefix(prefix)):
            if f"{section}.{spelling}" in table:
                return f"{section}.{spelling}"
    return None


def sections(table: dict[str, Option]) -> set[str]:
    """Return the sections of a configuration file, from the dotted keys of a table."""
    return {key.partition(".")[0] for key in table if "." in key}
