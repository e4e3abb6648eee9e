# SPDX-License-Identifier: Apache-2.0
"""What torch_xla knows of this process: its ranks, and its backend of torch.distributed."""

from __future__ import annotations

from ..core.devices import accelerator_type
from ..core.imports import is_available
from ..core.topology import Topology


def topology() -> Topology | None:
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


def register_backend() -> None:
    """Make `backend="xla"` known to torch.distributed."""
    import torch_xla.distributed.xla_backend  # noqa: F401
