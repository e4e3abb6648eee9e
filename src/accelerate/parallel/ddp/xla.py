# SPDX-License-Identifier: Apache-2.0
"""Data parallelism on torch_xla devices: torch's DDP over the xla backend; each step ends with a sync of the trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...config.training import DistributedDataParallelKwargs
from ...precision.base import Precision
from .strategy import DataParallel


class XlaDataParallel(DataParallel):
    """Operations on these devices are traced lazily; after each optimizer step the trace is executed."""

    name = "DistributedDataParallel on XLA"

    def __init__(
        self, device: torch.device, precision: Precision, options: DistributedDataParallelKwargs | None = None
    ) -> None:
        super().__init__(device, precision, options)
        import torch_xla

        self.after_step: tuple[Callable[[], None], ...] = (torch_xla.sync,)

    @property
    def data_shard(self) -> tuple[int, int]:
        """One shard for each process; all data without a process group."""
        return super().data_shard if torch.distributed.is_initialized() else (0, 1)

    def wrap_model(self, model: torch.nn.Module) -> torch.nn.Module:
        """The model inside of DDP if there is a process group."""
        return super().wrap_model(model) if torch.distributed.is_initialized() else model

    def arguments(self) -> dict[str, Any]:
        """The arguments of DDP besides the model."""
        # No device ids, and the xla backend reduces in the buckets' own memory only.
        return {**self.options.to_kwargs(), "gradient_as_bucket_view": True}
