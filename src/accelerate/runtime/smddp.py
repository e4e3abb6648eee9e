# SPDX-License-Identifier: Apache-2.0
"""Amazon SageMaker's data parallel library: the collective backend that a job with DATA_PARALLEL asks for."""

from __future__ import annotations

import importlib

from ..core import env
from ..core.errors import ConfigurationError

BACKEND = "smddp"
_MODULE = "smdistributed.dataparallel.torch.torch_smddp"


def is_asked_for() -> bool:
    """Whether this process is part of a SageMaker job whose launch configuration says DATA_PARALLEL."""
    return env.get_flag("ACCELERATE_USE_SAGEMAKER") and (
        env.get("ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE") == "DATA_PARALLEL"
    )


def register_backend() -> None:
    """Make the backend known to torch. Raises ConfigurationError where the library is not in the container."""
    try:
        importlib.import_module(_MODULE)
    except ImportError as error:
        raise ConfigurationError(
            f"SageMaker's data parallelism is asked for (DATA_PARALLEL), and its library is not here ({error}): use "
            "an image that has it, or set distributed_type to NO in the SageMaker configuration"
        ) from error
