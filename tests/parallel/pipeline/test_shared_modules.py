# SPDX-License-Identifier: Apache-2.0
"""Modules that are registered under several names, in a pipeline, against the plain loop in float64."""

import pytest
import torch
from pipelines import VOCABULARY, batches, check_run
from rank_pool import on_ranks
from torch import nn

from accelerate.config.parallel import PipelineParallelConfig as Options
from accelerate.state import PartialState

WIDTH = 16
TOKENS = next(iter(batches(1, False)))[0]
pytestmark = pytest.mark.usefixtures("float64")


class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.linspace(0.5, 1.5, WIDTH, dtype=torch.float64))

    def forward(self, x):
        return x * self.table


class Block(nn.Module):
    def __init__(self, table):
        super().__init__()
        self.table, self.linear = table, nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + torch.tanh(self.linear(self.table(x)))


class Shared(nn.Module):
    """One table for all blocks; the embedding, a block and the head have a second name, which may be the one used."""

    def __init__(self, seed=0, names=("embed", "blocks", "head")):
        super().__init__()
        torch.manual_seed(seed)
        table = Table()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(table) for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.second = nn.ModuleDict({"head": self.head, "embed": self.embed})
        self.first_block, self.embedding = self.blocks[0], self.embed

    def forward(self, tokens):
        x = self.first_block(self.embedding(tokens))
        for block in self.blocks[1:]:
            x = block(x)
        return self.second["head"](x)


@on_ranks(2)
@pytest.mark.parametrize("inputs", [None, {"tokens": TOKENS}])
def test_modules_with_several_names(inputs):
    PartialState(cpu=True)
    options = Options(num_microbatches=2, example_inputs=inputs)
    run, model, _, plain = check_run(Shared, options, steps=4, pp_size=2)
    state = run.get_state_dict(model)
    assert not run.is_main_process or state.keys() == plain.state_dict().keys()
