# SPDX-License-Identifier: Apache-2.0
"""Copies and running averages of a prepared model (EMA, SWA), against the plain loop in float64."""

import copy

import pytest
import torch
from cases import cases
from layouts import sharded
from rank_pool import on_ranks
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from accelerate import Accelerator
from accelerate.config.parallel import TorchTensorParallelConfig
from accelerate.core.errors import PrepareError
from accelerate.parallelism_config import ParallelismConfig
from accelerate.state import AcceleratorState, GradientState, PartialState

pytestmark = pytest.mark.usefixtures("float64")
PLAN = {"blocks.*.0": "colwise", "blocks.*.2": "rowwise"}


class Net(nn.Module):
    """Tied weights, a buffer that changes in training, and a frozen layer."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)) for _ in range(3))
        self.blocks[1].requires_grad_(False)
        self.head = nn.Linear(4, 4)
        self.again = nn.Linear(4, 4)
        self.again.weight = self.head.weight
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x):
        if self.training:
            self.seen.add_(0.5)
        for block in self.blocks:
            x = x + block(x)
        return self.again(torch.tanh(self.head(x))) + self.seen


def split(**sizes):
    return {
        "parallelism_config": ParallelismConfig(tp_size=2, tp_handler=TorchTensorParallelConfig(plan=PLAN), **sizes)
    }


LAYOUTS = {
    "ddp": dict,
    "fsdp2": lambda: sharded(2),
    "fsdp2, kept": lambda: sharded(2, reshard_after_forward=False),
    "fsdp2, checkpointed": lambda: sharded(2, activation_checkpointing=True),
    "fsdp2, ignored": lambda: sharded(2, ignored_modules="blocks.0"),
    "fsdp1": lambda: sharded(1),
    "fsdp1, flat": lambda: sharded(1, use_orig_params=False),
    "tp": split,
    "hsdp": lambda: sharded(2) | {"parallelism_config": ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)},
    "fsdp2 and tp": lambda: sharded(2) | split(dp_shard_size=2),
}


class Averages:
    """What users keep: torch's EMA and SWA, a copy that they update by hand, and a list of clones (as diffusers)."""

    def __init__(self, model, reshard=None):
        self.reshard = reshard
        self.ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
        self.swa = AveragedModel(model)
        self.copy = copy.deepcopy(model).eval().requires_grad_(False)
        self.clones = [p.clone().detach() for p in model.parameters()]

    @torch.no_grad()
    def update(self, model):
        self.ema.update_parameters(model)
        self.swa.update_parameters(model)
        for mine, present in zip(self.copy.parameters(), model.parameters(), strict=True):
            mine.lerp_(present, 0.3)
        for mine, present in zip(self.clones, model.parameters(), strict=True):
            mine.sub_(0.2 * (mine - present))

    @torch.no_grad()
    def values(self, model, x):
        """The forward of each average, and the parameters."""
        with torch.inference_mode():
            self.ema.eval()(x)
        found = {"ema forward": self.ema.eval()(x), "swa forward": self.swa.eval()(x), "copy forward": self.copy(x)}
        # As diffusers: store, copy_to, restore.
        stored = [p.detach().clone() for p in model.parameters()]
        for parameter, mine in zip(model.parameters(), self.clones, strict=True):
            parameter.data.copy_(mine.data)
        found["clones forward"] = model.eval()(x)
        if self.reshard is not None:
            self.reshard()
        for parameter, mine in zip(model.parameters(), stored, strict=True):
            parameter.data.copy_(mine.data)
        for name, module in (("ema", self.ema), ("swa", self.swa), ("copy", self.copy)):
            found[name] = [p.full_tensor() if isinstance(p, DTensor) else p for p in module.parameters()]
        return found


def make():
    torch.manual_seed(0)
    model = Net()
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)


def batches(shards):
    generator = torch.Generator().manual_seed(1)
    return [[torch.randn(4, 4, generator=generator) for _ in range(shards)] for _ in range(4)]


def train(model, optimizer, averages, batch, backward):
    optimizer.zero_grad()
    model.train()
    backward(batch, model)
    optimizer.step()
    averages.update(model)


def plain_backward(batch, model):
    before = model.seen.clone()
    for x in batch:
        model.seen.copy_(before)
        (model(x).square().mean() / len(batch)).backward()


def check(name):
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    run = Accelerator(cpu=True, **LAYOUTS[name]())
    model, optimizer = run.prepare(*make())
    index, shards = run.strategy.data_shard
    # Where units are kept unsharded on request, they are also after an evaluation.
    averages = Averages(model, run.prepared_model(model).reshard if "kept" in name else None)
    expected, plain = make()
    wanted = Averages(expected)
    for parts in batches(shards):
        train(model, optimizer, averages, parts[index], lambda x, model: run.backward(model(x).square().mean()))
        train(expected, plain, wanted, parts, plain_backward)
        x = parts[0]
        ours, theirs = averages.values(model, x), wanted.values(expected, x)
        for key, value in theirs.items():
            torch.testing.assert_close(ours[key], value, rtol=0, atol=1e-8, msg=lambda m, key=key: f"{key}: {m}")


@on_ranks(2)
@pytest.mark.parametrize(
    "name",
    cases(
        ["ddp", "fsdp2", "fsdp2, kept", "fsdp2, checkpointed", "fsdp2, ignored", "tp"],
        thorough=["fsdp2, checkpointed", "fsdp2, ignored"],
    ),
)
def test_averages_equal_the_plain_loop(name):
    check(name)


@pytest.mark.thorough
@on_ranks(4)
@pytest.mark.parametrize("name", ["hsdp", "fsdp2 and tp"])
def test_averages_on_two_meshes(name):
    check(name)


@on_ranks(2)
@pytest.mark.parametrize("name", ["fsdp1", "fsdp1, flat"])
def test_fsdp1_names_the_remedy(name):
    run = Accelerator(cpu=True, **LAYOUTS[name]())
    model, _ = run.prepare(*make())
    with pytest.raises(PrepareError, match="fsdp_version=2"):
        AveragedModel(model)


@on_ranks(2)
@pytest.mark.parametrize("size", ["cp_size", "sp_size"])
def test_copies_of_models_with_split_sequences(size):
    run = Accelerator(cpu=True, parallelism_config=ParallelismConfig(**{size: 2}))
    model, _ = run.prepare(*make())
    x = batches(1)[0][0]
    assert torch.equal(copy.deepcopy(model).eval()(x), model.eval()(x))


@on_ranks(2)
@pytest.mark.parametrize("layout", cases(["native", "compat"], thorough=["compat"]))
@pytest.mark.parametrize("name", ["fsdp2", "tp"])
def test_registered_average_is_saved_and_loaded(name, layout, tmp_path):
    run = Accelerator(cpu=True, **LAYOUTS[name]())
    model, optimizer = run.prepare(*make())
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    run.register_for_checkpointing(ema)
    x = batches(1)[0][0]
    ema.update_parameters(model)
    run.backward(model(x).square().mean())
    optimizer.step()
    ema.update_parameters(model)
    wanted = ema.eval()(x).detach().clone()
    run.save_state(str(tmp_path), layout=layout)
    with torch.no_grad():
        for parameter in ema.parameters():
            parameter.zero_()
    run.load_state(str(tmp_path))
    torch.testing.assert_close(ema(x), wanted, rtol=0, atol=0)
    assert ema.n_averaged == 2


def mean_teacher(prepare, backward, rows):
    """A frozen teacher that is prepared as well, and follows the student after each step."""
    student, teacher = (nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)) for _ in range(2))
    teacher.load_state_dict(student.state_dict())
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
    student, teacher, optimizer = prepare(student, teacher.requires_grad_(False), optimizer)
    for number, x in enumerate(rows):
        with torch.set_grad_enabled(number % 2 == 0):
            target = teacher(x)
        output = student(x)
        backward((output - target).square().mean() + output.square().mean())
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for mine, present in zip(teacher.parameters(), student.parameters(), strict=True):
                mine.lerp_(present.detach(), 0.5)
    return student, teacher


@on_ranks(2)
@pytest.mark.parametrize("name", ["fsdp1", "fsdp1, flat", "fsdp2"])
def test_a_prepared_teacher_follows_its_student(name):
    data = torch.randn(6, 8, 4, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    expected = mean_teacher(lambda *objects: objects, torch.Tensor.backward, data)
    run = Accelerator(cpu=True, **LAYOUTS[name]())
    torch.manual_seed(0)
    found = mean_teacher(run.prepare, run.backward, [x.chunk(2)[run.process_index] for x in data])
    for model, plain in zip(found, expected, strict=True):
        state = run.get_state_dict(model)
        if run.is_main_process:
            torch.testing.assert_close(state, plain.state_dict(), rtol=1e-10, atol=1e-10)
