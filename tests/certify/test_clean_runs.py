# SPDX-License-Identifier: Apache-2.0
"""Correct programs: each is equal in every layout. Three seeds of each; a difference is a false alarm."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import certified
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.certify.certificate import CODES
from accelerate.utils import MasterWeightsKwargs, TorchDynamoPlugin

STEPS = 3
DATA_PARALLEL = ("ddp:2", "fsdp:2")
HSDP = "ddp:2xfsdp:2"
LAYOUTS: dict[str, list[str]] = {}


def clean(*layouts: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Register a program with the layouts in which it trains the same model."""

    def register(program: Callable[[], None]) -> Callable[[], None]:
        for layout in layouts or DATA_PARALLEL:
            LAYOUTS.setdefault(layout, []).append(program.__name__)
        return program

    return register


# ------------------------------------------------------------------------------------------------- the loop


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4))


def rows(count: int = 64) -> TensorDataset:
    inputs = torch.randn(count, 8)
    return TensorDataset(inputs, inputs[:, :4] * 2 + 1)


def mean_square(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(model(inputs), targets)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def train(
    model: nn.Module | None = None,
    accelerator: Accelerator | None = None,
    optimizer_of: Callable[[nn.Module], torch.optim.Optimizer] = adamw,
    scheduler_of: Callable[..., Any] | None = None,
    loss_of: Callable[..., torch.Tensor] = mean_square,
    items_of: Callable[..., Any] | None = None,
    clip: float | None = None,
    dataset: Any = None,
    after_prepare: Callable[..., Any] | None = None,
    **loading: Any,
) -> None:
    """A loop as users write it."""
    accelerator = accelerator or Accelerator()
    model = model or mlp()
    optimizer = optimizer_of(model)
    loader = DataLoader(dataset or rows(), **{"batch_size": 4, **loading})
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    scheduler = None
    if scheduler_of is not None:
        scheduler = accelerator.prepare(scheduler_of(optimizer.optimizer))
    if after_prepare is not None:
        after_prepare(accelerator, model)
    for _ in range(8):
        for batch in loader:
            with accelerator.accumulate(model):
                loss = loss_of(model, *batch)
                if items_of is None:
                    accelerator.backward(loss)
                else:
                    accelerator.backward(loss, num_items=items_of(*batch))
                if clip is not None and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                if scheduler is not None:
                    scheduler.step()
                optimizer.zero_grad()


# ------------------------------------------------------------------------------------------------- loops


@clean("ddp:2", "fsdp:2", HSDP)
def shuffled_and_clipped() -> None:
    train(clip=0.5, shuffle=True)


@clean("ddp:2", "fsdp:2", HSDP)
def accumulation_over_epochs() -> None:
    train(accelerator=Accelerator(gradient_accumulation_steps=3), dataset=rows(40), shuffle=True)


@clean("ddp:2", "fsdp:2", HSDP)
def an_odd_number_of_samples() -> None:
    train(dataset=rows(29), shuffle=True)


@clean()
def exact_with_an_odd_number_of_samples() -> None:
    train(accelerator=Accelerator(exact=True), dataset=rows(29), shuffle=True)


@clean()
def exact_accumulation() -> None:
    accelerator = Accelerator(exact=True, gradient_accumulation_steps=3)
    train(accelerator=accelerator, dataset=rows(31), clip=0.5, shuffle=True)


def labels_of(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    labels = targets[:, 0].abs().long() % 4
    return labels.masked_fill(inputs[:, 1] > 0.5, -100)


@clean("ddp:2", "fsdp:2", HSDP)
def items_are_counted() -> None:
    def loss_of(model, inputs, targets):
        return F.cross_entropy(model(inputs), labels_of(inputs, targets))

    def items_of(inputs, targets):
        return (labels_of(inputs, targets) != -100).sum()

    accelerator = Accelerator(gradient_accumulation_steps=2)
    train(accelerator=accelerator, loss_of=loss_of, items_of=items_of, clip=1.0)


@clean()
def cosine_schedule() -> None:
    def scheduler_of(optimizer):
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)

    train(scheduler_of=scheduler_of)


@clean()
def one_cycle() -> None:
    def scheduler_of(optimizer):
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=400)

    train(scheduler_of=scheduler_of, accelerator=Accelerator(gradient_accumulation_steps=2))


@clean()
def schedule_of_the_loop() -> None:
    """It steps once for each optimizer step."""
    accelerator = Accelerator(step_scheduler_with_optimizer=False)

    def scheduler_of(optimizer):
        return torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 10)

    train(accelerator=accelerator, scheduler_of=scheduler_of)


@clean()
def split_batches() -> None:
    configuration = DataLoaderConfiguration(split_batches=True)
    train(accelerator=Accelerator(dataloader_config=configuration), batch_size=8, shuffle=True)


@clean()
def dispatched_batches() -> None:
    configuration = DataLoaderConfiguration(dispatch_batches=True)
    train(accelerator=Accelerator(dataloader_config=configuration))


@clean()
def uneven_batches() -> None:
    configuration = DataLoaderConfiguration(even_batches=False)
    train(accelerator=Accelerator(dataloader_config=configuration), dataset=rows(64))


class Stream(IterableDataset):
    def __init__(self) -> None:
        self.samples = rows(64)

    def __iter__(self) -> Iterator[Any]:
        yield from self.samples


@clean()
def iterable_dataset() -> None:
    train(dataset=Stream())


@clean("ddp:2")
def workers() -> None:
    train(num_workers=2, shuffle=True)


class Augmented(Dataset):
    """Draws for each sample what its index says."""

    def __init__(self) -> None:
        self.samples = rows(64)

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        inputs, targets = self.samples[index]
        generator = torch.Generator().manual_seed(index)
        return inputs + 0.1 * torch.randn(8, generator=generator), targets


@clean()
def augmented_by_index() -> None:
    train(dataset=Augmented(), shuffle=True)


@clean()
def two_parameter_groups() -> None:
    def optimizer_of(model):
        matrices = [p for p in model.parameters() if p.ndim == 2]
        others = [p for p in model.parameters() if p.ndim < 2]
        groups = [{"params": matrices}, {"params": others, "weight_decay": 0.0, "lr": 0.02}]
        return torch.optim.AdamW(groups, lr=0.01)

    train(optimizer_of=optimizer_of)


@clean()
def clipped_values() -> None:
    def loss_of(model, inputs, targets):
        return 100 * mean_square(model, inputs, targets)

    train(loss_of=loss_of, optimizer_of=lambda model: torch.optim.Adam(model.parameters(), 0.01))


@clean()
def closure() -> None:
    accelerator = Accelerator()
    model = mlp()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)
    loader = DataLoader(rows(), batch_size=8)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for inputs, targets in loader:

        def evaluate(inputs=inputs, targets=targets):
            optimizer.zero_grad()
            loss = mean_square(model, inputs, targets)
            accelerator.backward(loss)
            return loss

        optimizer.step(evaluate)


@clean()
def evaluation_between_steps() -> None:
    accelerator = Accelerator()
    model = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.2), nn.Linear(32, 4))
    optimizer = adamw(model)
    train_loader, test_loader = DataLoader(rows(), batch_size=4), DataLoader(rows(10), batch_size=4)
    objects = accelerator.prepare(model, optimizer, train_loader, test_loader)
    model, optimizer, train_loader, test_loader = objects
    for inputs, targets in train_loader:
        model.eval()
        with torch.no_grad():
            for others, wanted in test_loader:
                accelerator.gather_for_metrics((model(others) - wanted).square())
        model.train()
        accelerator.backward(mean_square(model, inputs, targets))
        optimizer.step()
        optimizer.zero_grad()


# ------------------------------------------------------------------------------------------------- models


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inputs, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        parts = self.inputs(hidden).chunk(3, dim=-1)
        query, key, value = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in parts)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return hidden + self.out(attended.transpose(1, 2).flatten(2))


class LanguageModel(nn.Module):
    """Two blocks; `tied`: the head has the weight of the embedding."""

    def __init__(self, tied: bool = False, recompute: bool = False) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(32, 16), nn.Embedding(16, 16)
        self.blocks = nn.ModuleList(Attention() for _ in range(2))
        self.head = nn.Linear(16, 32, bias=False)
        self.recompute = recompute
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        hidden = self.tokens(ids) + self.positions(positions)
        for block in self.blocks:
            if self.recompute:
                hidden = checkpoint(block, hidden, use_reentrant=False)
            else:
                hidden = block(hidden)
        return self.head(hidden)


def sequences() -> TensorDataset:
    ids = torch.randint(32, (64, 17))
    return TensorDataset(ids[:, :-1].clone(), ids[:, 1:].clone(), torch.arange(16).repeat(64, 1))


def token_loss(model: nn.Module, ids: Any, labels: Any, positions: Any) -> torch.Tensor:
    return F.cross_entropy(model(ids, positions).flatten(0, 1), labels.flatten())


@clean("ddp:2", "fsdp:2", HSDP)
def language_model() -> None:
    train(LanguageModel(), dataset=sequences(), loss_of=token_loss, clip=1.0)


@clean()
def tied_weights() -> None:
    train(LanguageModel(tied=True), dataset=sequences(), loss_of=token_loss)


@clean()
def recomputed_blocks() -> None:
    train(LanguageModel(recompute=True), dataset=sequences(), loss_of=token_loss)


@clean()
def dropout() -> None:
    model = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.5), nn.ReLU(), nn.Linear(32, 4))
    train(model)


@clean()
def frozen_layers() -> None:
    model = mlp()
    model[0].requires_grad_(False)

    def optimizer_of(model):
        return adamw(nn.ModuleList([model[2], model[3]]))

    train(model, optimizer_of=optimizer_of)


@clean()
def convolutions() -> None:
    layers = [nn.Unflatten(1, (1, 8)), nn.Conv1d(1, 8, 3), nn.GroupNorm(2, 8), nn.ReLU()]
    train(nn.Sequential(*layers, nn.Flatten(), nn.Linear(48, 4)), shuffle=True)


@clean()
def recurrence() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cells, self.head = nn.LSTM(1, 8, batch_first=True), nn.Linear(8, 4)

        def forward(self, inputs):
            return self.head(self.cells(inputs[..., None])[0][:, -1])

    train(Recurrent())


@clean("ddp:2")
def synchronized_statistics() -> None:
    accelerator = Accelerator()
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
    train(nn.SyncBatchNorm.convert_sync_batchnorm(model), accelerator)


@clean()
def a_counter_of_calls() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = mlp()
            self.register_buffer("calls", torch.zeros((), dtype=torch.long))

        def forward(self, inputs):
            self.calls += 1
            return self.layers(inputs)

    train(Counting(), Accelerator(gradient_accumulation_steps=2))


# ------------------------------------------------------------------------------------------------- precision


@clean("ddp:2", "fsdp:2", HSDP)
def autocast() -> None:
    train(accelerator=Accelerator(mixed_precision="bf16"), clip=1.0)


@clean()
def autocast_of_a_language_model() -> None:
    accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2)
    train(LanguageModel(), accelerator, dataset=sequences(), loss_of=token_loss)


@clean()
def master_weights() -> None:
    handlers = [MasterWeightsKwargs()]
    train(accelerator=Accelerator(mixed_precision="bf16", kwargs_handlers=handlers))


@clean()
def half_weights() -> None:
    train(
        mlp().bfloat16(), loss_of=lambda model, x, y: mean_square(model, x.bfloat16(), y.bfloat16())
    )


@clean()
def double_precision() -> None:
    train(mlp().double(), loss_of=lambda model, x, y: mean_square(model, x.double(), y.double()))


@clean()
def compiled() -> None:
    train(accelerator=Accelerator(dynamo_plugin=TorchDynamoPlugin(backend="aot_eager")))


# ------------------------------------------------------------------------------------------------- several objects


@clean()
def two_optimizers() -> None:
    accelerator = Accelerator()
    model = mlp()
    first = torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9)
    second = adamw(nn.ModuleList([model[2], model[3]]))
    loader = DataLoader(rows(), batch_size=4)
    model, first, second, loader = accelerator.prepare(model, first, second, loader)
    for inputs, targets in loader:
        accelerator.backward(mean_square(model, inputs, targets))
        for optimizer in (first, second):
            optimizer.step()
            optimizer.zero_grad()


@clean()
def adversarial() -> None:
    accelerator = Accelerator()
    generator, critic = mlp(), nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
    first, second = adamw(generator), adamw(critic)
    loader = DataLoader(rows(), batch_size=4)
    generator, critic, first, second, loader = accelerator.prepare(
        generator, critic, first, second, loader
    )
    for inputs, targets in loader:
        real, fake = critic(targets), critic(generator(inputs).detach())
        accelerator.backward(F.softplus(-real).mean() + F.softplus(fake).mean())
        second.step()
        second.zero_grad()
        accelerator.backward(F.softplus(-critic(generator(inputs))).mean())
        first.step()
        first.zero_grad()
        second.zero_grad()


@clean()
def average_of_the_weights() -> None:
    train(after_prepare=lambda accelerator, model: accelerator.track_average(model))


@clean()
def average_by_hand() -> None:
    accelerator = Accelerator()
    model, average = mlp(), mlp()
    average.load_state_dict(model.state_dict())
    optimizer, loader = adamw(model), DataLoader(rows(), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for inputs, targets in loader:
        accelerator.backward(mean_square(model, inputs, targets))
        optimizer.step()
        optimizer.zero_grad()
        state = accelerator.get_state_dict(model)
        for name, value in (state or {}).items():
            average.state_dict()[name].lerp_(value, 0.1)


@clean()
def saved_and_loaded() -> None:
    accelerator = Accelerator()
    model = mlp()
    optimizer, loader = adamw(model), DataLoader(rows(), batch_size=4, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    folder = Path(os.environ["CLEAN_FOLDER"]) / str(accelerator.num_processes)
    for inputs, targets in loader:
        accelerator.backward(mean_square(model, inputs, targets))
        optimizer.step()
        optimizer.zero_grad()
        accelerator.save_state(str(folder))
        accelerator.load_state(str(folder))


# ------------------------------------------------------------------------------------------------- the tests


def record(names: list[str], folder: Path, runs: dict[str, dict[str, Any]]) -> None:
    """Run on each rank."""
    os.environ["CLEAN_FOLDER"] = str(folder / "states")
    programs = [certified.repetition(name, globals().__getitem__) for name in names]
    certified.record(programs, folder, runs)


@pytest.mark.thorough
@pytest.mark.timeout(900)
@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_no_false_alarm(ranks, tmp_path, layout):
    names = certified.repetitions(LAYOUTS[layout])
    rows = certified.verdicts(ranks, record, names, layout, tmp_path, STEPS)
    alarms = [f"{name}: {row.text()}" for name, row in rows.items() if CODES[row.verdict]]
    assert not alarms, "\n".join(alarms)
