# SPDX-License-Identifier: Apache-2.0
"""Buffers that a forward writes, and norms that take statistics, in a pipeline, against the plain loop in float64."""

import copy

import pytest
import torch
from layouts import compare
from pipelines import refused
from rank_pool import on_ranks
from states import reset_states
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint

from accelerate import Accelerator
from accelerate.config.parallel import PipelineParallelConfig as Options
from accelerate.parallelism_config import ParallelismConfig
from accelerate.state import PartialState

WIDTH = 6
pytestmark = pytest.mark.usefixtures("float64")
X, Y = torch.randn(
    2, 8, 4, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64
).unbind()


class FrozenNorm(nn.BatchNorm1d):
    def train(self, mode=True):
        return super().train(False)


class Block(nn.Module):
    """Writes what `kind` says."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.linear = kind, nn.Linear(WIDTH, WIDTH)
        if kind in ("spectral", "again"):
            self.linear = spectral_norm(self.linear)
        elif kind == "frozen":
            self.norm = FrozenNorm(WIDTH).requires_grad_(False).train()
            self.norm.running_mean.normal_()
        elif kind.startswith("BatchNorm"):
            self.norm = nn.BatchNorm1d(WIDTH, track_running_stats=kind == "BatchNorm1d")
        self.register_buffer("count", torch.zeros(()))
        first = float("nan") if kind == "nan" else 0.0
        self.register_buffer("mean", torch.full((WIDTH,), first), persistent=kind != "nan")

    def body(self, x):
        if self.kind == "count":
            # In place, and the graph saves what was written.
            self.count += 1
            x = x * self.count
        elif self.kind == "mean":
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean((0, 1))
        elif self.kind == "samples":
            self.count += len(x)
        if hasattr(self, "norm"):
            x = self.norm(x.transpose(1, 2)).transpose(1, 2)
        return x + torch.tanh(self.linear(x))

    def forward(self, x):
        if self.kind == "again":
            return checkpoint(self.body, x, use_reentrant=False)
        return self.body(x)


class Model(nn.Module):
    """Blocks, with what stands before and behind them."""

    def __init__(self, kind="none", seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.blocks = nn.ModuleList(Block(kind) for _ in range(4))
        self.norm = nn.BatchNorm1d(WIDTH)
        for name in ("calls", "scale"):
            self.register_buffer(name, torch.zeros(()))

    def forward(self, x, labels=None):
        self.calls += 1
        for block in self.blocks:
            x = block(x)
        if labels is not None:
            return nn.functional.mse_loss(x, labels), x
        x = self.norm(x.transpose(1, 2)).transpose(1, 2)
        self.scale.mul_(0.9).add_(0.1 * x.detach().square().mean())
        return x


def train(model, optimizer, inside, backward=torch.Tensor.backward):
    for _ in range(3):
        loss = model(X, labels=Y)[0] if inside else nn.functional.mse_loss(model(X), Y)
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        return model(X)


@on_ranks(2)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("kind", ["count", "spectral", "again", "frozen", "nan"])
def test_written_as_by_one_forward(kind, schedule):
    """The norm behind the blocks, and what the forward itself writes there, take the complete batch."""
    if (kind, schedule) == ("again", "1f1b"):
        pytest.skip("its backwards run inside of torch's schedule")
    PartialState(cpu=True)
    inside = schedule != "gpipe"
    options = Options(schedule=schedule, num_microbatches=4, loss_reduction="mean")
    plain = Model(kind)
    reset_states()
    run = Accelerator(cpu=True, parallelism_config=ParallelismConfig(pp_size=2, pp_handler=options))
    model = copy.deepcopy(plain)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = run.prepare(model, optimizer)
    expected = train(plain, torch.optim.SGD(plain.parameters(), lr=0.1), inside)
    output = train(model, optimizer, inside, run.backward)
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-10)
    compare(run.prepared_model(model).state_dict(), plain.state_dict(), 1e-10)


@on_ranks(2)
@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ("mean", "blocks.0 (Block) writes values that depend on the samples to its buffer 'mean'"),
        (
            "samples",
            "blocks.0 (Block) writes values that depend on the samples to its buffer 'count'",
        ),
        (
            "BatchNorm1d",
            "blocks.0.norm (BatchNorm1d) writes values that depend on the samples to its buffer 'running_mean'",
        ),
    ],
)
def test_statistics_of_samples_are_named(kind, named):
    PartialState(cpu=True)
    refused(lambda: Model(kind), Options(num_microbatches=2), named, lambda model: model(X))
