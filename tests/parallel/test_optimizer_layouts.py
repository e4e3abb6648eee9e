# SPDX-License-Identifier: Apache-2.0
"""Optimizers on models with parameters of all kinds, in every layout: the plain loop to 1e-8 (float64), or an error.

Each pair is trained, its state is compared, loaded into another run and compared again.
"""

import warnings

import pytest
import torch
import torch.distributed as dist
from layouts import compare
from states import reset_states
from torch import nn

from accelerate import Accelerator
from accelerate.config.fsdp import FullyShardedDataParallelPlugin as Plugin
from accelerate.config.training import DistributedDataParallelKwargs
from accelerate.parallelism_config import ParallelismConfig
from accelerate.state import PartialState

STEPS, BATCH, WIDTH, WORDS = 3, 8, 5, 11
UNITS = {
    "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "transformer_cls_names_to_wrap": ["Block", "Embedding"],
}


class Block(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.up = nn.Linear(WIDTH, hidden)
        self.down = nn.Linear(hidden, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    """Two blocks between an embedding and a head, with what a case adds."""

    def __init__(self, case):
        super().__init__()
        self.case = case
        self.embedding = nn.Embedding(WORDS, WIDTH, padding_idx=0 if case == "padding" else None)
        self.blocks = nn.ModuleList(Block(7 if case == "odd" else 6) for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if case == "tied":
            self.head.weight = self.embedding.weight
        if case in ("unused", "at times", "one rank"):
            self.extra = nn.Linear(WIDTH, WIDTH)
        if case == "frozen":
            self.blocks[0].up.weight.requires_grad_(False)
        if case == "number":
            self.scale = nn.Parameter(torch.tensor([0.7]))
        if case == "convolution":
            self.convolution = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        if case == "weight norm":
            nn.utils.parametrizations.weight_norm(self.head)

    def forward(self, ids, step, rank):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        if self.case == "at times" and step % 2:
            x = self.extra(x)
        if self.case == "one rank" and rank == 0:
            x = x + self.extra(x)
        if self.case == "number":
            x = x * self.scale
        if self.case == "convolution":
            x = self.convolution(x.transpose(1, 2)).transpose(1, 2)
        return self.head(x)


class Lamb(torch.optim.Optimizer):
    """A custom optimizer: each parameter's step has the length of its norm."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    ratio = float(parameter.norm()) / (float(parameter.grad.norm()) + 1e-9)
                    parameter.add_(parameter.grad, alpha=-group["lr"] * ratio)


class Lion(torch.optim.Optimizer):
    """A custom optimizer: element by element."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state.setdefault("mean", torch.zeros_like(parameter))
                    update = state["mean"].lerp_(parameter.grad, 0.1)
                    parameter.mul_(0.999).add_(torch.tanh(update * 100), alpha=-group["lr"])


def adafactor_of_transformers(parameters):
    optimization = pytest.importorskip("transformers.optimization")
    return optimization.Adafactor(
        parameters, lr=0.01, scale_parameter=True, relative_step=False, beta1=0.9
    )


ELEMENTWISE = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
    "Lion": lambda p: Lion(p, lr=0.01),
}
WHOLE = {
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.05),
    "transformers": adafactor_of_transformers,
    "Muon": lambda p: torch.optim.Muon([one for one in p if one.ndim == 2], lr=0.02),
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=1, max_iter=3, line_search_fn="strong_wolfe"),
    "Lamb": lambda p: Lamb(p, lr=0.01),
}
OPTIMIZERS = ELEMENTWISE | WHOLE
PAIRS = [
    *(("plain", name) for name in OPTIMIZERS),
    *(("unused", name) for name in ("AdamW", "LBFGS", "transformers")),
    *(("at times", name) for name in ("AdamW", "Adafactor")),
    ("one rank", "AdamW"), ("tied", "AdamW"), ("tied", "Muon"), ("frozen", "LBFGS"), ("frozen", "AdamW"),
    ("odd", "Adafactor"), ("odd", "Muon"), ("number", "AdamW"), ("convolution", "Adafactor"), ("weight norm", "AdamW"),
    ("padding", "AdamW"),
]  # fmt: skip


LAYOUTS = {"fsdp1": 2, "fsdp2": 2, "fsdp1 flat": 2, "ddp": 2, "tp": 2, "fsdp2 x tp": 4}
USUAL = ("fsdp1", "fsdp2")
CASES = [
    pytest.param(
        layout,
        nproc,
        case,
        marks=() if layout in USUAL and case != "unused" else pytest.mark.thorough,
    )
    for layout, nproc in LAYOUTS.items()
    for case in dict.fromkeys(case for case, _ in PAIRS)
    # Under these layouts all ranks must use the same parameters, under FSDP1 all of them in each step.
    if case != "one rank" or layout not in ("tp", "fsdp2 x tp", "fsdp2")
    if case not in ("one rank", "unused", "at times") or not layout.startswith("fsdp1")
]
pytestmark = pytest.mark.usefixtures("float64")


def make(case, name, seed=0):
    torch.manual_seed(seed)
    model = Model(case)
    return model, OPTIMIZERS[name]([p for p in model.parameters() if p.requires_grad])


def batches():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(WORDS, (2, BATCH, 4), generator=generator) for _ in range(STEPS)]


def loss_of(out, labels):
    return nn.functional.cross_entropy(out.flatten(0, 1), labels.flatten())


def train(model, optimizer, loss_and_backward):
    for number, (ids, labels) in enumerate(batches()):

        def closure(number=number, ids=ids, labels=labels):
            optimizer.zero_grad()
            return loss_and_backward(model, number, ids, labels)

        inner = getattr(optimizer, "optimizer", optimizer)
        if isinstance(inner, torch.optim.LBFGS):
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()


def plain(case, name, parts):
    model, optimizer = make(case, name)

    def loss_and_backward(model, number, ids, labels):
        losses = [
            loss_of(model(ids[rank::parts], number, rank), labels[rank::parts]) / parts
            for rank in range(parts)
        ]  # fmt: skip
        loss = torch.stack(losses).sum()
        loss.backward()
        return loss

    train(model, optimizer, loss_and_backward)
    return {
        key: value.detach().clone() for key, value in model.state_dict().items()
    }, optimizer.state_dict()


def start(layout):
    reset_states()
    world = dist.get_world_size()
    options = {
        "ddp": {"kwargs_handlers": [DistributedDataParallelKwargs(find_unused_parameters=True)]},
        "fsdp1": {"fsdp_plugin": Plugin(fsdp_version=1, use_orig_params=True, **UNITS)},
        "fsdp1 flat": {"fsdp_plugin": Plugin(fsdp_version=1, use_orig_params=False, **UNITS)},
        "fsdp2": {"fsdp_plugin": Plugin(fsdp_version=2, **UNITS)},
        "fsdp2 x tp": {
            "fsdp_plugin": Plugin(fsdp_version=2, **UNITS),
            "parallelism_config": ParallelismConfig(dp_shard_size=world // 2, tp_size=2)
            if world > 2
            else None,
        },
        "tp": {"parallelism_config": ParallelismConfig(tp_size=world)},
    }[layout]
    return Accelerator(cpu=True, **options)


def run(accelerator, case, name):
    """(the model's full state, the optimizer's, that of another optimizer it was loaded into)"""
    model, optimizer = accelerator.prepare(*make(case, name))
    part, parts = accelerator.strategy.data_shard
    rank = accelerator.process_index if parts > 1 else 0

    def loss_and_backward(model, number, ids, labels):
        loss = loss_of(model(ids[part::parts], number, rank), labels[part::parts])
        accelerator.backward(loss)
        return loss

    train(model, optimizer, loss_and_backward)
    state = accelerator.get_state_dict(model)
    own = accelerator.prepared_model(model).prepared_optimizer(optimizer.optimizer).state_dict()
    other_model, other = accelerator.prepare(*make(case, name, seed=3))
    prepared = accelerator.prepared_model(other_model)
    prepared.prepared_optimizer(other.optimizer).load_state_dict(own)
    return state, own, prepared.prepared_optimizer(other.optimizer).state_dict()


def is_refused(layout, case, name):
    """Text of the error of a layout that refuses a pair; None if it does not."""
    if layout.startswith("fsdp1") and name == "LBFGS":
        return "combines values of all its parameters"
    if layout.startswith("fsdp1") and name == "Adagrad":
        return "already has state"
    if layout == "fsdp1 flat" and case == "frozen":
        return "uniform `requires_grad`"
    if layout in ("tp", "fsdp2 x tp") and case == "odd":
        return "tp_size"
    return None


@pytest.mark.parametrize("layout, nproc, case", CASES)
def test_equal_or_refused(layout, nproc, case, ranks):
    ranks(nproc).run(check, layout, case)


def check(layout, case):
    warnings.simplefilter("ignore")
    PartialState(cpu=True)
    for name in (name for other, name in PAIRS if other == case):
        if layout.startswith("fsdp1") and name in (WHOLE.keys() | {"Lamb"}) - {"LBFGS"}:
            continue  # They need entire tensors: a warning.
        accelerator = start(layout)
        parts = accelerator.strategy.data_shard[1]
        message = is_refused(layout, case, name)
        if message:
            with pytest.raises(ValueError, match=message):
                run(accelerator, case, name)
            continue
        expected, state = plain(case, name, parts)
        found = run(accelerator, case, name)
        if accelerator.is_main_process:
            compare(found[0], expected, what=f"{name}: model")
            compare(found[1]["state"], state["state"], what=f"{name}: optimizer")
            compare(found[2]["state"], state["state"], what=f"{name}: loaded optimizer")
