# SPDX-License-Identifier: Apache-2.0
"""Data parallelism on torch_xla devices: torch's DDP over the xla backend, and the traced step sent off."""

from __future__ import annotations

from typing import Any

import torch

from ...config.training import DistributedDataParallelKwargs
from ...precision.base import Precision
from .strategy import DataParallel


class XlaDataParallel(DataParallel):
    """Operations on these devices are recorded until they are asked for; after each step the record is run."""

    name = "DistributedDataParallel on XLA"

    def __init__(
        self, device: torch.device, precision: Precision, options: DistributedDataParallelKwargs | None = None
    ) -> None:
        super().__init__(device, precision, options)
        import torch_xla

        self.after_step = (torch_xla.sync,)

    @property
    def data_shard(self) -> tuple[int, int]:
        return super().data_shard if torch.distributed.is_initialized() else (0, 1)

    def wrap_model(self, model: torch.nn.Module) -> torch.nn.Module:
        return super().wrap_model(model) if torch.distributed.is_initialized() else model

    def arguments(self) -> dict[str, Any]:
        # No device ids, and the xla backend reduces in the buckets' own memory only.
        return {**self.options.to_kwargs(), "gradient_as_bucket_view": True}
