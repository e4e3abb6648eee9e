# SPDX-License-Identifier: Apache-2.0
"""Programs that train another model in a layout than on one process: each is found, with what differs first."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import certified
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, default_collate

from accelerate import Accelerator
from accelerate.certify.certificate import DIRECTIONS
from accelerate.parallel.context import region
from accelerate.parallel.pipeline import buffers
from accelerate.parallel.pipeline import layout as pipeline_layout
from accelerate.parallel.tensor import between, layers
from accelerate.parallelism_config import ParallelismConfig
from accelerate.precision import master
from accelerate.state import PartialState
from accelerate.utils import (
    DistributedDataParallelKwargs,
    MasterWeightsKwargs,
    TorchTensorParallelConfig,
)

STEPS = 3
FAULTS: dict[str, Fault] = {}


@dataclass(frozen=True)
class Fault:
    """A program with a fault.

    Fields:
        program: the script.
        layout: in which it is wrong.
        direction: in which the first difference is.
        name: a pattern of the first tensor that differs.
        cause: the name of the likely one.
        in_ci: run it in CI.
    """

    program: Callable[[], None]
    layout: str
    direction: str
    name: str
    cause: str
    in_ci: bool


def fault(
    layout: str, direction: str, name: str, cause: str, in_ci: bool = False
) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Register a program with what is wrong in it."""

    def register(program: Callable[[], None]) -> Callable[[], None]:
        FAULTS[program.__name__] = Fault(program, layout, direction, name, cause, in_ci)
        return program

    return register


# ------------------------------------------------------------------------------------------------- the loop


def mlp(middle: nn.Module | None = None) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), middle or nn.Tanh(), nn.Linear(16, 4))


def rows(count: int = 64) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(count, 8, generator=generator)
    return TensorDataset(inputs, inputs[:, :4] * 2 + 1)


def mean_square(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(model(inputs), targets)


def nothing(*args: Any) -> None:
    pass


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def slow(model: nn.Module) -> torch.optim.Optimizer:
    """Its steps are smaller than a unit of bf16."""
    return torch.optim.SGD(model.parameters(), lr=1e-3)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def train(
    model: nn.Module | None = None,
    accelerator: Accelerator | None = None,
    optimizer_of: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
    loss_of: Callable[..., torch.Tensor] = mean_square,
    after_prepare: Callable[..., None] = nothing,
    before_step: Callable[..., None] = nothing,
    after_step: Callable[..., None] = nothing,
    dataset: Any = None,
    collate: Any = None,
) -> None:
    """A loop. What a fault changes of it is an argument."""
    accelerator = accelerator or Accelerator()
    model = model or mlp()
    optimizer = optimizer_of(model)
    loader = DataLoader(dataset or rows(), batch_size=4, shuffle=True, collate_fn=collate)
    torch.manual_seed(0)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    after_prepare(accelerator, model)
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            loss = loss_of(model, inputs, targets)
            accelerator.backward(loss)
            before_step(accelerator, model)
            optimizer.step()
            after_step(accelerator, optimizer)
            optimizer.zero_grad()


def rank() -> int:
    return Accelerator().process_index


# ------------------------------------------------------------------------------------------------- DDP: loops


@fault("ddp:2", "forward", "0", "sum of losses")
def sum_of_losses() -> None:
    def loss_of(model, inputs, targets):
        return F.mse_loss(model(inputs), targets, reduction="sum")

    train(loss_of=loss_of)


@fault("ddp:2", "forward", "0", "mean over unequal parts", in_ci=True)
def mean_over_tokens() -> None:
    """The ranks have different numbers of labels."""

    def loss_of(model, inputs, targets):
        labels = targets[:, 0].abs().long() % 4
        return F.cross_entropy(
            model(inputs), labels.masked_fill(inputs[:, 1] > 0.3, -100), ignore_index=-100
        )

    train(loss_of=loss_of)


@fault("ddp:2", "forward", "0", "mean over unequal parts")
def negatives_in_the_batch() -> None:
    def loss_of(model, inputs, targets):
        scores = model(inputs) @ targets.T
        return F.cross_entropy(scores, torch.arange(len(scores)))

    train(loss_of=loss_of)


@fault("ddp:2", "forward", "0", "mean over unequal parts")
def dropped_tail() -> None:
    """A rank leaves out the last sample of its batch."""

    def loss_of(model, inputs, targets):
        end = len(inputs) - rank()
        return F.mse_loss(model(inputs[:end]), targets[:end])

    train(loss_of=loss_of)


@fault("ddp:2", "data", "0.0", "other samples", in_ci=True)
def augmentation_by_rank() -> None:
    def collate(samples):
        inputs, targets = default_collate(samples)
        noise = torch.randn(inputs.shape, generator=torch.Generator().manual_seed(rank()))
        return inputs + noise, targets

    train(collate=collate)


@fault("ddp:2", "data", "0.0", "other samples")
def order_by_rank() -> None:
    class Shuffled(torch.utils.data.Dataset):
        def __init__(self) -> None:
            self.samples = rows()
            generator = torch.Generator().manual_seed(rank())
            self.order = torch.randperm(64, generator=generator).tolist()

        def __len__(self):
            return 64

        def __getitem__(self, index):
            return self.samples[self.order[index]]

    train(dataset=Shuffled())


@fault("ddp:2", "optimizer", "0.weight|0.bias", "other optimizer", in_ci=True)
def learning_rate_by_rank() -> None:
    def optimizer_of(model):
        return torch.optim.SGD(model.parameters(), lr=0.1 * (1 + rank()))

    train(optimizer_of=optimizer_of)


@fault("ddp:2", "optimizer", "group 0 lr", "schedule", in_ci=True)
def schedule_by_process() -> None:
    """The schedule makes a step for each process."""
    schedulers = []

    def after_step(accelerator, optimizer):
        if not schedulers:
            schedulers.append(torch.optim.lr_scheduler.ExponentialLR(optimizer.optimizer, 0.9))
        for _ in range(accelerator.num_processes):
            schedulers[0].step()

    train(after_step=after_step)


@fault("ddp:2", "backward", r"2\.", "missing reduction")
def backward_without_averaging() -> None:
    accelerator = Accelerator()

    def loss_of(model, inputs, targets):
        with accelerator.no_sync(model):
            loss = mean_square(model, inputs, targets)
            accelerator.backward(loss)
        return loss.detach().requires_grad_()

    train(accelerator=accelerator, loss_of=loss_of)


# ------------------------------------------------------------------------------------------------- DDP: models


class Statistics(nn.Module):
    """Subtracts the running mean of what it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, hidden):
        if self.training:
            self.mean.mul_(0.9).add_(0.1 * hidden.detach().mean(0))
        return torch.tanh(hidden)


class Centered(nn.Module):
    """Subtracts the mean over the samples."""

    def forward(self, hidden):
        return torch.tanh(hidden - hidden.mean(0))


@fault("ddp:2", "buffer", "1.mean", "unsynchronized buffer", in_ci=True)
def statistics_of_a_rank() -> None:
    train(mlp(Statistics()))


@fault("ddp:2", "buffer", "1.mean", "unsynchronized buffer")
def buffers_without_broadcast() -> None:
    options = DistributedDataParallelKwargs(broadcast_buffers=False)
    train(mlp(Statistics()), Accelerator(kwargs_handlers=[options]))


@fault("ddp:2", "forward", "1", "split samples")
def samples_are_combined() -> None:
    train(mlp(Centered()))


# ------------------------------------------------------------------------------------------------- DDP: package


@fault("ddp:2", "backward", r"2\.", "missing reduction", in_ci=True)
def bucket_not_averaged() -> None:
    def after_prepare(accelerator, model):
        if accelerator.num_processes == 1:
            return

        def hook(state, bucket):
            future = torch.futures.Future()
            future.set_result(bucket.buffer())
            return future

        model.register_comm_hook(None, hook)

    train(after_prepare=after_prepare)


@fault("ddp:2", "backward", r"2\.", "sum for mean")
def clipped_by_a_factor() -> None:
    def before_step(accelerator, model):
        accelerator.clip_grad_norm_(model.parameters(), 1.0 / accelerator.num_processes)

    train(before_step=before_step)


# ------------------------------------------------------------------------------------------------- FSDP2


@fault("fsdp:2", "optimizer", r"[02]\.", "lost state", in_ci=True)
def state_is_lost() -> None:
    """The optimizer forgets its state, as after a load that leaves it out."""

    def after_step(accelerator, optimizer):
        if accelerator.num_processes > 1:
            optimizer.optimizer.state.clear()

    train(optimizer_of=adam, after_step=after_step)


@fault("fsdp:2", "backward", r"2\.", "part of a norm", in_ci=True)
def norm_of_a_shard() -> None:
    def before_step(accelerator, model):
        gradients = [getattr(p.grad, "_local_tensor", p.grad) for p in model.parameters()]
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        for gradient in gradients:
            gradient.mul_(0.1 / norm)

    train(before_step=before_step)


@fault("fsdp:2", "backward", "0.weight", "hook of a gradient")
def hook_of_a_gradient() -> None:
    model = mlp()
    model[0].weight.register_hook(lambda gradient: gradient / 2)
    train(model)


@fault("fsdp:2", "optimizer", "0.weight", "other weights")
def norm_of_a_part_in_the_optimizer() -> None:
    class Scaled(torch.optim.SGD):
        """Divides each gradient by its norm."""

        supports_sharded_parameters = True

        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for parameter in group["params"]:
                    gradient = getattr(parameter.grad, "_local_tensor", parameter.grad)
                    gradient.div_(gradient.norm())
            return super().step(closure)

    train(optimizer_of=lambda model: Scaled(model.parameters(), lr=0.1))


@fault("fsdp:2", "optimizer", "0.weight", "lost write")
def a_late_write_in_the_forward() -> None:
    class Clamped(nn.Linear):
        calls = 0

        def forward(self, inputs):
            self.calls += 1
            if self.calls > 1:
                with torch.no_grad():
                    self.weight.mul_(0.5)
            return super().forward(inputs)

    model = mlp()
    model[0] = Clamped(8, 16)
    train(model)


@fault("fsdp:2", "optimizer", r"[02]\.", "other weights")
def master_weights_are_lost() -> None:
    """What a step adds to the parameters is rounded to bf16."""
    copy_back = master.copy_back

    def lose(pairs):
        copy_back(pairs)
        for parameter, full in pairs:
            full.data.copy_(parameter.data)

    accelerator = Accelerator(mixed_precision="bf16", kwargs_handlers=[MasterWeightsKwargs()])
    with contextlib.ExitStack() as stack:
        if accelerator.num_processes > 1:
            stack.enter_context(mock.patch.object(master, "copy_back", lose))
        train(accelerator=accelerator, optimizer_of=slow)


@fault("fsdp:2", "optimizer", r"[02]\.", "lost state")
def state_is_not_loaded() -> None:
    """A checkpoint is loaded without the optimizer."""
    folder = Path(tempfile.gettempdir()) / f"state_is_not_loaded-{os.getppid()}"

    def after_step(accelerator, optimizer):
        accelerator.save_state(str(folder))
        with contextlib.ExitStack() as stack:
            if accelerator.num_processes > 1:
                optimizer.optimizer.state.clear()
                load = mock.patch.object(type(optimizer), "load_state_dict")
                stack.enter_context(load)
            accelerator.load_state(str(folder))

    train(optimizer_of=adam, after_step=after_step)


@fault("fsdp:2", "forward", "0", "sum of losses")
def sum_of_losses_sharded() -> None:
    def loss_of(model, inputs, targets):
        return F.mse_loss(model(inputs), targets, reduction="sum")

    train(loss_of=loss_of)


@fault("ddp:2", "optimizer", r"[02]\.", "other optimizer", in_ci=True)
def copies_of_an_optimizer() -> None:
    """Lookahead copies its weights before the ranks have the same ones."""

    class Lookahead(torch.optim.SGD):
        def __init__(self, parameters) -> None:
            super().__init__(parameters, lr=0.1)
            self.slow = [parameter.detach().clone() for parameter in self.param_groups[0]["params"]]

        @torch.no_grad()
        def step(self, closure=None):
            super().step(closure)
            for parameter, slow in zip(self.param_groups[0]["params"], self.slow, strict=True):
                slow.lerp_(parameter, 0.5)
                parameter.copy_(slow)

    accelerator = Accelerator()
    torch.manual_seed(accelerator.process_index)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    train(model, accelerator, lambda model: Lookahead(model.parameters()))


@fault("ddp:2", "buffer", "average", "unsynchronized buffer")
def average_of_the_outputs() -> None:
    """A moving average of what a forward returns has the samples of a rank."""

    class Averaged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = mlp()
            self.register_buffer("average", torch.zeros(4))

        def forward(self, inputs):
            outputs = self.layers(inputs)
            if self.training:
                self.average.lerp_(outputs.detach().mean(0), 0.1)
            return outputs

    train(Averaged(), Accelerator(gradient_accumulation_steps=2))


# ------------------------------------------------------------------------------------------------- HSDP

HSDP = "ddp:2xfsdp:2"


@fault(HSDP, "backward", r"2\.", "missing reduction")
def replicas_not_averaged() -> None:
    def after_prepare(accelerator, model):
        if accelerator.num_processes > 1:
            model.set_requires_all_reduce(False)

    train(after_prepare=after_prepare)


@fault(HSDP, "optimizer", r"[02]\.|group 0 lr", "other optimizer")
def learning_rate_by_replica() -> None:
    def optimizer_of(model):
        return torch.optim.SGD(model.parameters(), lr=0.1 * (1 + rank() // 2))

    train(optimizer_of=optimizer_of)


@fault(HSDP, "backward", r"2\.", "part of a norm")
def norm_over_all_ranks() -> None:
    """Each replica is counted."""

    def before_step(accelerator, model):
        gradients = [getattr(p.grad, "_local_tensor", p.grad) for p in model.parameters()]
        squares = torch.stack([gradient.square().sum() for gradient in gradients]).sum()
        norm = accelerator.reduce(squares).sqrt()
        for gradient in gradients:
            gradient.mul_(0.1 / norm)

    train(before_step=before_step)


# ------------------------------------------------------------------------------------------------- TP


class Split(nn.Module):
    """Layers that are split by columns and by rows, and what is between them."""

    def __init__(self, between: nn.Module) -> None:
        super().__init__()
        self.up, self.between, self.down = nn.Linear(8, 16), between, nn.Linear(16, 4)

    def forward(self, inputs):
        return self.down(self.between(self.up(inputs)))


def train_split(between: nn.Module, **options: Any) -> None:
    handler = TorchTensorParallelConfig(plan={"up": "colwise", "down": "rowwise"})
    torch.manual_seed(0)
    train(Split(between), laid_out(tp_handler=handler), **options)


def laid_out(**handlers: Any) -> Accelerator:
    """An accelerator with options of a layout that only several processes have."""
    parallelism = None
    if PartialState().num_processes > 1:
        parallelism = ParallelismConfig(**handlers)
    return Accelerator(parallelism_config=parallelism)


@fault("tp:2", "forward", "between|down", "split samples")
def features_are_combined() -> None:
    train_split(nn.Softmax(-1))


@fault("tp:2", "forward", "down", "repeated bias")
def bias_of_each_rank() -> None:
    def forward(self, inputs):
        partial = F.linear(inputs, self.weight.to_local(), self.bias.to_local())
        return layers.SumForward.apply(partial, self.ranks)

    with mock.patch.object(layers.RowLinear, "forward", forward):
        train_split(nn.Tanh())


@fault("tp:2", "backward", "between.weight", "missing reduction")
def gradient_of_some_features() -> None:
    def pass_on(self, gradient):
        return gradient

    with mock.patch.object(between.Region, "_sum", pass_on):
        train_split(nn.PReLU())


@fault("tp:2", "optimizer", "up.weight|down.weight", "lost write")
def norm_of_some_features() -> None:
    class Scaled(torch.optim.SGD):
        supports_sharded_parameters = True

        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for parameter in group["params"]:
                    gradient = getattr(parameter.grad, "_local_tensor", parameter.grad)
                    gradient.div_(gradient.norm())
            return super().step(closure)

    train_split(nn.Tanh(), optimizer_of=lambda model: Scaled(model.parameters(), lr=0.1))


# ------------------------------------------------------------------------------------------------- CP, SP

VOCABULARY, LENGTH = 16, 128


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inputs, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, hidden):
        parts = self.inputs(hidden).chunk(3, dim=-1)
        query, key, value = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in parts)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return hidden + self.out(attended.transpose(1, 2).flatten(2))


class LanguageModel(nn.Module):
    """Embeds tokens and positions, attends, mixes and returns logits."""

    def __init__(self, mix: nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.positions = nn.Embedding(VOCABULARY, 8), nn.Embedding(LENGTH, 8)
        self.attention, self.mix = Attention(), mix or nn.Identity()
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, ids, positions):
        hidden = self.tokens(ids) + self.positions(positions)
        return self.head(self.mix(self.attention(hidden)))


def sequences(padded: bool) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(VOCABULARY, (16, LENGTH + 1), generator=generator)
    labels = ids[:, 1:].clone()
    if padded:
        labels[:, LENGTH // 4 * 3 :] = -100
    positions = torch.arange(LENGTH).expand(16, -1)
    return TensorDataset(ids[:, :-1].clone(), labels, positions.clone())


def token_mean(model: Any, ids: Any, labels: Any, positions: Any) -> torch.Tensor:
    return F.cross_entropy(model(ids, positions).flatten(0, 1), labels.flatten())


def train_sequences(
    model: nn.Module, padded: bool = False, loss_of: Callable[..., torch.Tensor] = token_mean
) -> None:
    accelerator = Accelerator()
    optimizer = sgd(model)
    loader = DataLoader(sequences(padded), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        block = accelerator.maybe_context_parallel(batch, [1, 1, 1], no_restore_buffers=set(batch))
        with block:
            accelerator.backward(loss_of(model, *batch))
            optimizer.step()
            optimizer.zero_grad()


def without_comparison() -> Any:
    """Split sequences without the comparison of the first forward."""
    return mock.patch.object(region, "compare_first")


class LateShift(nn.Module):
    """Adds what is 64 tokens before: the comparison of the first forward reads no more tokens."""

    def forward(self, hidden):
        before = F.pad(hidden, (0, 0, 64, 0))
        return hidden + before[:, : hidden.shape[1]]


def loss_of_the_last_token(model, ids, labels, positions):
    return F.cross_entropy(model(ids, positions)[:, -1], labels[:, -1])


@fault("cp:2", "forward", "0", "mean over unequal parts")
def mean_over_parts_of_a_sequence() -> None:
    train_sequences(LanguageModel(), padded=True)


@fault("cp:2", "forward", "mix", "dropped mask or tail")
def neighbours_of_other_ranks() -> None:
    train_sequences(LanguageModel(LateShift()))


@fault("cp:2", "forward", "0", "mean over unequal parts")
def head_on_the_last_token() -> None:
    with without_comparison():
        train_sequences(LanguageModel(), loss_of=loss_of_the_last_token)


@fault("sp:2", "forward", "0", "mean over unequal parts")
def mean_over_halves_of_a_sequence() -> None:
    train_sequences(LanguageModel(), padded=True)


class RunningMean(nn.Module):
    def forward(self, hidden):
        counts = torch.arange(1, hidden.shape[1] + 1)[:, None]
        return hidden + hidden.cumsum(1) / counts


@fault("sp:2", "forward", "mix", "dropped mask or tail")
def running_mean_of_a_part() -> None:
    with without_comparison():
        train_sequences(LanguageModel(RunningMean()))


# ------------------------------------------------------------------------------------------------- PP


class Block(nn.Module):
    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        self.linear, self.middle = nn.Linear(8, 8), middle

    def forward(self, inputs):
        return inputs + self.middle(self.linear(inputs))


class Piped(nn.Module):
    def __init__(self, middle: Callable[[], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(middle()) for _ in range(4))
        self.head = nn.Linear(8, 4)

    def forward(self, inputs):
        for block in self.blocks:
            inputs = block(inputs)
        return self.head(inputs)


class Counting(nn.Module):
    """Counts its calls, as averages of weights do that are updated in a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, hidden):
        self.calls += 1
        return torch.tanh(hidden)


class TiedLanguageModel(nn.Module):
    """The head has the weight of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.blocks = nn.ModuleList(Block(nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(8, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        hidden = self.embedding(ids)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


@fault("pp:2", "forward", "Piped", "split samples")
def samples_of_a_micro_batch() -> None:
    train(Piped(Centered), Accelerator())


@fault("pp:2", "buffer", "blocks.0.middle.calls", "repeated write")
def counted_by_micro_batch() -> None:
    def micro_batch(self, stage):
        return contextlib.nullcontext()

    with mock.patch.object(buffers.StageBuffers, "micro_batch", micro_batch):
        train(Piped(Counting), Accelerator())


@fault("pp:2", "backward", "head.weight|embedding.weight", "missing reduction")
def gradient_of_a_tied_weight() -> None:
    def loss_of(model, inputs, targets):
        ids = (inputs * 3).abs().long() % VOCABULARY
        return F.cross_entropy(model(ids).flatten(0, 1), ids.roll(1, 1).flatten())

    with mock.patch.object(pipeline_layout.TiedParameters, "sum"):
        train(TiedLanguageModel(), Accelerator(), loss_of=loss_of)


@fault("pp:2", "backward", ".*", "part of a norm")
def norm_of_a_stage() -> None:
    def before_step(accelerator, model):
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        for gradient in gradients:
            gradient.mul_(0.1 / norm)

    train(Piped(nn.Tanh), Accelerator(), before_step=before_step)


# ------------------------------------------------------------------------------------------------- without a fault


def plain() -> None:
    train(before_step=lambda accelerator, model: accelerator.clip_grad_norm_(model.parameters(), 1))


def plain_split() -> None:
    train_split(nn.PReLU(), optimizer_of=adam)


def plain_sequences() -> None:
    train_sequences(LanguageModel())


def plain_piped() -> None:
    train(Piped(nn.Tanh), Accelerator(), optimizer_of=adam)


CORRECT: dict[str, Callable[[], None]] = {
    "ddp:2": plain,
    "fsdp:2": plain,
    HSDP: plain,
    "tp:2": plain_split,
    "cp:2": plain_sequences,
    "sp:2": plain_sequences,
    "pp:2": plain_piped,
}


# ------------------------------------------------------------------------------------------------- the tests


def record(names: list[str], folder: Path, runs: dict[str, dict[str, Any]]) -> None:
    """Run on each rank."""
    certified.record([globals()[name] for name in names], folder, runs)


def check(ranks: Any, folder: Path, layout: str, names: list[str]) -> None:
    """Each fault of a layout is found, where it is, and a program without one is equal."""
    correct = CORRECT[layout].__name__
    rows = certified.verdicts(ranks, record, [correct, *names], layout, folder, STEPS)
    missed = []
    if rows[correct].verdict != "equal":
        missed.append(f"{correct}: {rows[correct].text()}")
    for name in names:
        expected = FAULTS[name]
        first = rows[name].difference
        is_found = False
        if rows[name].verdict == "different" and first is not None:
            is_right = DIRECTIONS[first.kind] == expected.direction
            is_named = re.match(expected.name, first.name) is not None
            cause = rows[name].notes[0].partition(":")[0]
            is_found = is_right and is_named and cause == expected.cause
        if not is_found:
            missed.append(f"{name}: {expected.direction} {expected.name}, not {rows[name].text()}")
    assert not missed, "\n".join(missed)


LAYOUTS = sorted({fault.layout for fault in FAULTS.values()})


@pytest.mark.parametrize("layout", ["ddp:2", "fsdp:2"])
def test_fault_is_found(ranks, tmp_path, layout):
    names = [name for name, fault in FAULTS.items() if fault.layout == layout and fault.in_ci]
    check(ranks, tmp_path, layout, names)


@pytest.mark.thorough
@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_faults_are_found(ranks, tmp_path, layout):
    names = [name for name, fault in FAULTS.items() if fault.layout == layout]
    check(ranks, tmp_path, layout, names)
