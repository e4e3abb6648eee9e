# SPDX-License-Identifier: Apache-2.0
"""DDP, FSDP2 and TP, compiled entirely and by regions, against the plain loop; no graph after the first window."""

import sys
from pathlib import Path

import pytest
import torch
from cases import pairs
from layouts import units_of
from rank_pool import on_ranks
from torch import nn

from accelerate.config.parallel import TorchTensorParallelConfig
from accelerate.config.training import TorchDynamoPlugin
from accelerate.core.errors import PrepareError
from accelerate.core.imports import is_torch_version
from accelerate.parallel.base import Bundle
from accelerate.parallel.compile import Compile
from accelerate.parallel.ddp.strategy import DataParallel
from accelerate.parallel.fsdp.fsdp1 import FullyShardedDataParallel1
from accelerate.parallel.fsdp.strategy import FullyShardedDataParallel
from accelerate.parallel.tensor.strategy import TensorParallel
from accelerate.parallelism_config import ParallelismConfig
from accelerate.precision.base import Precision
from accelerate.state import PartialState

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "parallel"))
from llama import Llama, LlamaConfig

CPU = torch.device("cpu")
PRELOADED = ("torch._inductor.compile_fx",)
pytestmark = pytest.mark.usefixtures("float64")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return torch.tanh(self.linear(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inlet = nn.Linear(4, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        x = self.inlet(x)
        for block in self.blocks:
            x = block(x)
        return x


def make():
    torch.manual_seed(0)
    model = Model()
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def make_llama():
    torch.manual_seed(0)
    model = Llama(LlamaConfig(vocabulary=16, width=16, hidden=24, layers=3))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def windows(make):
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):
        if make is make_llama:
            yield [torch.randint(16, (4, 6), generator=generator) for _ in range(2)]
        else:
            yield [torch.randn(4, 4, generator=generator) for _ in range(2)]


def plain(make):
    model, optimizer = make()
    for window in windows(make):
        for x in window:
            model(x).square().mean().div(2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def compiled(strategy, regional, backend, make):
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    strategy.transforms = (
        Compile(TorchDynamoPlugin(backend=backend, use_regional_compilation=regional)),
    )
    model, optimizer = make()
    prepared = strategy.prepare(Bundle([model], [optimizer], [True]))[0]
    model = prepared.module
    index, count = strategy.data_shard
    for number, (first, second) in enumerate(windows(make)):
        with prepared.no_sync():
            strategy.backward(model(first.chunk(count)[index]).square().mean() / 2)
        strategy.backward(model(second.chunk(count)[index]).square().mean() / 2)
        optimizer.step()
        optimizer.zero_grad()
        if number == 0:
            graphs = counters["stats"]["unique_graphs"]
            assert graphs > 0, "nothing was compiled"
    assert counters["stats"]["unique_graphs"] == graphs, (
        strategy.name,
        regional,
        graphs,
        counters["stats"],
    )
    return prepared.state_dict()


def check(strategy, found, expected):
    for name, value in found.items():
        torch.testing.assert_close(
            value, expected[name], rtol=0, atol=1e-8, msg=f"{strategy.name} {name}"
        )
    assert PartialState().process_index or len(found) == len(expected)


@on_ranks(2)
@pytest.mark.parametrize(
    "backend", [pytest.param("eager", marks=pytest.mark.thorough), "aot_eager"]
)
@pytest.mark.parametrize(
    "layout, regional",
    pairs(["DDP", "FSDP2"], [False, True], usual=[("DDP", False), ("FSDP2", True)]),
)
def test_data_parallel(layout, regional, backend):
    PartialState(cpu=True)
    is_sharded = layout == "FSDP2"
    strategy = (
        FullyShardedDataParallel(CPU, Precision(), units_of("Block"))
        if is_sharded
        else DataParallel(CPU, Precision())
    )
    check(strategy, compiled(strategy, regional, backend, make), plain(make))


@on_ranks(2)
@pytest.mark.parametrize(
    "version, recompute, regional", [(1, False, False), (1, True, True), (2, True, False)]
)
def test_losses_from_the_first_step_on(version, recompute, regional):
    PartialState(cpu=True)
    torch._dynamo.reset()
    plugin = units_of(
        "Block",
        version=version,
        activation_checkpointing=recompute,
        use_orig_params=version == 1 or None,
    )
    kind = FullyShardedDataParallel1 if version == 1 else FullyShardedDataParallel
    strategy = kind(CPU, Precision(), plugin)
    strategy.transforms = (
        Compile(TorchDynamoPlugin(backend="aot_eager", use_regional_compilation=regional)),
    )
    (model, optimizer), (plain, step) = make(), make()
    prepared = strategy.prepare(Bundle([model], [optimizer], [True]))[0]
    for x, _ in windows(make):
        loss, expected = prepared.module(x).square().mean(), plain(x).square().mean()
        torch.testing.assert_close(loss, expected, rtol=0, atol=1e-8)
        strategy.backward(loss)
        expected.backward()
        for each in (optimizer, step):
            each.step()
            each.zero_grad()


@on_ranks(2)
@pytest.mark.parametrize(
    "regional",
    [pytest.param(False, marks=pytest.mark.thorough), True],
    ids=["entirely", "by regions, along the sequence"],
)
def test_tensor_parallel(regional):
    PartialState(cpu=True)
    options = TorchTensorParallelConfig(sequence_parallel=regional)
    strategy = TensorParallel(CPU, Precision(), ParallelismConfig(tp_size=2, tp_handler=options))
    if is_torch_version("<", "2.12"):
        with pytest.raises(PrepareError, match="wrong gradients in compiled models"):
            compiled(strategy, regional, "aot_eager", make_llama)
        return
    check(strategy, compiled(strategy, regional, "aot_eager", make_llama), plain(make_llama))
    # Three blocks are one graph; the first of them also splits the sequence, which makes it a second one.
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert graphs == (5 if regional else 1), graphs
