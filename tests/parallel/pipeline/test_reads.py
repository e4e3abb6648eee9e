# SPDX-License-Identifier: Apache-2.0
"""Models that read weights of other stages, in a pipeline, against the plain loop to 1e-8 in float64."""

import pytest
import torch
import torch.distributed as dist
from layouts import units_of
from pipelines import (
    GLOBAL_BATCH,
    VOCABULARY,
    accelerator,
    bart,
    batches,
    check_run,
    counted,
    own,
    refused,
    runs_in_schedule,
)
from rank_pool import on_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

from accelerate.config.parallel import PipelineParallelConfig as Options
from accelerate.state import PartialState

WIDTH = 16
TOKENS, LABELS = next(iter(batches(1, False)))
PRELOADED = ("transformers.models.bart.modeling_bart",)
pytestmark = pytest.mark.usefixtures("float64")


class Reading(nn.Module):
    """Reads before its blocks, in them and behind them what stands elsewhere, beside parameters of its own."""

    def __init__(self, seed=0, kinds=("before", "inside", "tied", "root", "lists"), reentrant=None):
        super().__init__()
        torch.manual_seed(seed)
        self.kinds, self.reentrant = kinds, reentrant
        self.root = nn.Parameter(torch.randn(WIDTH))
        self.unused = nn.Parameter(torch.randn(WIDTH))
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        # Not registered a second time: the last block reads the weight of the first.
        self.blocks[3].__dict__["other"] = self.blocks[0]
        self.head = None if "tied" in kinds else nn.Linear(WIDTH, VOCABULARY)
        self.relative = nn.Embedding(4, WIDTH)
        self.biases = nn.ParameterList(torch.randn(WIDTH) for _ in range(4))
        self.scales = nn.ParameterDict({"last": nn.Parameter(torch.randn(WIDTH))})

    def forward(self, tokens):
        x = self.embed(tokens)
        if "before" in self.kinds:
            x = x + self.relative.weight[1]
        for number, block in enumerate(self.blocks):
            if "root" in self.kinds and number in (1, 3):
                x = x + self.root
            if "lists" in self.kinds:
                x = x * self.biases[number]
            inside = "inside" in self.kinds
            if self.reentrant is None:
                x = block(x, inside)
            else:
                x = checkpoint(block, x, inside, use_reentrant=self.reentrant)
        if "lists" in self.kinds:
            x = x + self.scales["last"]
        return nn.functional.linear(x, self.embed.weight) if "tied" in self.kinds else self.head(x)


class Block(nn.Module):
    other = None

    def __init__(self):
        super().__init__()
        self.linear, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x, inside):
        x = torch.tanh(self.second(self.linear(x))).chunk(2, -1)[0]
        return (
            x
            if self.other is None or not inside
            else x + nn.functional.linear(x, self.other.linear.weight)
        )


def unseen(seed=0):
    return Reading(seed, ("root", "lists"))


def computed_again(seed=0):
    return Reading(seed, (), reentrant=False)


HALF = Options(num_microbatches=2)
SEEN = Options(num_microbatches=2, example_inputs={"tokens": TOKENS})


def counts(input_ids, labels):
    return (labels != -100).sum()


EARLY = Options(schedule="1f1b", num_microbatches=4, num_items=counts)
INSIDE = {"inside": True, "padded": True}
RUNS = {
    "seen": (Reading, SEEN, {}),
    "parameters of the root, not seen": (unseen, HALF, {}),
    "BART": (bart, EARLY, INSIDE),
}


@on_ranks(2, thorough=[4])
@pytest.mark.parametrize("what", RUNS)
def test_every_rank_a_stage(what, nproc):
    PartialState(cpu=True)
    make, options, others = RUNS[what]
    check_run(make, options, steps=4, pp_size=nproc, **others)


@on_ranks(2)
def test_blocks_that_are_computed_again():
    PartialState(cpu=True)
    check_run(computed_again, HALF, steps=2, pp_size=2)


@pytest.mark.thorough
@on_ranks(4)
@pytest.mark.parametrize("layout", ["copies", "shards"])
def test_composed(layout):
    PartialState(cpu=True)
    if layout == "copies":
        check_run(Reading, SEEN, steps=4, pp_size=2, dp_replicate_size=2)
    else:
        check_run(Reading, SEEN, steps=4, plugin=units_of("Block"), pp_size=2, dp_shard_size=2)


def reading(*kinds, **others):
    return lambda: Reading(kinds=kinds, **others)


REFUSED = {
    "before": (reading("before"), "relative.weight"),
    "inside": (reading("inside"), "blocks.0.linear.weight"),
    "tied": (reading("tied"), "embed.weight"),
    "reentrant": (reading(reentrant=True), "use_reentrant=False"),
}


@on_ranks(2)
@pytest.mark.parametrize("what", REFUSED)
def test_refusals(what):
    PartialState(cpu=True)
    make, named = REFUSED[what]
    refused(make, HALF, named, lambda model: model(TOKENS))


@on_ranks(2)
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_weights_of_micro_batches(schedule):
    """Three micro-batches of unequal numbers of labels: the weights of a schedule are not rounded."""
    PartialState(cpu=True)
    tokens, labels = next(iter(batches(1, True)))
    tokens, labels = tokens[: GLOBAL_BATCH - 2], labels[: GLOBAL_BATCH - 2]
    plain = own()
    plain(tokens, labels=labels)[0].backward()
    run = accelerator(Options(schedule=schedule, num_microbatches=3, num_items=counted), pp_size=2)
    model = own(dist.get_rank())
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
    for _ in range(2):
        # The second batch runs in the schedule.
        optimizer.step()
        optimizer.zero_grad()
        run.backward(model(tokens, labels=labels)[0], num_items=(labels != -100).sum())
    runs_in_schedule(run, model)
    for name, parameter in model.named_parameters():
        expected = plain.get_parameter(name).grad
        torch.testing.assert_close(
            parameter.grad, expected, rtol=0, atol=1e-13, msg=f"{name}: {{}}".format
        )
