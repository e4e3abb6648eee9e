# SPDX-License-Identifier: Apache-2.0
"""Who draws random numbers in training, where regions of a plan begin and end, and what a rank's stream gives."""

from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters

from accelerate.core.errors import PrepareError
from accelerate.parallel.compile import compile_regions
from accelerate.parallel.tensor import plan as tensor_plan
from accelerate.parallel.tensor import random as tensor_random
from accelerate.parallel.tensor.random import draws
from accelerate.utils import is_torch_version


class Rated(nn.Module):
    def __init__(self, **rates):
        super().__init__()
        for name, rate in rates.items():
            setattr(self, name, rate)

    def forward(self, x):
        return F.dropout(x, self.attention_dropout, self.training)


class Noisy(nn.Module):
    def forward(self, x):
        return F.dropout(x + torch.randn_like(x), 0.1, self.training)


class Silent(nn.Module):
    def __init__(self, rate=0.0):
        super().__init__()
        self.dropout = nn.Dropout(rate)
        self.weight = torch.randn(2)

    def _init_weights(self):
        self.weight = torch.rand_like(self.weight)

    def forward(self, x):
        return self.dropout(F.scaled_dot_product_attention(x, x, x, dropout_p=0.0, is_causal=True))


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (nn.Dropout(0.1), True),
        (nn.AlphaDropout(0.1), True),
        (nn.Dropout(0.0), False),
        (nn.RReLU(), True),
        (nn.Linear(2, 2), False),
        (nn.MultiheadAttention(2, 1, dropout=0.1), True),
        (nn.MultiheadAttention(2, 1), False),
        (Rated(attention_dropout=0.1), True),
        (Rated(attention_dropout=0.0), False),
        (Rated(attention_dropout=0.0, drop_path=1), True),
        # Without a rate of its own: `random_modules` names it.
        (Noisy(), False),
        # What its child drops is the child's.
        (Silent(0.5), False),
    ],
)
def test_what_draws(module, expected):
    assert draws(module) is expected


def test_random_modules_are_found_or_named(monkeypatch):
    model = nn.ModuleList([nn.Dropout(0.1), nn.ModuleDict({"noise": Silent(), "rest": nn.Linear(2, 2)})])
    given = []
    monkeypatch.setattr(tensor_random, "add_regions", lambda *arguments: given.append(arguments[3]))
    ranks = mock.Mock(device_type="cpu", get_local_rank=lambda: 0)
    for named in (None, ["1.noi*"], ["1.noise"], ["*.noise"], []):
        tensor_random.separate_streams(model, {}, ranks, named)
    assert given == [[model[0]], [model[1]["noise"]], [model[1]["noise"]], [model[1]["noise"]]]


def test_what_draws_in_a_model_of_transformers():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    for rate in (0.0, 0.1):
        config = transformers.LlamaConfig(**sizes, vocab_size=8, num_key_value_heads=1, attention_dropout=rate)
        model = transformers.LlamaForCausalLM(config)
        found = [name for name, module in model.model.layers.named_modules() if draws(module)]
        assert found == (["0.self_attn"] if rate else [])


def streams():
    return [tensor_random.RankStream(rank, "cpu") for rank in range(2)]


def test_ranks_draw_apart_inside_and_alike_outside():
    torch.manual_seed(5)
    begin, found = torch.get_rng_state(), []
    for rank, stream in enumerate(streams()):
        torch.set_rng_state(begin)
        drawn = {"before": torch.rand(64)}
        for number in range(2):
            stream.enter()
            drawn[f"inside {number}"] = torch.rand(64)
            # Another layer that is split by columns: the same region.
            stream.enter()
            drawn[f"inside {number} again"] = torch.rand(64 * (1 + rank))[:64]
            stream.leave()
            stream.leave()
            drawn[f"behind {number}"] = torch.rand(64)
        found.append(drawn)
    first, second = found
    for name, numbers in first.items():
        assert torch.equal(numbers, second[name]) is not name.startswith("inside"), name
    everything = [*first.values(), *(numbers for name, numbers in second.items() if name.startswith("inside"))]
    for at, numbers in enumerate(everything):
        assert not any(torch.equal(numbers, other) for other in everything[:at])


def test_a_stream_that_was_restored_is_not_left_again():
    stream, _ = streams()
    torch.manual_seed(5)
    before = torch.get_rng_state()
    stream.enter()
    inside = torch.get_rng_state()
    # As activation checkpointing does it, behind a region that it has only entered.
    torch.set_rng_state(before)
    stream.leave()
    assert torch.equal(torch.get_rng_state(), before)
    stream.enter()
    assert torch.equal(torch.get_rng_state(), inside)
    stream.leave()
    stream.enter()
    torch.set_rng_state(inside)
    with pytest.raises(PrepareError, match="Checkpoint all of them, or what is between them"):
        stream.leave()


class Recorded(tensor_random.RankStream):
    """Says what is entered and left."""

    def __init__(self, told):
        super().__init__(0, "cpu")
        self.enter, self.leave = (lambda: told.append("enter")), (lambda: told.append("leave"))


class Step(nn.Linear):
    """A layer that tells that it computes."""

    def __init__(self, name, told):
        super().__init__(4, 4)
        self.name, self.told = name, told

    def forward(self, x):
        self.told.append(self.name)
        return super().forward(x)


class Chain(nn.Module):
    """Its children, in order, those of a list one after another; drops where the name says so."""

    def __init__(self, **children):
        super().__init__()
        for name, child in children.items():
            setattr(self, name, child)

    def forward(self, x):
        for child in self.children():
            for part in child if isinstance(child, nn.ModuleList) else (child,):
                x = part(x)
        return x


def told_of(build, plan):
    told = []
    model = build(lambda name: Step(name, told))
    found = tensor_plan.match_plan(model, plan)
    tensor_random.add_regions(model, found, Recorded(told))
    model(torch.zeros(1, 4))
    trained, told[:] = list(told), []
    model.eval()
    model(torch.zeros(1, 4))
    assert not {"enter", "leave"} & set(told), "switched in evaluation"
    return trained


def test_regions_end_where_parts_are_summed_up_and_with_their_owner():
    # The two ends stand in different modules of a block, as in BERT; the owner is the block.
    def build(step):
        attention = Chain(own=Chain(q=step("q"), k=step("k")), out=Chain(dense=step("o"), drop=nn.Dropout()))
        return Chain(
            attention=attention, up=Chain(dense=step("up")), down=Chain(dense=step("down")), head=step("head")
        )

    plan = {
        "attention.own.q": "colwise", "attention.own.k": "colwise", "attention.out.dense": "rowwise",
        "up.dense": "colwise", "down.dense": "rowwise",
    }  # fmt: skip
    # The attention's own end comes behind its dropout; the row of the attention is one of the block's too.
    attention = ["q", "enter", "k", "enter", "leave", "leave", "o", "leave"]
    assert told_of(build, plan) == [*attention, "up", "enter", "leave", "down", "head", "leave"]


def test_nothing_is_entered_where_nothing_draws_or_no_row_follows():
    def build(step):
        blocks = [Chain(up=step("up"), drop=nn.Dropout(rate), down=step("down")) for rate in (0.5, 0.0)]
        return Chain(layers=nn.ModuleList(blocks), head=step("head"), drop=nn.Dropout())

    told = told_of(build, {"layers.*.up": "colwise", "layers.*.down": "rowwise", "head": "colwise"})
    assert told == ["up", "enter", "leave", "down", "leave", "up", "down", "head"]


def test_layers_of_one_list_are_a_region():
    def build(step):
        return Chain(parts=nn.ModuleList([step("up"), nn.Dropout(), step("down")]), last=step("last"))

    told = told_of(build, {"parts.0": "colwise", "parts.2": "rowwise"})
    assert told == ["up", "enter", "leave", "down", "last", "leave"]


def test_a_block_of_a_split_sequence_is_one_region():
    def build(step):
        blocks = [Chain(up=step("up"), down=step("down"), drop=nn.Dropout(rate)) for rate in (0.5, 0.5, 0.0)]
        return Chain(drop=nn.Dropout(), layers=nn.ModuleList(blocks), norm=step("norm"), head=step("head"))

    plan = {
        "layers.*.up": "colwise", "layers.*.down": "rowwise_sequence", "layers.0": "sequence_split",
        "norm": "sequence_parallel_gather",
    }  # fmt: skip
    block = ["enter", "up", "down", "leave"]
    assert told_of(build, plan) == [*block, *block, "up", "down", "norm", "head"]


def test_a_region_ends_with_an_exception():
    stream, _ = streams()
    model = Chain(up=nn.Linear(4, 4), drop=nn.Dropout(), down=nn.Linear(4, 4))
    tensor_random.add_regions(model, tensor_plan.match_plan(model, {"up": "colwise", "down": "rowwise"}), stream)
    torch.manual_seed(5)
    model.drop.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(torch.zeros(1, 4))
    assert torch.initial_seed() == 5


@pytest.mark.skipif(is_torch_version("<", "2.12"), reason="torch 2.11 does not compile these blocks")
def test_equal_blocks_stay_one_to_the_compiler():
    found = []
    for layers in (2, 4):
        torch._dynamo.reset()
        counters.clear()
        blocks = [Chain(up=nn.Linear(4, 4), drop=nn.Dropout(), down=nn.Linear(4, 4)) for _ in range(layers)]
        model = Chain(layers=nn.ModuleList(blocks))
        plan = tensor_plan.match_plan(model, {"layers.*.up": "colwise", "layers.*.down": "rowwise"})
        tensor_random.add_regions(model, plan, tensor_random.RankStream(0, "cpu"))
        torch.manual_seed(5)
        expected = model(torch.ones(1, 4))
        compiled = compile_regions(model, backend="eager")
        torch.manual_seed(5)
        assert torch.equal(compiled(torch.ones(1, 4)), expected)
        found.append(counters["stats"]["unique_graphs"])
    assert found[0] == found[1] > 0, found
