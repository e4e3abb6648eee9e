# SPDX-License-Identifier: Apache-2.0
"""Each rank: DDP and FSDP2, compiled whole and by regions, against the plain loop; no graph after the first window."""

import itertools

import torch
from torch import nn
from torch._dynamo.utils import counters

from accelerate.config.fsdp import FullyShardedDataParallelPlugin
from accelerate.config.training import TorchDynamoPlugin
from accelerate.parallel.base import Bundle
from accelerate.parallel.compile import Compile
from accelerate.parallel.ddp import DataParallel
from accelerate.parallel.fsdp2 import FullyShardedDataParallel
from accelerate.precision.base import Precision
from accelerate.state import PartialState

CPU = torch.device("cpu")


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


def windows():
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):
        yield [torch.randn(4, 4, generator=generator) for _ in range(2)]


def plain():
    model, optimizer = make()
    for window in windows():
        for x in window:
            model(x).square().mean().div(2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def compiled(strategy, regional, backend):
    torch._dynamo.reset()
    counters.clear()
    strategy.transforms = (Compile(TorchDynamoPlugin(backend=backend, use_regional_compilation=regional)),)
    model, optimizer = make()
    model = strategy.prepare(Bundle([model], [optimizer], [True])).models[0]
    index, count = strategy.data_shard
    for number, (first, second) in enumerate(windows()):
        with strategy.no_sync(model):
            strategy.backward(model(first.chunk(count)[index]).square().mean() / 2)
        strategy.backward(model(second.chunk(count)[index]).square().mean() / 2)
        optimizer.step()
        optimizer.zero_grad()
        if number == 0:
            graphs = counters["stats"]["unique_graphs"]
            assert graphs > 0, "nothing was compiled"
    assert counters["stats"]["unique_graphs"] == graphs, (strategy.name, regional, graphs, counters["stats"])
    return strategy.state_dict(model)


def main():
    state = PartialState(cpu=True)
    torch.set_default_dtype(torch.float64)
    expected = plain()
    plugin = {
        "fsdp_version": 2,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "transformer_cls_names_to_wrap": ["Block"],
    }
    for regional, backend in itertools.product((False, True), ("eager", "aot_eager")):
        ddp = DataParallel(CPU, Precision())
        fsdp = FullyShardedDataParallel(CPU, Precision(), FullyShardedDataParallelPlugin(**plugin))
        for strategy in (ddp, fsdp):
            found = compiled(strategy, regional, backend)
            for name, value in found.items():
                torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-8, msg=f"{strategy.name} {name}")
            assert state.process_index or len(found) == len(expected)
    print("all equal")


if __name__ == "__main__":
    main()
