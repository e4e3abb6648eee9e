# SPDX-License-Identifier: Apache-2.0
"""A gradient scaler that unscales otherwise, and whether one has skipped a step."""

from __future__ import annotations

import torch

from accelerate.torch_internals.grad_scaler import SCALER_CHECKS, UnscalingScaler, has_overflowed


def test_gradients_are_unscaled_by_the_subclass() -> None:
    class Halving(UnscalingScaler):
        def unscale_gradients(self, optimizer, inverse_scale, allow_fp16):
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad.mul_(inverse_scale)
            return {torch.device("cpu"): torch.ones(())}

    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = Halving("cpu", init_scale=2.0)
    scaler.scale(parameter.sum()).backward()
    scaler.step(optimizer)
    # It reports an overflow: the step is skipped.
    assert torch.equal(parameter.grad, torch.ones(2))
    assert torch.equal(parameter.detach(), torch.ones(2))


def test_an_overflow_is_that_of_one_optimizer() -> None:
    assert SCALER_CHECKS.is_on
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    optimizers = []
    for gradient in (1.0, float("inf")):
        parameter = torch.nn.Parameter(torch.ones(2))
        optimizers.append(torch.optim.SGD([parameter], lr=1.0))
        scaler.scale(parameter.sum() * gradient).backward()
    assert not has_overflowed(scaler, optimizers[1])
    for optimizer in optimizers:
        scaler.step(optimizer)
    assert [has_overflowed(scaler, optimizer) for optimizer in optimizers] == [False, True]
