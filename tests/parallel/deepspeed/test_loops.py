# SPDX-License-Identifier: Apache-2.0
"""What loops do around a DeepSpeed engine's steps, against the plain loop in float32."""

import copy
import warnings

import pytest
import torch
from deepspeed_runs import LATE_IMPORTS, config, fresh, needs_deepspeed, on_engine_ranks
from torch import nn

from accelerate.config.deepspeed import DeepSpeedPlugin
from accelerate.core.errors import CheckpointError, PrepareError

PRELOADED = LATE_IMPORTS
pytestmark = needs_deepspeed
SHARDS_ALL = {"stage3_param_persistence_threshold": 0}


def make(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def rows(number):
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(number))


def engine_run(stage, **zero):
    options = {"stage3_gather_16bit_weights_on_model_save": True, "reduce_bucket_size": 1000, **zero}
    settings = config(stage, None, options, zero_allow_untested_optimizer=True)
    return fresh(DeepSpeedPlugin(hf_ds_config={**settings, "train_micro_batch_size_per_gpu": 2}))


def loop(model, optimizer, backward, share, changes):
    """Six steps; `changes` are made to the model after the step of their number."""
    best = None
    for number in range(6):
        backward(model(share(rows(number))).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        if number == 0 and "load" in changes:
            best = copy.deepcopy(model.state_dict())
        with torch.no_grad():
            if number in (1, 5) and "clamp" in changes:
                for parameter in model.parameters():
                    parameter.clamp_(-0.2, 0.2)
            if number == 0 and ".data" in changes:
                for parameter in model.parameters():
                    parameter.data.mul_(0.5)
            if number == 3 and best:
                model.load_state_dict(best)


@on_engine_ranks(2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_changes_between_steps_are_kept(stage):
    changes = ("clamp", "load", ".data")
    expected = make()
    loop(expected, adamw(expected), torch.Tensor.backward, lambda batch: batch, changes)
    accelerator = engine_run(stage)
    model = make()
    model, optimizer = accelerator.prepare(model, adamw(model))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loop(model, optimizer, accelerator.backward, lambda batch: batch.chunk(2)[accelerator.process_index], changes)
    assert any("through `.data`" in str(warning.message) for warning in caught) is (stage > 0)
    found = accelerator.get_state_dict(model)
    for name, value in expected.state_dict().items() if accelerator.is_main_process else ():
        # Sums of float32 in another order, of which Adam's first steps keep the sign alone.
        assert (found[name].cpu() - value).abs().max() < 1e-4, name
    accelerator.free_memory()


@on_engine_ranks(2)
def test_changes_of_sharded_parameters_are_refused():
    accelerator = engine_run(3, **SHARDS_ALL)
    model = make()
    model, optimizer = accelerator.prepare(model, adamw(model))
    empty = copy.deepcopy(model.state_dict())
    loop(model, optimizer, accelerator.backward, lambda batch: batch[:2], ())
    with pytest.raises(CheckpointError, match="get_state_dict gathers"):
        model.load_state_dict(empty)
    with torch.no_grad():
        next(model.parameters()).zero_()
    with pytest.raises(PrepareError, match=r"0\.weight changed on rank . while ZeRO stage 3 had them sharded"):
        accelerator.backward(model(rows(0)[:2]).mean())
    accelerator.free_memory()


@on_engine_ranks(2)
def test_backwards_that_are_no_step():
    """Of a frozen model's outputs; for the gradient of an input; a second one, which steps, with a warning."""
    expected = make()
    teacher, reference = make(1), adamw(expected)
    for number in range(3):
        x = rows(number).requires_grad_()
        (gradient,) = torch.autograd.grad(expected(x).square().sum(), x)
        x = x.detach() + 0.1 * gradient.sign()
        nn.functional.mse_loss(expected(x), teacher(x).detach()).backward()
        reference.step()
        reference.zero_grad()
    accelerator = engine_run(3)
    frozen = accelerator.prepare(make(1).requires_grad_(False))
    model = make()
    model, optimizer = accelerator.prepare(model, adamw(model))
    for number in range(3):
        x = rows(number).chunk(2)[accelerator.process_index].requires_grad_()
        (gradient,) = torch.autograd.grad(accelerator.unwrap_model(model)(x).square().sum(), x)
        x = x.detach() + 0.1 * gradient.sign()
        accelerator.backward(nn.functional.mse_loss(model(x), frozen(x).detach()))
        optimizer.step()
        optimizer.zero_grad()
    found = accelerator.get_state_dict(model)
    for name, value in expected.state_dict().items() if accelerator.is_main_process else ():
        assert (found[name].cpu() - value).abs().max() < 1e-4, name
    with pytest.raises(PrepareError, match="which is not accelerator"):
        model(x).sum().backward()
    with pytest.warns(UserWarning, match=r"without an optimizer\.step\(\) since its last"):
        for _ in range(2):
            accelerator.backward(model(x).mean())
    accelerator.free_memory()
