# SPDX-License-Identifier: Apache-2.0
"""Another way to unscale gradients, inside of torch's gradient scaler, and whether it has skipped a step."""

from __future__ import annotations

import torch

from . import Internal

GRAD_SCALER = Internal(
    name="grad_scaler",
    what="GradScaler._unscale_grads_",
    versions="2.11 to 2.14",
    upstream="not reported",
    needed_by="mixed_precision='fp16' under FSDP2, tensor parallelism and pipelines",
    without="torch's scaler fails for a mixture of plain tensors and DTensors",
    test="tests/torch_internals/test_grad_scaler.py::test_gradients_are_unscaled_by_the_subclass",
)

SCALER_CHECKS = Internal(
    name="scaler_checks",
    what="GradScaler._per_optimizer_states",
    versions="2.11 to 2.14",
    upstream="not reported",
    needed_by="mixed_precision='fp16' with several optimizers, such as Muon and AdamW: the scale is updated once, "
    "after the last of them, and each says whether its step was skipped",
    without="the gradients of the second optimizer are divided by the scale twice, if they were clipped",
    test="tests/torch_internals/test_grad_scaler.py::test_an_overflow_is_that_of_one_optimizer",
)


def has_overflowed(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> bool:
    """Whether a scaler has found gradients of an optimizer that are not finite, since the last update of its scale."""
    checks = scaler._per_optimizer_states.get(id(optimizer), {})
    return any(bool(flag) for flag in checks.get("found_inf_per_device", {}).values())


class UnscalingScaler(torch.amp.GradScaler):
    """A gradient scaler that unscales by its own `unscale_gradients`."""

    def unscale_gradients(
        self, optimizer: torch.optim.Optimizer, inverse_scale: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        """Multiply the gradients in place; returns by device more than 0 where some are not finite."""
        raise NotImplementedError

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, torch.Tensor]:
        if GRAD_SCALER.is_on:
            return self.unscale_gradients(optimizer, inv_scale, allow_fp16)
        return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
