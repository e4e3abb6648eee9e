# SPDX-License-Identifier: Apache-2.0
"""Autocast around a forward, fp32 outputs, the scaler, and the way back."""

from __future__ import annotations

import contextlib
import copy
import pickle

import pytest
import torch
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from accelerate.config.precision import AutocastKwargs, GradScalerKwargs
from accelerate.core.errors import PrepareError
from accelerate.precision.amp import (
    MixedPrecision,
    ScaledPrecision,
    get_grad_scaler,
    get_mixed_precision_context_manager,
    restore_forward,
)
from accelerate.state import AcceleratorState


class Two(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)
        self.seen = None

    def forward(self, x, *, factor=1.0):
        hidden = self.linear(x)
        self.seen = hidden.dtype
        return {"out": hidden * factor, "ids": torch.arange(2)}


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_forward_is_that_of_autocast(name):
    torch.manual_seed(0)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[name]
    model, x = Two(), torch.randn(3, 8)
    with torch.autocast("cpu", dtype=dtype):
        expected = model(x, factor=2.0)["out"].float()
    precision = ScaledPrecision("cpu") if name == "fp16" else MixedPrecision("bf16", dtype, "cpu")
    found = precision.wrap_forward(model)(x, factor=2.0)
    assert model.seen is dtype
    assert found["out"].dtype is torch.float32
    assert found["ids"].dtype is torch.int64
    assert torch.equal(found["out"], expected)
    assert model.linear.weight.dtype is torch.float32


def test_autocast_options():
    off = MixedPrecision("bf16", torch.bfloat16, "cpu", AutocastKwargs(enabled=False))
    model = off.wrap_forward(Two())
    model(torch.ones(1, 8))
    assert model.seen is torch.float32
    with off.autocast(AutocastKwargs(enabled=True)):
        assert torch.is_autocast_enabled("cpu")


def test_wrapped_twice_is_wrapped_once_and_restored():
    precision = MixedPrecision("bf16", torch.bfloat16, "cpu")
    model = Two()
    plain = list(model.__dict__)
    precision.wrap_forward(precision.wrap_forward(model))
    restore_forward(model)
    assert list(model.__dict__) == plain
    model(torch.ones(1, 8))
    assert model.seen is torch.float32
    pickle.dumps(model)


def test_a_pickled_model_comes_back_plain_and_a_copied_one_lowered():
    model = MixedPrecision("bf16", torch.bfloat16, "cpu").wrap_forward(Two())
    plain = pickle.loads(pickle.dumps(model))
    plain(torch.ones(1, 8))
    assert plain.seen is torch.float32
    copied = copy.deepcopy(model)
    copied(torch.ones(1, 8))
    assert copied.seen is torch.bfloat16
    assert model.seen is None


def test_scaler_options_and_half_weights():
    assert (
        ScaledPrecision("cpu", scaling=GradScalerKwargs(init_scale=8.0)).scaler.get_scale() == 8.0
    )
    with pytest.raises(PrepareError, match=r"'linear.weight' of Two is float16"):
        ScaledPrecision("cpu").wrap_forward(Two().half())


# --- for code without an Accelerator


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
