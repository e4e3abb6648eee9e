# SPDX-License-Identifier: Apache-2.0
"""Amazon SageMaker's data parallel library: the collective backend of a job with DATA_PARALLEL."""

from __future__ import annotations

import importlib

from ..core import env
from ..core.errors import ConfigurationError

BACKEND = "smddp"
_MODULE = "smdistributed.dataparallel.torch.torch_smddp"


def is_requested() -> bool:
    """Whether this process is part of a SageMaker job launched with DATA_PARALLEL."""
    return env.get_flag("ACCELERATE_USE_SAGEMAKER") and (
        env.get("ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE") == "DATA_PARALLEL"
    )


def register_backend() -> None:
    """Make the backend known to torch. Raises ConfigurationError where the library is not in the container."""
    try:
        importlib.import_module(_MODULE)
    except ImportError as error:
        raise ConfigurationError(
            f"SageMaker's data parallelism is requested (DATA_PARALLEL), but its library is missing ({error}): use "
            "an image that has it, or set distributed_type to NO in the SageMaker configuration"
        ) from error
