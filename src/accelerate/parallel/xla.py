# SPDX-License-Identifier: Apache-2.0
"""Data parallelism on torch_xla devices: torch's DDP over the xla backend, and the traced step sent off."""

from __future__ import annotations

import torch
from torch.nn.parallel import DistributedDataParallel

from ..config.training import DistributedDataParallelKwargs
from ..precision.base import Precision
from .ddp import DataParallel


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
        if not torch.distributed.is_initialized() or not any(p.requires_grad for p in model.parameters()):
            return model
        # The xla backend reduces in the buckets' own memory only.
        arguments = {**self.options.to_kwargs(), "gradient_as_bucket_view": True}
        for name in ("comm_hook", "comm_wrapper", "comm_state_option"):
            arguments.pop(name, None)
        return DistributedDataParallel(model, **arguments)
