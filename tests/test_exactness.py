# SPDX-License-Identifier: Apache-2.0
"""exact=True against the plain single-process loop, after every step, for sizes that do not divide."""

import copy

import pytest
import torch
from rank_pool import on_ranks
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from accelerate import Accelerator
from accelerate.core.errors import AccelerateError, ConfigurationError
from accelerate.utils import FullyShardedDataParallelPlugin

EPOCHS = 3
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}


class Stream(IterableDataset):
    def __init__(self, *tensors):
        self.tensors = tensors

    def __iter__(self):
        yield from zip(*self.tensors, strict=True)


class Rows(Dataset):
    def __init__(self, *tensors):
        self.tensors = tensors

    def __len__(self):
        return len(self.tensors[0])

    def __getitem__(self, index):
        return {"x": self.tensors[0][index], "y": self.tensors[1][index]}


def data(size, dtype):
    generator = torch.Generator().manual_seed(size)
    x = torch.randn(size, 6, generator=generator, dtype=dtype)
    return x, torch.sin(x.sum(1, keepdim=True)) + 0.1 * torch.randn(
        size, 1, generator=generator, dtype=dtype
    )


def network(dtype):
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    return model.to(dtype)


def loader_of(kind, size, batch_size, dtype):
    tensors = data(size, dtype)
    dataset = {"tensors": TensorDataset, "rows": Rows, "stream": Stream}[kind](*tensors)
    if kind == "stream":
        return DataLoader(dataset, batch_size=batch_size)
    return DataLoader(
        dataset, batch_size=batch_size, shuffle=True, generator=torch.Generator().manual_seed(7)
    )


def pair(batch):
    return (batch["x"], batch["y"]) if isinstance(batch, dict) else batch


def plain_run(kind, size, batch_size, steps, dtype):
    """The parameters after each optimizer step of an ordinary loop, of which each step has one batch."""
    model = network(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = loader_of(kind, size, batch_size, dtype)
    history = []
    for _ in range(EPOCHS):
        batches = [pair(batch) for batch in loader]
        for start in range(0, len(batches), steps):
            x, y = (torch.cat(parts) for parts in zip(*batches[start : start + steps], strict=True))
            torch.nn.functional.mse_loss(model(x), y).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            history.append([p.detach().clone() for p in model.parameters()])
    return history


def accelerated_run(kind, size, batch_size, steps, dtype, loss_kind):
    accelerator = Accelerator(gradient_accumulation_steps=steps, exact=True)
    model = network(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, loader_of(kind, size, batch_size, dtype)
    )
    history = []
    for _ in range(EPOCHS):
        for batch in loader:
            x, y = pair(batch)
            with accelerator.accumulate(model):
                loss = torch.nn.functional.mse_loss(model(x), y)
                accelerator.backward(loss, num_items=len(x) if loss_kind == "items" else None)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                history.append([p.detach().clone() for p in model.parameters()])
    return history


@on_ranks(1, 2, 4, thorough=[3])
@pytest.mark.parametrize(
    ("kind", "size", "local", "steps", "dtype", "loss_kind"),
    [
        ("tensors", 37, 4, 1, torch.float64, "mean"),
        ("tensors", 37, 4, 3, torch.float64, "mean"),
        ("rows", 25, 3, 2, torch.float64, "mean"),
        ("tensors", 2, 2, 2, torch.float64, "mean"),
        ("tensors", 24, 3, 2, torch.float64, "mean"),
        ("stream", 23, 3, 1, torch.float64, "mean"),
        ("stream", 23, 3, 3, torch.float64, "mean"),
        ("tensors", 37, 4, 3, torch.float32, "mean"),
        ("tensors", 5, 6, 1, torch.float64, "items"),
        ("tensors", 37, 4, 3, torch.float64, "items"),
    ],
    ids=lambda value: str(value).removeprefix("torch."),
)
def test_every_step_is_that_of_one_process(kind, size, local, steps, dtype, loss_kind, nproc):
    expected = plain_run(kind, size, local * nproc, steps, dtype)
    found = accelerated_run(kind, size, local, steps, dtype, loss_kind)
    assert len(found) == len(expected)
    for number, (ours, plain) in enumerate(zip(found, expected, strict=True)):
        distance = max(float((a - b).abs().max()) for a, b in zip(ours, plain, strict=True))
        assert distance <= TOLERANCE[dtype], f"step {number} is off by {distance}"


@on_ranks(2)
@pytest.mark.parametrize("plugin", [None, 2], ids=["ddp", "fsdp2"])
def test_two_models_with_a_backward_each_in_a_window_that_ends_early(plugin):
    options = {}
    if plugin is not None:
        options["fsdp_plugin"] = FullyShardedDataParallelPlugin(fsdp_version=plugin)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, exact=True, **options)

    def models_and_optimizers():
        models = [network(torch.float64) for _ in range(2)]
        return models, [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]

    def loss_of(number, model, x, y):
        return torch.nn.functional.mse_loss(model((number + 1) * x), y)

    # Windows of 8, 8 and 3 samples.
    models, optimizers = models_and_optimizers()
    for window in loader_of("tensors", 19, 8, torch.float64):
        x, y = pair(window)
        for number, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            loss_of(number, model, x, y).backward()
            optimizer.step()
            optimizer.zero_grad()
    expected = [model.state_dict() for model in models]
    models, optimizers = models_and_optimizers()
    loader = loader_of("tensors", 19, 2, torch.float64)
    *models, first, second, loader = accelerator.prepare(*models, *optimizers, loader)
    for batch in loader:
        x, y = pair(batch)
        with accelerator.accumulate(*models):
            for number, model in enumerate(models):
                accelerator.backward(loss_of(number, model, x, y))
            for optimizer in (first, second):
                optimizer.step()
                optimizer.zero_grad()
    for model, state in zip(models, expected, strict=True):
        found = accelerator.get_state_dict(model)
        for name, value in found.items():
            torch.testing.assert_close(value, state[name], rtol=0, atol=1e-10)


def read_ahead(loader):
    batches = iter(loader)
    present = next(batches, None)
    while present is not None:
        following = next(batches, None)
        yield present
        present = following


@on_ranks(1, 2, 4)
@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("order", [read_ahead, list])
def test_the_weight_is_that_of_the_batch_which_the_forward_reads(order, steps, nproc):
    size, batch_size = 37, 4
    inputs = torch.cat(data(size, torch.float64), dim=1)
    torch.manual_seed(1)
    expected = torch.nn.Linear(6, 1, dtype=torch.float64)
    model = copy.deepcopy(expected)
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    rows = list(inputs.split(batch_size * nproc))
    ends = [number % steps == steps - 1 for number in range(len(rows))]
    if order is read_ahead and steps > 1:
        # The last batch is read by then, and after it no pass is open.
        ends[-2:] = [True, False]
    window = []
    for batch, is_end in zip(rows, ends, strict=True):
        window.append(batch)
        if is_end:
            x = torch.cat(window)
            torch.nn.functional.mse_loss(expected(x[:, :-1]), x[:, -1:]).backward()
            optimizer.step()
            optimizer.zero_grad()
            window = []

    accelerator = Accelerator(gradient_accumulation_steps=steps, exact=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(inputs), batch_size=batch_size)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for (x,) in order(loader):
        with accelerator.accumulate(model):
            loss = torch.nn.functional.mse_loss(model(x[:, :-1]), x[:, -1:])
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    weight = accelerator.unwrap_model(model).weight.detach()
    assert (weight - expected.weight).abs().max() < 1e-9


@on_ranks(1, 2, 4)
def test_a_closure_decides_on_the_mean_over_all_samples(nproc):
    """A line search on ranks with unequal batches, the last of which has none of some ranks."""
    x, y = data(4 * nproc + 3, torch.float64)
    plain = network(torch.float64)
    model = copy.deepcopy(plain)
    options = {"lr": 1.0, "max_iter": 4, "line_search_fn": "strong_wolfe"}
    optimizer = torch.optim.LBFGS(plain.parameters(), **options)
    for start in range(0, len(x), 4 * nproc):
        rows = slice(start, start + 4 * nproc)

        def closure(rows=rows):
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(plain(x[rows]), y[rows])
            loss.backward()
            return loss

        optimizer.step(closure)

    accelerator = Accelerator(exact=True)
    prepared, stepper, loader = accelerator.prepare(
        model,
        torch.optim.LBFGS(model.parameters(), **options),
        DataLoader(TensorDataset(x, y), batch_size=4),
    )
    for inputs, targets in loader:

        def weighed(inputs=inputs, targets=targets):
            stepper.zero_grad()
            loss = torch.nn.functional.mse_loss(prepared(inputs), targets)
            accelerator.backward(loss)
            return loss

        stepper.step(weighed)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert (ours - theirs).abs().max() < 1e-8


@on_ranks(2)
def test_batches_of_other_weights_in_one_loss(nproc):
    accelerator = Accelerator(exact=True)
    x, y = data(10, torch.float64)
    loaders = [DataLoader(TensorDataset(x, y), batch_size=size) for size in (3, 4)]
    model, *loaders = accelerator.prepare(network(torch.float64), *loaders)
    number = 0
    for batches in zip(*loaders, strict=True):
        losses = [torch.nn.functional.mse_loss(model(a), b) for a, b in batches]
        number += 1
        if number == 1:
            accelerator.backward(sum(losses))
        else:
            with pytest.raises(AccelerateError, match=r"4, 2 samples.*num_items"):
                accelerator.backward(sum(losses))
    assert number == 2


def test_wrong_numbers_of_items_are_refused():
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(2, 1))
    loss = model(torch.ones(3, 2)).mean()
    with pytest.raises(ConfigurationError, match=r"num_items.*\[3\]"):
        accelerator.backward(loss, num_items=torch.ones(3))
    for number in (-3, float("nan"), float("inf")):
        with pytest.raises(ConfigurationError, match=f"num_items.* {number} "):
            accelerator.backward(loss, num_items=number)


def test_samples_that_collate_leaves_out(caplog):
    accelerator = Accelerator(exact=True)

    def collate(samples):
        return torch.utils.data.default_collate(samples[1:])

    loader = DataLoader(TensorDataset(*data(8, torch.float64)), batch_size=4, collate_fn=collate)
    model, loader = accelerator.prepare(network(torch.float64), loader)
    for x, y in loader:
        accelerator.backward(torch.nn.functional.mse_loss(model(x), y))
    warnings = [record.getMessage() for record in caplog.records if "exact" in record.getMessage()]
    assert len(warnings) == 1 and "collate_fn" in warnings[0] and "num_items" in warnings[0]
