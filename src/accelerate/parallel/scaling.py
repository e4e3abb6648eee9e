# SPDX-License-Identifier: Apache-2.0
"""The gradient scaler of fp16 for sharded models: all ranks skip a step together."""

from __future__ import annotations

import torch
import torch.distributed as dist

from .gradients import by_kind, gradients_of


class AgreeingScaler(torch.amp.GradScaler):
    """Unscales this rank's local gradients; an overflow on one rank is one on all.

    torch's scaler rejects a mixture of plain tensors and DTensors, and combines only the ranks of the first gradient.
    """

    def __init__(self, scaler: torch.amp.GradScaler, device: torch.device) -> None:
        self.__dict__.update(scaler.__dict__)
        self._home = device

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, torch.Tensor]:
        gradients = gradients_of(parameter for group in optimizer.param_groups for parameter in group["params"])
        grouped = by_kind(gradient._values() if gradient.is_sparse else gradient for gradient in gradients)
        if not allow_fp16 and any(dtype is torch.float16 for _, dtype in grouped):
            raise ValueError("Attempting to unscale FP16 gradients.")
        flag = torch.zeros((), dtype=torch.float32, device=self._home)
        for (device, _), listed in grouped.items():
            found = torch.zeros((), dtype=torch.float32, device=device)
            torch._amp_foreach_non_finite_check_and_unscale_(listed, found, inv_scale.to(device))
            flag += found.to(self._home)
        # A rank without gradients of this optimizer takes part as well.
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return {self._home: flag}
