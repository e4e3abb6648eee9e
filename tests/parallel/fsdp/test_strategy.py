# SPDX-License-Identifier: Apache-2.0
"""FSDP2 in many settings against the plain single-process loop, in float64, to 1e-8."""

import pytest
import torch
import torch.distributed as dist
from layouts import compare
from rank_pool import on_ranks
from torch import nn
from torch.distributed.tensor import DTensor
from windows import ACCUMULATION, CLIP, token_batches, train, train_by_hand

from accelerate.checkpointing.sharded import ShardedState
from accelerate.config.fsdp import FullyShardedDataParallelPlugin as Plugin
from accelerate.core.errors import PrepareError
from accelerate.parallel.base import Bundle
from accelerate.parallel.fsdp.strategy import FullyShardedDataParallel
from accelerate.parallel.prepared import PreparedOptimizer
from accelerate.parallelism_config import ParallelismConfig
from accelerate.precision.base import Precision
from accelerate.state import PartialState

WIDTH, VOCABULARY, LENGTH = 8, 13, 5
STEPS = 10
BATCHES = token_batches(STEPS * ACCUMULATION, 8, LENGTH, VOCABULARY)
BY_CLASS = {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
pytestmark = pytest.mark.usefixtures("float64")
everywhere = on_ranks(2, thorough=[1, 4])


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 3 * WIDTH)
        self.down = nn.Linear(3 * WIDTH, WIDTH)
        self.register_buffer("scale", torch.full((1,), 0.5), persistent=False)

    def forward(self, x):
        return x + self.scale * self.down(torch.tanh(self.up(self.norm(x))))

    def reset_parameters(self):
        self.scale.fill_(0.5)


class Model(nn.Module):
    """Tied embedding and head, a frozen layer, three blocks, a module that may be left whole."""

    _no_split_modules = ("Block",)

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.extra = nn.Linear(WIDTH, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.frozen(self.extra(x)))


def make_model(seed=0):
    torch.manual_seed(seed)
    return Model()


def make_optimizer(model):
    decayed = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim <= 1]
    return torch.optim.AdamW([{"params": decayed}, {"params": rest, "weight_decay": 0.0}], lr=0.01)


def check_state(prepared, expected, what="the run"):
    state = prepared.state_dict()
    compare(state, expected, what=what)
    assert list(state) == (list(expected) if dist.get_rank() == 0 else []), what


def prepare(plugin, model, optimizer=None, parallelism=None):
    strategy = FullyShardedDataParallel(torch.device("cpu"), Precision(), plugin, parallelism)
    return strategy, strategy.prepare(Bundle([model], [optimizer] if optimizer else [], [True]))[0]


def check_run(plain, parallelism=None, steps=4, seed=0, model=None, **options):
    expected, norms = plain
    # Other ranks start from other weights: the first one's count.
    model = model or make_model(seed + PartialState().process_index)
    optimizer = make_optimizer(model)
    torch.manual_seed(seed)
    strategy, prepared = prepare(Plugin(fsdp_version=2, **options), model, optimizer, parallelism)
    model = prepared.module
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    assert {id(p) for p in trained} == {id(p) for p in model.parameters()}
    train(strategy, prepared, optimizer, BATCHES[: steps * ACCUMULATION], norms)
    check_state(prepared, expected[steps - 1])
    return strategy, prepared, optimizer


@pytest.fixture(scope="module")
def plain(float64):
    model = make_model()
    expected, norms = train_by_hand(model, make_optimizer(model), BATCHES)
    assert max(norms) > CLIP, "clipping would not be tested"
    return expected, norms


@everywhere
def test_blocks(plain):
    world = PartialState(cpu=True).num_processes
    _, prepared, _ = check_run(plain, steps=STEPS, **BY_CLASS)
    model = prepared.module
    assert model.head.weight is model.embedding.weight, "the tie is gone"
    assert all(isinstance(p, DTensor) for p in model.parameters())
    held = sum(p.to_local().numel() for p in model.parameters())
    whole = sum(p.numel() for p in model.parameters())
    assert held <= whole / world + 30


SETTINGS = {
    "one unit": {},
    # The embedding would be a unit of its own, were it not tied to the head.
    "by size, recomputed": {
        "auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 90, "activation_checkpointing": True,
    },
    "kept after the forward": {"reshard_after_forward": False, **BY_CLASS},
    "offloaded": {"cpu_offload": True, **BY_CLASS},
}  # fmt: skip


@everywhere
@pytest.mark.parametrize("what", SETTINGS)
def test_settings(what, plain):
    PartialState(cpu=True)
    check_run(plain, **SETTINGS[what])


@everywhere
def test_modules_that_are_left_whole(plain):
    PartialState(cpu=True)
    _, prepared, _ = check_run(plain, ignored_modules="extra|blocks.1.up", **BY_CLASS)
    model = prepared.module
    assert not isinstance(model.extra.weight, DTensor) and not isinstance(
        model.blocks[1].up.bias, DTensor
    )


@on_ranks(4)
def test_hybrid(plain):
    PartialState(cpu=True)
    check_run(plain, ParallelismConfig(dp_replicate_size=2, dp_shard_size=2), STEPS, **BY_CLASS)


@everywhere
def test_weights_of_rank_0_alone(plain):
    with torch.device("meta" if PartialState(cpu=True).process_index else "cpu"):
        model = make_model()
    check_run(plain, model=model, cpu_ram_efficient_loading=True, **BY_CLASS)


@everywhere
def test_weights_of_no_rank(plain):
    PartialState(cpu=True)
    with torch.device("meta"):
        model = make_model()
    # The same order of the same random numbers as in the constructors.
    check_run(plain, model=model, activation_checkpointing=True, **BY_CLASS)


@everywhere
@pytest.mark.parametrize("how", ["whole", "parts"])
def test_resume(how, plain, tmp_path):
    PartialState(cpu=True)
    expected, norms = plain
    half = STEPS // 2
    strategy, prepared, optimizer = check_run(plain, steps=half, **BY_CLASS)
    whole = (prepared.state_dict(), prepared.prepared_optimizer(optimizer).state_dict())
    write = ShardedState([prepared], [PreparedOptimizer(optimizer, prepared)]).stage(blocking=False)
    # What was taken must not change with the run that goes on.
    rest = BATCHES[half * ACCUMULATION :], norms[half:]
    train(strategy, prepared, optimizer, *rest)
    check_state(prepared, expected[-1], "second half")
    write(tmp_path)
    dist.barrier()
    fresh = make_model(seed=5)
    optimizer = make_optimizer(fresh)
    strategy, fresh = prepare(Plugin(fsdp_version=2), fresh, optimizer)
    if how == "whole":
        fresh.load_state_dict(whole[0])
        fresh.prepared_optimizer(optimizer).load_state_dict(whole[1])
    else:
        ShardedState([fresh], [PreparedOptimizer(optimizer, fresh)]).load(tmp_path, strict=True)
    check_state(fresh, expected[half - 1], "loaded")
    train(strategy, fresh, optimizer, *rest)
    check_state(fresh, expected[-1], "resumed")


@everywhere
def test_refusals():
    PartialState(cpu=True)
    stranger = torch.optim.SGD(make_model().parameters(), lr=0.1)
    with pytest.raises(PrepareError, match="not train anything"):
        prepare(Plugin(fsdp_version=2), make_model(), stranger)
