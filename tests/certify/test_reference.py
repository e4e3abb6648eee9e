# SPDX-License-Identifier: Apache-2.0
"""What is changed in a recorded run: dropout, types, moved parameters, and the layout and the data of a reference."""

import json

import pytest
import torch
from states import reset_states
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator, ParallelismConfig
from accelerate.certify.reference import perturb
from accelerate.certify.settings import VARIABLE, Settings
from accelerate.core.errors import ConfigurationError
from accelerate.utils import (
    DataLoaderConfiguration,
    FullyShardedDataParallelPlugin,
    TorchTensorParallelPlugin,
    gather_object,
    set_seed,
)


@pytest.fixture
def recorded(tmp_path, monkeypatch):
    """A function that makes the accelerator of a run with such settings."""

    def make(settings, **options):
        reset_states()
        file = tmp_path / "settings.json"
        Settings(str(tmp_path), **{"steps": 100, "exits": False, **settings}).write(file)
        monkeypatch.setenv(VARIABLE, str(file))
        return Accelerator(cpu=True, **options)

    yield make
    reset_states()
    torch.set_default_dtype(torch.float32)


class DropPath(nn.Module):
    def __init__(self):
        super().__init__()
        self.drop_prob = 0.5

    def forward(self, x):
        kept = 1 - self.drop_prob
        return x * x.new_empty(len(x), 1, 1).bernoulli_(kept) / kept


class Functions(nn.Module):
    def forward(self, x):
        x = F.dropout(x, 0.5) + F.feature_alpha_dropout(x, 0.5, training=True)
        x = x + F.scaled_dot_product_attention(x, x, x, dropout_p=0.5)
        return x + F.scaled_dot_product_attention(x, x, x, None, 0.5, False)


class EveryDropout(nn.Module):
    """Each way in which a model may call for dropout."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True)
        self.recurrent = nn.LSTM(8, 8, num_layers=2, dropout=0.5, batch_first=True)
        self.layers = nn.Sequential(nn.Dropout(0.5), nn.AlphaDropout(0.5), nn.Dropout1d(0.5))
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.5, batch_first=True)
        self.path = DropPath()
        self.functions = Functions()

    def forward(self, x):
        x = self.path(self.layers(x + self.attention(x, x, x)[0]))
        x = self.encoder(self.recurrent(x)[0])
        return checkpoint(self.functions, x, use_reentrant=False)


def test_nothing_is_dropped(recorded):
    accelerator = recorded({})
    model = accelerator.prepare(EveryDropout())
    x = torch.randn(3, 4, 8, requires_grad=True)
    model(x).sum().backward()
    trained = model(x)
    gradient, x.grad = x.grad, None

    model.eval()
    body = model.functions

    def without_dropout(x):
        x = x + x
        x = x + F.scaled_dot_product_attention(x, x, x)
        return x + F.scaled_dot_product_attention(x, x, x)

    body.forward = without_dropout
    expected = model(x)
    torch.testing.assert_close(trained, expected)
    expected.sum().backward()
    torch.testing.assert_close(gradient, x.grad)


def test_dropout_stays_where_it_is_asked_for(recorded):
    model = recorded({"dropout": True}).prepare(nn.Sequential(nn.Dropout(0.5)))
    assert (model(torch.ones(64)) == 0).any()
    assert (F.dropout(torch.ones(64)) == 0).any()


def test_parameters_that_train_are_moved_by_one_unit():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4))
    model[1].weight = model[0].weight
    model[0].bias.requires_grad_(False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    perturb(model)
    for name, value in model.state_dict().items():
        steps = torch.zeros_like(value)
        # The bias of the norm is zero.
        if name in ("0.weight", "1.weight", "1.bias", "2.weight"):
            old = before[name]
            up, down = torch.nextafter(old, old + 1), torch.nextafter(old, old - 1)
            assert ((value == up) | (value == down)).all()
        else:
            assert torch.equal(value, before[name]), steps
    assert model[1].weight is model[0].weight


def test_type_of_models_and_batches(recorded):
    accelerator = recorded({"dtype": "float64"}, mixed_precision="bf16")
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = DataLoader(TensorDataset(torch.randn(8, 2), torch.arange(8)), 4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    x, y = next(iter(loader))
    assert (x.dtype, y.dtype) == (torch.float64, torch.int64)
    assert model(x).dtype == torch.float64
    assert accelerator.mixed_precision == "no"
    accelerator.backward(model(x).sum())
    optimizer.step()
    assert optimizer.param_groups[0]["params"][0] is next(model.parameters())


PLUGINS = {
    "fsdp_plugin": lambda: FullyShardedDataParallelPlugin(fsdp_version=2, cpu_offload=True),
    "parallelism_config": lambda: ParallelismConfig(tp_size=2),
    "torch_tp_plugin": lambda: TorchTensorParallelPlugin(tp_size=2),
}


@pytest.mark.parametrize("name", PLUGINS)
def test_a_reference_has_no_layout_of_the_script(recorded, name):
    accelerator = recorded({"shards": 2}, **{name: PLUGINS[name]()})
    assert accelerator.plan.strategy == recorded({"shards": 2}).plan.strategy
    assert accelerator.num_processes == 1


def test_a_layout_that_the_script_contradicts(recorded):
    with pytest.raises(ConfigurationError) as error:
        recorded({"layout": "tp:2"}, fsdp_plugin=PLUGINS["fsdp_plugin"]())
    assert "fsdp_plugin" in str(error.value)
    assert "tp:2" in str(error.value)


LENGTH, BATCH, WIDTH = 22, 3, 5


def samples():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(LENGTH, WIDTH, generator=generator, dtype=torch.float64)
    return x, torch.arange(LENGTH) % 4


def tokens(model, x, y):
    """The sum of losses of the counted samples, and their number."""
    errors = (model(x).squeeze(-1) - y) ** 2
    return (errors * (y > 0)).sum(), (y > 0).sum()


def joined_batches(order, shards, kind):
    """The batches that all shards read together: the last one is filled, or has what is left."""
    size = BATCH * shards
    batches = [order[i : i + size] for i in range(0, len(order), size)]
    if kind != "exact":
        batches[-1] = batches[-1] + order[: size - len(batches[-1])]
    return batches


@pytest.mark.parametrize("shards", [2, 4])
@pytest.mark.parametrize("kind", ["plain", "exact", "items", "dispatched"])
def test_a_reference_trains_as_a_plain_loop_on_joined_batches(recorded, kind, shards):
    """Two epochs with windows of two batches, whose last one is shorter, clipping, and a scheduler."""
    config = DataLoaderConfiguration(dispatch_batches=kind == "dispatched")
    accelerator = recorded(
        {"shards": shards},
        gradient_accumulation_steps=2,
        dataloader_config=config,
        exact=kind == "exact" or None,
    )
    set_seed(0)
    model = nn.Linear(WIDTH, 1).double()
    plain = nn.Linear(WIDTH, 1).double()
    plain.load_state_dict(model.state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    reference = torch.optim.AdamW(plain.parameters(), 0.1)
    schedules = [
        torch.optim.lr_scheduler.ExponentialLR(each, 0.9) for each in (optimizer, reference)
    ]
    x, y = samples()
    loader = DataLoader(TensorDataset(x, y), BATCH)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedules[0])
    order = list(range(LENGTH))
    for _ in range(2):
        batches = joined_batches(order, shards, kind)
        if kind == "dispatched":
            # What is left is split equally.
            rest = LENGTH % (BATCH * shards)
            batches[-1] = batches[-1][: rest + -rest % shards]
        assert len(loader) == len(batches)
        windows = [batches[i : i + 2] for i in range(0, len(batches), 2)]
        rows = iter([rows for window in windows for rows in window])
        for inputs, targets in loader:
            assert torch.equal(inputs, x[next(rows)])
            with accelerator.accumulate(model):
                total, count = tokens(model, inputs, targets)
                if kind == "items":
                    accelerator.backward(total / count, num_items=count)
                else:
                    accelerator.backward(total / len(targets))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            seen = accelerator.gather_for_metrics(targets)
        assert len(seen) == (LENGTH % (BATCH * shards) or BATCH * shards)
        assert len(gather_object(["only"])) == 1
        for window in windows:
            sums = [tokens(plain, x[rows], y[rows]) for rows in window]
            if kind == "items":
                loss = sum(total for total, _ in sums) / sum(count for _, count in sums)
            elif kind == "exact":
                loss = sum(total for total, _ in sums) / sum(map(len, window))
            else:
                pairs = zip(sums, window, strict=True)
                loss = sum(total / len(rows) for (total, _), rows in pairs) / 2
            loss.backward()
            nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
            reference.step()
            reference.zero_grad()
            for _ in range(shards):
                schedules[1].step()
        for actual, expected in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(reference.param_groups[0]["lr"])


@pytest.mark.parametrize("place", ["loop", "loss", "nowhere"])
def test_random_numbers_of_the_loop_are_noted(recorded, tmp_path, place):
    accelerator = recorded({"steps": 1})
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = DataLoader(TensorDataset(torch.randn(8, 2)), 4, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for (x,) in loader:
        if place == "loop":
            x = x + torch.randn_like(x)
        outputs = model(x)
        if place == "loss":
            outputs = outputs * torch.rand(1)
        accelerator.backward(outputs.sum())
        torch.rand(1)
        optimizer.step()
    noted = json.loads((tmp_path / "run.json").read_text())["draws"]
    assert noted == ([] if place == "nowhere" else ["the training loop"])
