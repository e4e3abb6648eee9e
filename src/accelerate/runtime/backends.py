# SPDX-License-Identifier: Apache-2.0
"""Libraries that bring a communication of their own: torch_xla, SageMaker's data parallel library, DeepSpeed."""

from __future__ import annotations

import importlib

import torch
import torch.distributed as dist

from ..core import env
from ..core.devices import accelerator_type
from ..core.errors import ConfigurationError
from ..core.imports import is_available
from ..core.topology import Topology

# The collective backend of SageMaker's library.
SMDDP = "smddp"


def xla_topology() -> Topology | None:
    """The ranks that torch_xla gave this process; None without torch_xla, or with another accelerator."""
    if not is_available("torch_xla") or accelerator_type() is not None:
        return None
    import torch_xla.runtime as runtime

    return Topology(
        rank=runtime.global_ordinal(),
        world_size=runtime.world_size(),
        local_rank=runtime.local_ordinal(),
        local_world_size=runtime.local_process_count(),
        launcher="xla",
    )


def uses_smddp() -> bool:
    """Whether this process is part of a SageMaker job launched with DATA_PARALLEL."""
    return env.get_flag("ACCELERATE_USE_SAGEMAKER") and (
        env.get("ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE") == "DATA_PARALLEL"
    )


def register(backend: str) -> None:
    """Make the backend of such a library known to torch. Raises ConfigurationError where SageMaker's is missing."""
    if backend == "xla":
        import torch_xla.distributed.xla_backend  # noqa: F401
    elif backend == SMDDP:
        try:
            importlib.import_module("smdistributed.dataparallel.torch.torch_smddp")
        except ImportError as error:
            raise ConfigurationError(
                "SageMaker's data parallelism was requested (DATA_PARALLEL), but its library is "
                f"missing ({error}): use an image that contains it, or set distributed_type to NO "
                "in the SageMaker configuration"
            ) from error


def uses_deepspeed() -> bool:
    """Whether the run uses DeepSpeed, according to the launcher's variable or transformers, and it is installed."""
    return env.get_flag("ACCELERATE_USE_DEEPSPEED") and is_available("deepspeed")


def start_deepspeed(device: torch.device) -> None:
    """Start DeepSpeed's communication on the process group of the run.

    An engine does this itself. `deepspeed.zero.Init`, in which transformers builds models of ZeRO-3, takes one process
    for the entire run if it comes before that.
    """
    if device.type == "cpu" and env.get("DS_ACCELERATOR") is None:
        # DeepSpeed chooses its device once, when it is imported.
        env.publish({"DS_ACCELERATOR": "cpu"})
    import deepspeed

    deepspeed.init_distributed(
        dist_backend=dist.get_backend(), auto_mpi_discovery=False, verbose=False
    )
