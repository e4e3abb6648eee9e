# SPDX-License-Identifier: Apache-2.0
"""Optimizers of torch whose states are offloaded: DeepSpeed's own take their place."""

import sys
from types import ModuleType

import pytest
import torch
from deepspeed_runs import LATE_IMPORTS, fresh, needs_deepspeed, on_engine_ranks
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate.core.errors import PrepareError
from accelerate.utils import DeepSpeedPlugin
from accelerate.utils.deepspeed import map_pytorch_optim_to_deepspeed

PRELOADED = (*LATE_IMPORTS, "accelerate.parallel.deepspeed.engine")


class OfDeepSpeed(torch.optim.Optimizer):
    """DeepSpeed's classes compile C++ code. This one has their options, and does not step."""

    def __init__(self, groups, lr=1e-3, bias_correction=True, adamw_mode=None):
        super().__init__(groups, {"lr": lr, "bias_correction": bias_correction})
        self.adamw_mode = adamw_mode


class Lion(torch.optim.SGD):
    """A user's optimizer."""


@pytest.fixture
def stand_ins(monkeypatch):
    for package, name in (("adam", "Adam"), ("adagrad", "Adagrad"), ("lion", "Lion")):
        module = ModuleType(f"deepspeed.ops.{package}")
        setattr(module, f"DeepSpeedCPU{name}", type(name, (OfDeepSpeed,), {}))
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for parent in ("deepspeed", "deepspeed.ops"):
        monkeypatch.setitem(sys.modules, parent, ModuleType(parent))


@pytest.mark.parametrize(
    ("kind", "mapped", "decoupled"),
    [
        (torch.optim.AdamW, "Adam", True), (torch.optim.Adam, "Adam", False), (torch.optim.Adagrad, "Adagrad", None),
        (Lion, "Lion", None), (torch.optim.SGD, "SGD", None),
    ],
)  # fmt: skip
def test_the_groups_are_those_of_the_optimizer(stand_ins, recwarn, kind, mapped, decoupled):
    model = nn.Linear(3, 2)
    optimizer = kind(
        [{"params": [model.weight], "lr": 0.5}, {"params": [model.bias]}], lr=torch.tensor(0.25)
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    found = map_pytorch_optim_to_deepspeed(optimizer)
    scheduler.step()
    assert type(found).__name__ == mapped and getattr(found, "adamw_mode", None) is decoupled
    assert [group["lr"] for group in found.param_groups] == [0.25, 0.125]
    if found is not optimizer:
        assert not recwarn.list


@pytest.mark.parametrize("option", [{"amsgrad": True}, {"maximize": True}])
def test_an_option_without_counterpart_is_refused(stand_ins, option):
    optimizer = torch.optim.AdamW(nn.Linear(1, 1).parameters(), **option)
    with pytest.raises(
        PrepareError, match=rf"does not support {next(iter(option))}.*zero_force_ds_cpu_optimizer"
    ):
        map_pytorch_optim_to_deepspeed(optimizer)


def make(kind="AdamW"):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1)).float()
    groups = [
        {"params": [model[0].weight, model[2].weight]},
        {"params": [model[0].bias, model[2].bias]},
    ]
    groups[1]["weight_decay"] = 0.0
    options = {"betas": (0.8, 0.9)} if kind == "AdamW" else {}
    optimizer = getattr(torch.optim, kind)(groups, lr=0.05, eps=1e-3, weight_decay=0.3, **options)
    return (
        model,
        optimizer,
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9 ** (step // 2)),
    )


@pytest.mark.thorough
@needs_deepspeed
@on_engine_ranks(2, timeout=600)
@pytest.mark.parametrize(
    ("stage", "kind"), [(1, "AdamW"), (2, "AdamW"), (3, "AdamW"), (2, "Adagrad")]
)
@pytest.mark.timeout(600)
def test_matches_single_process(stage, kind):
    """In float32, which DeepSpeed's Adam computes in. The first run compiles it, in more than a minute."""
    x = torch.randn(48, 5, generator=torch.Generator().manual_seed(1))
    model, optimizer, scheduler = make(kind)
    for step in range(6):
        model(x[8 * step : 8 * step + 8]).square().mean().backward()
        optimizer.step()
        scheduler.step()
        scheduler.step()  # a prepared scheduler steps once for each process
        optimizer.zero_grad()
    expected = model.state_dict()
    accelerator = fresh(DeepSpeedPlugin(zero_stage=stage, offload_optimizer_device="cpu"))
    model, optimizer, scheduler, loader = accelerator.prepare(
        *make(kind), DataLoader(TensorDataset(x), 4)
    )
    for (batch,) in loader:
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    saved = accelerator.prepared_model(model).checkpoint_state_dict()
    if accelerator.is_main_process:
        for name, value in expected.items():
            torch.testing.assert_close(saved[name], value, rtol=1e-5, atol=1e-6)
