# SPDX-License-Identifier: Apache-2.0
"""`backward(loss, num_items=...)` under DeepSpeed: the factor of an engine's gradients, and whole runs."""

from types import SimpleNamespace

import pytest
import torch
from deepspeed_runs import LATE_IMPORTS, config, fresh, needs_deepspeed, on_engine_ranks
from torch import nn

from accelerate.config.deepspeed import DeepSpeedPlugin
from accelerate.core.errors import ConfigurationError
from accelerate.parallel.deepspeed.engine import check_multiplies, multiplied


def engine(optimizer, zero=True, **others):
    return SimpleNamespace(optimizer=optimizer, zero_optimization=lambda: zero, **others)


@pytest.mark.parametrize("factor, scale", [(4.0, 2.0), (0.0, 8.0)])
def test_a_step_divides_by_its_own_scale_for_once(factor, scale):
    optimizer = SimpleNamespace(custom_loss_scaler=False, external_loss_scale=None, loss_scale=8.0)
    with pytest.raises(RuntimeError), multiplied(engine(optimizer), torch.tensor(factor)):
        assert optimizer.custom_loss_scaler and optimizer.external_loss_scale == scale
        raise RuntimeError
    assert (optimizer.custom_loss_scaler, optimizer.external_loss_scale) == (False, None)


def test_gradients_that_are_whole_are_multiplied_where_they_lie():
    summed = [torch.ones(3), torch.ones(2)]
    with multiplied(engine(SimpleNamespace(fp32_groups_gradients_flat=summed)), torch.tensor(3.0)):
        assert summed[0].tolist() == [3.0] * 3 and summed[1].tolist() == [3.0] * 2
    module = torch.nn.Linear(2, 1)
    module.weight.grad = torch.ones(1, 2)
    with multiplied(
        engine(torch.optim.SGD(module.parameters()), zero=False, module=module), torch.tensor(3.0)
    ):
        assert module.weight.grad.tolist() == [[3.0, 3.0]] and module.bias.grad is None


@pytest.mark.parametrize("option", [{"zenflow": True}, {"super_offload": lambda: True}])
def test_an_engine_that_steps_early_is_refused(option):
    check_multiplies(SimpleNamespace(zenflow=False, super_offload=lambda: False))
    with pytest.raises(ConfigurationError, match=f"{next(iter(option))} updates parameters before"):
        check_multiplies(SimpleNamespace(**option))


# -- runs on real engines, against the plain loop

PRELOADED = LATE_IMPORTS
STEPS, ACCUMULATION, ROWS, CLIP = 6, 3, 6, 0.3


def make_model(dtype):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).to(dtype)


def make_optimizer(model):
    # Not Adam, whose steps hardly depend on how large gradients are.
    return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)


def batches(world):
    """One global batch for each backward: rows of a rank, how many of them count (also none) and their classes."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS * ACCUMULATION):
        x = torch.randn(world, ROWS, 5, generator=generator)
        counts = torch.randint(0, ROWS + 1, (world, 1), generator=generator)
        y = torch.randint(0, 3, (world, ROWS), generator=generator)
        yield x, y.masked_fill(torch.arange(ROWS) >= counts, -100)


def plain(world, dtype):
    """Weights and the norms before clipping of a loop whose gradient is the mean over each window's items.

    In bf16 the weights that train are fp32, as under DeepSpeed, and gradients are sums in fp32.
    """
    master, model = make_model(dtype).float(), make_model(dtype)
    optimizer = make_optimizer(master)
    window, norms = [], []
    for batch in batches(world):
        window.append(batch)
        if len(window) < ACCUMULATION:
            continue
        total = sum((y >= 0).sum() for _, y in window)
        for x, y in window:
            loss = nn.functional.cross_entropy(
                model(x.to(dtype)).flatten(0, 1).float(), y.flatten(), reduction="sum"
            )
            model.zero_grad()
            (loss / total).backward()
            for kept, used in zip(master.parameters(), model.parameters(), strict=True):
                kept.grad = used.grad.float() + (0 if kept.grad is None else kept.grad)
        norms.append(nn.utils.clip_grad_norm_(master.parameters(), CLIP).item())
        optimizer.step()
        optimizer.zero_grad()
        model.load_state_dict(master.state_dict())
        window = []
    return master.state_dict(), norms


def settings_of(stage, zero=None, **others):
    rows = {"train_micro_batch_size_per_gpu": ROWS}
    return config(stage, CLIP, {"reduce_bucket_size": 1000, **(zero or {})}, **rows, **others)


EXACT = {
    **{f"stage {stage}": settings_of(stage) for stage in (0, 1, 2, 3)},
    **{
        f"stage {stage}, offloaded": settings_of(stage, {"offload_optimizer": {"device": "cpu"}})
        for stage in (2, 3)
    },
}
HALF = {"bf16": {"enabled": True}}
IN_BF16 = {
    **{f"stage {stage} in bf16": settings_of(stage, **HALF) for stage in (0, 1, 2, 3)},
    "stage 1 in bf16, summed in fp32": settings_of(
        1, **HALF, data_types={"grad_accum_dtype": "fp32"}
    ),
}


@needs_deepspeed
@on_engine_ranks(2)
@pytest.mark.parametrize("case", [*EXACT, *IN_BF16])
def test_a_windows_gradient_is_the_mean_over_its_items(case):
    rough = case in IN_BF16
    dtype = torch.bfloat16 if rough else torch.float32
    settings = (EXACT | IN_BF16)[case]
    accelerator = fresh(
        DeepSpeedPlugin(hf_ds_config=settings), gradient_accumulation_steps=ACCUMULATION
    )
    expected, norms = plain(accelerator.num_processes, dtype)
    assert max(norms) > CLIP > min(norms), f"clipping would not be tested: {norms}"
    model = make_model(torch.float32)
    model, optimizer = accelerator.prepare(model, make_optimizer(model))
    reports_norm = settings["zero_optimization"]["stage"] > 0
    for number, (x, y) in enumerate(batches(accelerator.num_processes)):
        x, y = x[accelerator.process_index].to(dtype), y[accelerator.process_index]
        with accelerator.accumulate(model):
            items = (y >= 0).sum()
            loss = nn.functional.cross_entropy(model(x).float(), y, reduction="sum") / items.clamp(
                min=1
            )
            accelerator.backward(loss, num_items=items)
            if accelerator.sync_gradients and reports_norm:
                norm = float(accelerator.clip_grad_norm_(model.parameters(), CLIP))
                wanted = norms[number // ACCUMULATION]
                assert abs(norm - wanted) <= (0.03 if rough else 1e-5) * wanted, (
                    f"norm {norm}, not {wanted}"
                )
            optimizer.step()
            optimizer.zero_grad()
    saved = accelerator.prepared_model(model).checkpoint_state_dict()
    worst = (
        max((value - expected[name]).abs().max().item() for name, value in saved.items())
        if saved
        else 0.0
    )
    assert worst < (5e-3 if rough else 1e-6), f"off by {worst}"
    accelerator.free_memory()
