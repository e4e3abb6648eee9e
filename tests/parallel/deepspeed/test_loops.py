# SPDX-License-Identifier: Apache-2.0
"""What loops do around a DeepSpeed engine's steps, against the plain loop in float32."""

import torch
from deepspeed_runs import LATE_IMPORTS, config, fresh, needs_deepspeed, on_engine_ranks
from layouts import compare_state
from torch import nn

from accelerate.config.deepspeed import DeepSpeedPlugin

PRELOADED = LATE_IMPORTS
pytestmark = needs_deepspeed


def make(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def rows(number):
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(number))


def engine_run(stage, **zero):
    options = {
        "stage3_gather_16bit_weights_on_model_save": True,
        "reduce_bucket_size": 1000,
        **zero,
    }
    settings = config(stage, None, options, zero_allow_untested_optimizer=True)
    return fresh(DeepSpeedPlugin(hf_ds_config={**settings, "train_micro_batch_size_per_gpu": 2}))


@on_engine_ranks(2)
def test_backwards_that_are_no_step():
    """Of a frozen model's outputs; for the gradient of an input."""
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
    compare_state(accelerator, model, expected.state_dict(), 1e-4)
    accelerator.free_memory()


@on_engine_ranks(2)
def test_gradients_are_not_clipped_unless_the_configuration_says_so():
    expected, model = make(), make()
    reference = torch.optim.SGD(expected.parameters(), lr=0.01)
    accelerator = engine_run(2)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    for number in range(3):
        x = rows(number)
        (100 * expected(x).square().mean()).backward()
        reference.step()
        assert nn.utils.get_total_norm([p.grad for p in expected.parameters()]) > 1
        reference.zero_grad()
        accelerator.backward(100 * model(x.chunk(2)[accelerator.process_index]).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    compare_state(accelerator, model, expected.state_dict(), 1e-5)
    accelerator.free_memory()
