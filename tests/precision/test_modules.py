# SPDX-License-Identifier: Apache-2.0
"""Modules that compute in another dtype than the rest of their model, against a plain loop that does it by hand."""

import copy
import logging

import pytest
import torch
from layouts import sharded_by_size
from rank_pool import on_ranks
from states import reset_states
from torch import nn
from torch.nn.functional import mse_loss

from accelerate import Accelerator, ParallelismConfig
from accelerate.core.errors import ConfigurationError, PrepareError

RATE, STEPS = 0.05, 4
POLICY = {"*norm*": torch.float32, "*.head.*": torch.float32}


class Norm(nn.Module):
    """Notes what it computes in."""

    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.dtypes = set()

    def forward(self, x, *, scale=1.0):
        y = x * torch.rsqrt(
            (x @ x.mT).diagonal(dim1=-2, dim2=-1).mean(-1, keepdim=True)[..., None] + 1e-6
        )
        self.dtypes.add((x.dtype, self.weight.dtype, (x @ x.mT).dtype))
        return y * self.weight * scale


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = Norm(8)
        self.linear = nn.Linear(8, 8)
        self.dtypes = set()

    def forward(self, x):
        y = self.linear(self.norm(x, scale=0.5))
        self.dtypes.add(y.dtype)
        return x + torch.tanh(y)


class Model(nn.Module):
    def __init__(self, by_hand=False):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.end = nn.ModuleDict(
            {"head": nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 1))}
        )
        self.by_hand = by_hand

    def forward(self, x):
        x = x.unsqueeze(0)
        for block in self.blocks:
            x = block(x)
        if self.by_hand:
            with torch.autocast("cpu", enabled=False):
                return self.end["head"](x.float())
        return self.end["head"](x)


def make(**options):
    torch.manual_seed(0)
    return Model(**options)


def data():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(STEPS, 8, 8, generator=generator), torch.randn(
        STEPS, 1, 8, 1, generator=generator
    )


def plain_losses():
    model = make(by_hand=True)
    for block in model.blocks:
        norm = block.norm

        def in_fp32(x, forward=norm.forward, **others):
            with torch.autocast("cpu", enabled=False):
                return forward(x.float(), **others)

        norm.forward = in_fp32
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=RATE), []
    for x, y in zip(*data(), strict=True):
        with torch.autocast("cpu", torch.bfloat16):
            output = model(x)
        loss = mse_loss(output.float(), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def losses_of(accelerator, model, optimizer):
    losses = []
    for x, y in zip(*data(), strict=True):
        loss = mse_loss(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@on_ranks(1, 2)
@pytest.mark.parametrize("layout", ["replicas", "fsdp", "fsdp, recomputed"])
def test_matches_the_loop_by_hand(layout, nproc):
    logging.disable(logging.WARNING)
    options = (
        {}
        if layout == "replicas"
        else sharded_by_size(2, activation_checkpointing="recomputed" in layout)
    )
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", precision_policy=POLICY, **options)
    model = make()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=RATE))
    losses = losses_of(accelerator, model, optimizer)
    # FSDP2 casts the inputs and outputs of its units, and reduces gradients, in bf16.
    exact = layout == "replicas" or (layout == "fsdp" and nproc == 1)
    torch.testing.assert_close(losses, plain_losses(), rtol=1e-6 if exact else 5e-3, atol=0)
    inner = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    for module in inner.modules():
        if isinstance(module, Norm):
            assert module.dtypes == {(torch.float32,) * 3}
            assert not {"forward", "_original_forward"} & set(vars(module))
        elif isinstance(module, Block):
            assert module.dtypes == {torch.bfloat16}
    assert all(parameter.dtype is torch.float32 for parameter in inner.parameters())


def test_weights_of_half_precision_and_copies():
    accelerator = Accelerator(
        cpu=True, mixed_precision="bf16", precision_policy={"blocks.*.norm": "fp32"}
    )
    model = make().bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    model, optimizer = accelerator.prepare(model, optimizer)
    x = data()[0][0]
    model(x).sum().backward()
    assert {str(p.dtype) for n, p in model.named_parameters() if "norm" in n} == {"torch.float32"}
    assert model.blocks[0].linear.weight.dtype is torch.bfloat16
    copied = copy.deepcopy(model)
    with torch.no_grad():
        copied.blocks[0].norm.weight.zero_()
        assert not torch.equal(copied(x), model(x)), "the copy has its own norm"


def test_the_first_pattern_counts_and_inner_modules_may_differ():
    policy = {"blocks.0.*": "bf16", "blocks": torch.float32}
    accelerator = Accelerator(cpu=True, mixed_precision="fp16", precision_policy=policy)
    model = accelerator.prepare(make())
    model(data()[0][0])
    inside = [block.dtypes for block in model.blocks]
    assert inside == [{torch.bfloat16}, {torch.float32}]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mixed_precision": "no"}, "precision_policy needs mixed_precision"),
        (
            {"precision_policy": {"*norm*": torch.int8}},
            r"precision_policy\['\*norm\*'\]=torch.int8",
        ),
        ({"precision_policy": {"*norm*": "fp16"}}, "needs mixed_precision='fp16'"),
    ],
)
def test_what_cannot_be_requested_is_refused(options, message):
    with pytest.raises(ConfigurationError, match=message):
        Accelerator(cpu=True, **({"mixed_precision": "bf16", "precision_policy": POLICY} | options))


@on_ranks(2)
def test_what_a_layout_cannot_do_is_refused(nproc):
    accelerator = Accelerator(
        cpu=True, mixed_precision="bf16", precision_policy=POLICY, **sharded_by_size(2)
    )
    with pytest.raises(PrepareError, match="precision_policy: no module of Linear"):
        accelerator.prepare(nn.Linear(2, 2))
    model = make()
    model.blocks[0].norm.weight = model.blocks[0].linear.bias
    with pytest.raises(PrepareError, match=r"precision_policy: blocks\.0\.norm shares a parameter"):
        accelerator.prepare(model)
    reset_states()
    with pytest.raises(ConfigurationError, match="precision_policy works on"):
        Accelerator(
            cpu=True,
            mixed_precision="bf16",
            precision_policy=POLICY,
            parallelism_config=ParallelismConfig(tp_size=2),
        )
