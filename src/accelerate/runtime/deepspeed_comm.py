# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's communication on the process group of the run."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ..core import env
from ..core.imports import is_available


def is_requested() -> bool:
    """Whether the run uses DeepSpeed, according to the launcher's variable or transformers, and it is installed."""
    return env.get_flag("ACCELERATE_USE_DEEPSPEED") and is_available("deepspeed")


def start(device: torch.device) -> None:
    """Start DeepSpeed's communication.

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
