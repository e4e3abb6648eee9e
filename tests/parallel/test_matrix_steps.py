# SPDX-License-Identifier: Apache-2.0
"""Shared steps of matrix optimizers with all that a loop may do, against a plain loop of one process in float64."""

import copy
import math

import pytest
import torch
from layouts import compare, compare_state
from newton_schulz import WIDTH, Model, Orthogonal, batches, loss_of, make, shapes, start
from rank_pool import on_ranks
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate.config.precision import GradScalerKwargs
from accelerate.config.training import DistributedDataParallelKwargs
from accelerate.parallel.gradients import AgreeingScaler
from accelerate.parallel.matrices import register_matrix_optimizer, shared_step_of
from accelerate.utils import DataLoaderConfiguration

pytestmark = pytest.mark.usefixtures("float64")
WINDOW, LIMIT = 3, 0.5
# The loss of the one sample is not finite. The gradients of the other overflow when the loss is scaled.
WEIGHTS = {15: math.inf, 26: 1e306}
SIZE, GLOBAL_BATCH = 45, 4
SKIPPED = [False, True, True, False]


def samples():
    generator = torch.Generator().manual_seed(1)
    weights = torch.ones(SIZE)
    for number, weight in WEIGHTS.items():
        weights[number] = weight
    return TensorDataset(torch.randn(SIZE, WIDTH, generator=generator), weights)


def weighted_loss(model, x, weights):
    return ((model(x) - x[:, :3].cos()).square().mean(1) * weights).mean()


def schedules_of(optimizers):
    """They change the learning rates and the momenta of all groups."""
    schedules = []
    for optimizer in optimizers:
        rates = [group["lr"] for group in optimizer.param_groups]
        schedules.append(torch.optim.lr_scheduler.OneCycleLR(optimizer, rates, 8, div_factor=2.0))
    return schedules


def plain_steps(mixed):
    model, optimizers = make(mixed=mixed)
    schedules = schedules_of(optimizers)
    size = WINDOW * GLOBAL_BATCH
    for _ in range(2):
        for number, is_skipped in enumerate(SKIPPED):
            if is_skipped:
                continue
            x, weights = samples()[number * size : (number + 1) * size]
            weighted_loss(model, x, weights).backward()
            nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
            for optimizer, schedule in zip(optimizers, schedules, strict=True):
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
    return model, optimizers


def check_skipped_steps(layout, mixed):
    """fp16's scaler and `non_finite` leave steps out. Windows and batches are uneven, norms are clipped."""
    expected, plain_optimizers = plain_steps(mixed)
    scaling = GradScalerKwargs(init_scale=2.0**10, growth_interval=2)
    options = {"mixed_precision": "fp16", "kwargs_handlers": [scaling]}
    if "fsdp" in layout:
        # FSDP2 would cast the parameters to fp16.
        options = {}
    accelerator = start(
        layout,
        exact=True,
        non_finite="skip",
        gradient_accumulation_steps=WINDOW,
        dataloader_config=DataLoaderConfiguration(split_batches=True),
        **options,
    )
    if "fsdp" in layout:
        scaler = torch.amp.GradScaler("cpu", **scaling.to_kwargs())
        accelerator.scaler = AgreeingScaler(scaler, accelerator.device)
    model, optimizers = make(mixed=mixed)
    loader = DataLoader(samples(), batch_size=GLOBAL_BATCH)
    prepared = accelerator.prepare(model, loader, *optimizers, *schedules_of(optimizers))
    model, loader = prepared[:2]
    optimizers = prepared[2 : 2 + len(optimizers)]
    schedules = prepared[2 + len(optimizers) :]
    skipped = []
    for _ in range(2):
        for x, weights in loader:
            with accelerator.accumulate(model):
                accelerator.backward(weighted_loss(model, x, weights))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), LIMIT)
                for optimizer, schedule in zip(optimizers, schedules, strict=True):
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad(set_to_none=False)
            if accelerator.sync_gradients:
                skipped.append(optimizers[0].step_was_skipped)
    assert skipped == 2 * SKIPPED, layout
    assert shared_step_of(optimizers[0].optimizer) is not None
    compare_state(accelerator, model, expected.state_dict(), 1e-10, f"{layout}: model")
    for optimizer, plain in zip(optimizers, plain_optimizers, strict=True):
        state = accelerator.prepared_model(model).prepared_optimizer(optimizer).state_dict()
        compare(state.get("state", {}), plain.state_dict()["state"], 1e-10, f"{layout}: state")


def check_items(layout):
    """Gradients are means over the items of a window, of which each rank and each batch has another number."""
    accelerator = start(layout, gradient_accumulation_steps=WINDOW)
    model, optimizers = make()
    model, optimizer = accelerator.prepare(model, *optimizers)
    part, parts = accelerator.strategy.data_shard
    plain, (plain_optimizer,) = make()
    counts = (5, 7, 3, 8, 3, 5)
    rows = []
    for x, count in zip(batches(len(counts)), counts, strict=True):
        rows.append(x[:count])
        shard = x[:count][part::parts]
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, shard), num_items=len(shard))
            optimizer.step()
            optimizer.zero_grad()
        if len(rows) == WINDOW:
            loss_of(plain, torch.cat(rows)).backward()
            plain_optimizer.step()
            plain_optimizer.zero_grad()
            rows = []
    compare_state(accelerator, model, plain.state_dict(), 1e-10, f"{layout}: items")


class Branching(Model):
    """Has a layer that some of its forwards do not use."""

    def __init__(self):
        super().__init__()
        self.branch = nn.Linear(WIDTH, WIDTH)
        self.uses_branch = True

    def forward(self, x):
        if self.uses_branch:
            x = x + self.branch(x)
        return super().forward(x)


def train_branches(model, inner, optimizer, backward, set_to_none):
    """Steps in which some parameters have no gradient, are unfrozen, and come in a new group."""
    for number, x in enumerate(batches(6)):
        inner.uses_branch = number % 2 == 0
        if number == 3:
            inner.odd.weight.requires_grad_(True)
        if number == 4:
            late = [inner.blocks[2].up.weight, inner.blocks[2].down.weight]
            optimizer.add_param_group({"params": late, "lr": 0.05, "aux": False})
        backward(model, x)
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)


def check_branches(layout, set_to_none):
    def make_branching():
        torch.manual_seed(0)
        model = Branching()
        model.odd.weight.requires_grad_(False)
        early = [model.branch.weight, model.blocks[0].up.weight, model.odd.weight]
        groups = [{"params": early}, {"params": [model.branch.bias], "aux": True}]
        return model, Orthogonal(groups)

    plain, optimizer = make_branching()
    train_branches(
        plain, plain, optimizer, lambda model, x: loss_of(model, x).backward(), set_to_none
    )
    accelerator = start(
        layout, kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)]
    )
    part, parts = accelerator.strategy.data_shard
    model, optimizer = accelerator.prepare(*make_branching())

    def backward(model, x):
        accelerator.backward(loss_of(model, x[part::parts]))

    train_branches(model, accelerator.unwrap_model(model), optimizer, backward, set_to_none)
    what = f"{layout}, set_to_none={set_to_none}"
    compare_state(accelerator, model, plain.state_dict(), 1e-10, what)


def check_compiled(layout):
    plain, (plain_optimizer,) = make()
    accelerator = start(layout)
    part, parts = accelerator.strategy.data_shard
    model, optimizers = make()
    model = torch.compile(model, backend="eager")
    model, optimizer = accelerator.prepare(model, *optimizers)
    for x in batches():
        loss_of(plain, x).backward()
        plain_optimizer.step()
        plain_optimizer.zero_grad()
        accelerator.backward(loss_of(model, x[part::parts]))
        optimizer.step()
        optimizer.zero_grad()
    compare_state(accelerator, model, plain.state_dict(), 1e-10, f"{layout}: compiled")


class Unregistered(Orthogonal):
    """Every rank computes all of its step, which is not that of the registered class."""

    def step(self, closure=None):
        return super().step(closure)


def check_half_precision(layout):
    """Of bfloat16 parameters the result is, bit by bit, that of a step that is not shared."""
    states = []
    for kind in (Orthogonal, Unregistered):
        accelerator = start(layout)
        part, parts = accelerator.strategy.data_shard
        torch.manual_seed(0)
        model = Model().bfloat16()
        optimizer = kind([p for p in model.parameters() if p.ndim == 2])
        model, optimizer = accelerator.prepare(model, optimizer)
        for x in batches():
            accelerator.backward(loss_of(model, x[part::parts].bfloat16()))
            optimizer.step()
            optimizer.zero_grad()
        assert (shared_step_of(optimizer.optimizer) is None) == (kind is Unregistered)
        state = accelerator.prepared_model(model).prepared_optimizer(optimizer).state_dict()
        states.append(copy.deepcopy((accelerator.get_state_dict(model), state.get("state"))))
    torch.testing.assert_close(states[0], states[1], rtol=0, atol=0)


@on_ranks(2)
def test_all_that_a_loop_may_do():
    register_matrix_optimizer(Orthogonal, shapes)
    for layout in ("ddp", "fsdp", "tp"):
        for mixed in (True, False):
            check_skipped_steps(layout, mixed)
        check_items(layout)
        for set_to_none in (True, False):
            check_branches(layout, set_to_none)
        check_half_precision(layout)
        if layout != "tp":
            check_compiled(layout)


@on_ranks(4)
def test_skipped_steps_and_items_on_meshes_of_two_dimensions():
    register_matrix_optimizer(Orthogonal, shapes)
    for layout in ("fsdp x tp", "pp", "pp x fsdp"):
        check_skipped_steps(layout, mixed=True)
        check_items(layout)
