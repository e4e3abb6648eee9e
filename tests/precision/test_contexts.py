# SPDX-License-Identifier: Apache-2.0
"""Autocast and scaler of the run for code without an Accelerator."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from accelerate.config.precision import AutocastKwargs
from accelerate.precision.amp import get_grad_scaler, get_mixed_precision_context_manager
from accelerate.state import AcceleratorState


@pytest.mark.parametrize(
    ("precision", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_the_context_computes_in_the_precision_of_the_run(
    precision: str, dtype: torch.dtype
) -> None:
    AcceleratorState(precision, cpu=True)
    layer, x = torch.nn.Linear(4, 4), torch.randn(2, 4)
    with get_mixed_precision_context_manager(native_amp=True):
        assert layer(x).dtype is dtype
    with get_mixed_precision_context_manager(
        native_amp=True, autocast_kwargs=AutocastKwargs(enabled=False)
    ):
        assert layer(x).dtype is torch.float32
    assert isinstance(get_mixed_precision_context_manager(), contextlib.nullcontext)


def test_the_scaler_takes_torch_options() -> None:
    scaler = get_grad_scaler(init_scale=8.0, growth_interval=3)
    assert type(scaler) is torch.amp.GradScaler
    assert scaler.get_scale() == 8.0 and scaler.get_growth_interval() == 3
    assert isinstance(get_grad_scaler("FSDP"), ShardedGradScaler)
