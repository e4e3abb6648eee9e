# SPDX-License-Identifier: Apache-2.0
"""Steps that are left out since a loss or a gradient is not finite, against the plain loop without them in float64."""

import logging
import math
import pickle
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from layouts import sharded_by_size
from rank_pool import on_ranks
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator, DataLoaderConfiguration, DeepSpeedPlugin, ParallelismConfig
from accelerate.core.errors import ConfigurationError, NonFiniteError, PrepareError
from accelerate.core.imports import is_available

sys.path.append(str(Path(__file__).parents[2] / "examples" / "parallel"))
from llama import Llama, LlamaConfig

CONFIG = LlamaConfig(vocabulary=16, width=16, hidden=24, layers=2)
BATCH, ACCUMULATION = 8, 2
LAYOUTS = {
    "data": dict,
    "fsdp": lambda: sharded_by_size(2),
    "tensor": lambda: {"parallelism_config": ParallelismConfig(tp_size=2)},
    "pipeline": lambda: {"parallelism_config": ParallelismConfig(pp_size=2)},
}
# Samples whose loss is not finite, and one (20) whose loss is finite and its gradient not; the third window has none.
BAD = {3: math.nan, 20: 2.0, 53: math.inf, 70: math.nan}


def data(size):
    generator = torch.Generator().manual_seed(1)
    weights = torch.ones(size, dtype=torch.float64)
    for index, weight in BAD.items():
        weights[index] = weight
    return TensorDataset(torch.randint(CONFIG.vocabulary, (size, 7), generator=generator), weights)


def make():
    torch.manual_seed(0)
    model = Llama(CONFIG)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)


def loss_of(model, tokens, weights):
    losses = F.cross_entropy(
        model(tokens[:, :-1]).transpose(1, 2), tokens[:, 1:], reduction="none"
    ).mean(1)
    # The derivative of a root at 0 is infinite.
    roots = (losses[weights == 2] * 0).abs().sqrt().sum()
    return (losses * torch.where(weights == 2, 1.0, weights)).mean() + roots


def plain_run(size):
    """The parameters after each window, and whether it was left out."""
    (model, optimizer, scheduler), history = make(), []
    batches = list(DataLoader(data(size), batch_size=BATCH))
    for start in range(0, len(batches), ACCUMULATION):
        tokens, weights = (
            torch.cat(parts) for parts in zip(*batches[start : start + ACCUMULATION], strict=True)
        )
        is_bad = not bool((weights == 1).all())
        if not is_bad:
            loss_of(model, tokens, weights).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        history.append(({name: p.detach().clone() for name, p in model.named_parameters()}, is_bad))
    return history


@on_ranks(1, 2, 4)
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("exact", [False, True])
def test_a_step_is_left_out_on_all_ranks(exact, nproc):
    check("data", exact, nproc)


@on_ranks(2)
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("layout", ["fsdp", "tensor", "pipeline"])
def test_a_step_is_left_out_on_all_parts_of_a_model(layout, nproc):
    check(layout, False, nproc)


def check(layout, exact, nproc):
    notes = []
    handler = logging.Handler()
    handler.emit = lambda record: notes.append(record.getMessage())
    logging.getLogger("accelerate.run.non_finite").addHandler(handler)
    size = 77 if exact else 80
    config = DataLoaderConfiguration(split_batches=True)
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=ACCUMULATION, dataloader_config=config, exact=exact,
        non_finite="skip", non_finite_limit=3, **LAYOUTS[layout](),
    )  # fmt: skip
    model, optimizer, scheduler = make()
    loader = DataLoader(data(size), batch_size=BATCH)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    expected = iter(plain_run(size))
    for tokens, weights in loader:
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, tokens, weights))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.3)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            values, is_bad = next(expected)
            assert accelerator.optimizer_step_was_skipped is is_bad
            state = accelerator.get_state_dict(model)
            for name, value in state.items() if accelerator.is_main_process else ():
                torch.testing.assert_close(value, values[name], rtol=0, atol=1e-8)
    assert next(expected, None) is None
    if accelerator.is_main_process:
        assert (
            len(notes) == 4
            and all("loss is " in notes[at] for at in (0, 2, 3))
            and "inf" in notes[2]
        )
        assert "in batch 2 of epoch 0: " in notes[0]
        assert "loss" not in notes[1] and "gradient of " in notes[1] and ".weight" in notes[1]
        if layout == "data" and nproc == 2 and not exact:
            # Batches are cut: the fourth sample is rank 0's, and the last of the second batch of its window rank 1's.
            assert (
                "on rank 0" in notes[0] and "on rank 1" in notes[2] and "on ranks 0, 1" in notes[1]
            )


# Samples whose loss is not finite: in steps in a row, and for both models in one batch.
BAD_CRITIC, BAD_GENERATOR = {3: math.nan, 13: math.inf, 33: math.nan}, {21: math.inf, 38: math.nan}


def two_models():
    torch.manual_seed(0)
    generator = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    critic = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    return (
        generator,
        critic,
        *(torch.optim.Adam(model.parameters(), lr=0.05) for model in (critic, generator)),
    )


def samples_of_two():
    weights = torch.ones(2, 48, 1)
    for row, bad in zip(weights, (BAD_CRITIC, BAD_GENERATOR), strict=True):
        for index, weight in bad.items():
            row[index] = weight
    return TensorDataset(torch.randn(48, 3, generator=torch.Generator().manual_seed(1)), *weights)


def critic_loss(generator, critic, real, weights):
    with torch.no_grad():
        made = generator(real[:, :2])
    real_scores, made_scores = critic(torch.cat([real, made])).chunk(2)
    return (weights * (F.softplus(-real_scores) + F.softplus(made_scores))).mean()


def generator_loss(generator, critic, real, weights):
    return (weights * F.softplus(-critic(generator(real[:, :2])))).mean()


@on_ranks(1, 2)
@pytest.mark.usefixtures("float64")
def test_two_optimizers_leave_out_their_own_steps(nproc):
    """A loop of a GAN: what one loss left in the gradients and in the guard does not leave out the other's step."""
    plain = two_models()
    accelerator = Accelerator(
        cpu=True, non_finite="skip", dataloader_config=DataLoaderConfiguration(split_batches=True)
    )
    *prepared, loader = accelerator.prepare(
        *two_models(), DataLoader(samples_of_two(), batch_size=8)
    )
    for batch, here in zip(DataLoader(samples_of_two(), batch_size=8), loader, strict=True):
        real, *weights = batch
        for number, loss_of in enumerate((critic_loss, generator_loss)):
            is_bad = not bool((weights[number] == 1).all())
            plain[2 + number].zero_grad()
            loss_of(*plain[:2], real, weights[number]).backward()
            if not is_bad:
                plain[2 + number].step()
            prepared[2 + number].zero_grad()
            accelerator.backward(loss_of(*prepared[:2], here[0], here[1 + number]))
            prepared[2 + number].step()
            assert prepared[2 + number].step_was_skipped is is_bad
            for model, expected in zip(prepared[:2], plain[:2], strict=True):
                for value, wanted in zip(model.parameters(), expected.parameters(), strict=True):
                    torch.testing.assert_close(value, wanted, rtol=0, atol=1e-8)


ONES = torch.ones(2, 4, dtype=torch.float32)


def build(**options):
    accelerator = Accelerator(cpu=True, **options)
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1, dtype=torch.float32)
    return accelerator, *accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


@on_ranks(1, 2)
@pytest.mark.parametrize("how", ["raise", "skip"])
def test_the_end_of_a_run(how, nproc):
    accelerator, model, optimizer = build(non_finite=how, non_finite_limit=3)
    before = model.state_dict()["module.weight" if nproc > 1 else "weight"].clone()
    rank, steps, on = accelerator.process_index, 0, " on rank 1" if nproc > 1 else ""
    with pytest.raises(
        NonFiniteError, match=f"the loss is nan{on}; the gradient of weight"
    ) as raised:
        for _ in range(9):
            factor = math.nan if rank == nproc - 1 else 1.0
            accelerator.backward(model(ONES).sum() * factor)
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
    assert steps == (0 if how == "raise" else 2) and ("2 before it" in str(raised.value)) is (
        how == "skip"
    )
    torch.testing.assert_close(next(model.parameters()).detach(), before)
    # The next step has finite gradients.
    optimizer.zero_grad()
    accelerator.backward(model(ONES).sum())
    optimizer.step()
    assert not optimizer.step_was_skipped


@on_ranks(1, 2)
def test_with_the_scaler_of_fp16(nproc):
    accelerator, model, optimizer = build(
        non_finite="skip", mixed_precision="fp16", non_finite_limit=2
    )
    skipped = []
    # A loss that is not finite, gradients that overflow twice, which is the scaler's matter, and a good step.
    for factor in (math.inf, 1e36, 1e36, 1.0):
        accelerator.backward(model(ONES).sum() * factor)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        skipped.append(optimizer.step_was_skipped)
        optimizer.zero_grad()
    assert skipped == [True, True, True, False]
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())


def test_a_mean_over_no_items_is_no_loss():
    accelerator, model, optimizer = build(non_finite="raise", gradient_accumulation_steps=2)
    for targets in ([-100, -100], [1, 0]):
        with accelerator.accumulate(model):
            logits = torch.cat([model(ONES)] * 2, 1)
            targets = torch.tensor(targets)
            accelerator.backward(
                F.cross_entropy(logits, targets), num_items=(targets != -100).sum()
            )
            optimizer.step()
    assert not optimizer.step_was_skipped


def test_what_cannot_leave_a_step_out_is_refused():
    for options, field in (
        ({"non_finite": "skipp"}, "non_finite='skipp'"),
        ({"non_finite": "skip", "non_finite_limit": 0}, "non_finite_limit=0"),
    ):
        with pytest.raises(ConfigurationError, match=field):
            Accelerator(cpu=True, **options)
    accelerator, model, optimizer = build(non_finite="skip")
    with pytest.raises(PrepareError, match="closure"):
        optimizer.step(lambda: model(ONES).sum())
    fused = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    fused.fused_backward = None
    with pytest.raises(PrepareError, match="non_finite: SGD"):
        accelerator.prepare(fused)
    # Another process has the options.
    copied = pickle.loads(pickle.dumps(accelerator))
    with pytest.raises(PrepareError, match="closure"):
        copied.prepare(optimizer.optimizer).step(lambda: model(ONES).sum())


@pytest.mark.skipif(not is_available("deepspeed"), reason="deepspeed is not installed")
def test_deepspeed_is_refused():
    with pytest.raises(ConfigurationError, match="non_finite='skip': DeepSpeed"):
        Accelerator(cpu=True, non_finite="skip", deepspeed_plugin=DeepSpeedPlugin(zero_stage=1))


def test_nothing_is_looked_at_by_default(caplog):
    accelerator, model, optimizer = build()
    accelerator.backward(model(ONES).sum() * math.nan)
    optimizer.step()
    assert torch.isnan(model.weight).all() and not optimizer.step_was_skipped
    assert not any(
        "left out" in r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING
    )
