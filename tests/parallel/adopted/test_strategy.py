# SPDX-License-Identifier: Apache-2.0
"""Models that are sharded before `prepare`, in one loop, against the plain loop in float64, to 1e-8."""

import functools
import itertools

import pytest
import torch
import torch.nn.functional as F
from layouts import compare_state
from rank_pool import on_ranks
from states import reset_states
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.data import DataLoader
from windows import ACCUMULATION, train_on_items, train_on_items_by_hand

from accelerate import Accelerator, DistributedDataParallelKwargs, FullyShardedDataParallelPlugin
from accelerate.core.errors import PrepareError
from accelerate.parallelism_config import ParallelismConfig
from accelerate.state import PartialState

pytestmark = pytest.mark.usefixtures("float64")
VOCABULARY, WIDTH, LENGTH, BATCH, STEPS = 13, 8, 6, 8, 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 3 * WIDTH)
        self.down = nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    """A tied head, a frozen layer, two blocks."""

    def __init__(self, seed=0):
        torch.manual_seed(seed)
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.frozen(x))


def grid():
    """Two dimensions of two ranks."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))


def by_units(model, mesh, root=True, **options):
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    if root:
        fully_shard(model, mesh=mesh, **options)


def by_layers(model, mesh, along_sequence=False):
    for block in model.blocks:
        if not along_sequence:
            parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
            continue
        # Each rank normalizes some of the tokens: its gradient of the norm is a part of the sum.
        layers = {
            "norm": SequenceParallel(use_local_output=False),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        }
        parallelize_module(block, mesh, layers)
        parallelize_module(
            block,
            mesh,
            PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1)),
        )
        parallelize_module(
            block,
            mesh,
            PrepareModuleOutput(output_layouts=Shard(1), desired_output_layouts=Replicate()),
        )


def tensor_and_fsdp(model, tp, dp):
    by_layers(model, tp)
    by_units(model, dp)


def world():
    return init_device_mesh("cpu", (PartialState().num_processes,))


# Number of ranks, how the model is sharded, the data shards of the ranks.
LAYOUTS = {
    "fsdp of 2": (2, lambda model: by_units(model, world()), (0, 1)),
    "fsdp of blocks": (2, lambda model: by_units(model, world(), root=False), (0, 1)),
    "tp": (2, lambda model: by_layers(model, world()), (0, 0)),
    "tp along the sequence": (
        2,
        lambda model: by_layers(model, world(), along_sequence=True),
        (0, 0),
    ),
    "fsdp of 4": (
        4,
        lambda model: by_units(model, world(), reshard_after_forward=False),
        (0, 1, 2, 3),
    ),
    "hsdp": (4, lambda model: by_units(model, grid()), (0, 1, 2, 3)),
    "tp x fsdp": (
        4,
        lambda model: tensor_and_fsdp(model, (mesh := grid())["inner"], mesh["outer"]),
        (0, 0, 1, 1),
    ),
    "fsdp of a slice": (4, lambda model: by_units(model, grid()["inner"]), (0, 1, 2, 3)),
    "tp of a slice": (4, lambda model: by_layers(model, grid()["outer"]), (0, 1, 0, 1)),
}


def rows(steps=STEPS):
    """Tokens, and labels of which other samples count more of."""
    tokens = torch.randint(
        VOCABULARY,
        (steps * ACCUMULATION * BATCH, LENGTH + 1),
        generator=torch.Generator().manual_seed(1),
    )
    counted = torch.arange(LENGTH) < LENGTH - torch.arange(len(tokens))[:, None] % 4
    pairs = zip(tokens, counted, strict=True)
    return [{"tokens": row[:-1], "labels": row[1:].masked_fill(~kept, -100)} for row, kept in pairs]


def loss_of(model, batch, reduction="mean"):
    return F.cross_entropy(
        model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten(), reduction=reduction
    )


def make_optimizer(model):
    """Two groups in another order than the model's."""
    norms = [p for name, p in model.named_parameters() if "norm" in name]
    rest = [p for name, p in model.named_parameters() if "norm" not in name and p.requires_grad]
    return torch.optim.AdamW([{"params": norms, "lr": 0.02}, {"params": rest}], lr=0.01)


def count_of(batch):
    return (batch["labels"] != -100).sum()


def plain_run(model, steps=STEPS):
    batches = DataLoader(rows(steps), BATCH)
    return train_on_items_by_hand(
        model, make_optimizer(model), batches, functools.partial(loss_of, reduction="sum"), count_of
    )


def train(accelerator, model, optimizer, loader):
    return train_on_items(accelerator, model, optimizer, loader, loss_of, count_of)


def fresh(**options):
    """An Accelerator; the process group stays."""
    reset_states()
    return Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATION, **options)


def check_run(accelerator, shards, model, optimizer=None):
    """Train a sharded model and compare; without an optimizer, which was made before `prepare`, one is made after."""
    rank = accelerator.process_index
    expected, norms = plain_run(Model())
    layout = [(type(p), getattr(p, "placements", None)) for p in model.parameters()]
    if optimizer is None:
        model = accelerator.prepare(model)
        optimizer = accelerator.prepare(make_optimizer(model))
    else:
        model, optimizer = accelerator.prepare(model, optimizer)
    assert [(type(p), getattr(p, "placements", None)) for p in model.parameters()] == layout
    assert accelerator.strategy.data_shard == (shards[rank], len(set(shards)))
    data = rows()
    loader = accelerator.prepare(DataLoader(data, BATCH // len(set(shards))))
    seen = [row for batch in loader for row in accelerator.gather_for_metrics(batch["tokens"])]
    assert torch.equal(torch.stack(seen), torch.stack([row["tokens"] for row in data]))
    torch.testing.assert_close(
        train(accelerator, model, optimizer, loader), norms, rtol=1e-8, atol=0
    )
    compare_state(accelerator, model, expected[-1])
    return model


@on_ranks(2, 4)
def test_layouts():
    accelerator = fresh()
    known = [row for row in LAYOUTS.items() if row[1][0] == accelerator.num_processes]
    for number, (what, (_, shard, shards)) in enumerate(known):
        accelerator, model = fresh(), Model()
        shard(model)
        check_run(accelerator, shards, model, make_optimizer(model) if number % 2 else None)
        found = accelerator.explain().find("run", "data")
        assert found == f"shard {shards[accelerator.process_index]} of {len(set(shards))}", what


PLUGIN = {"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=2)}
# In the order of one run: options of the Accelerator, and how the model is sharded before it.
CHAIN = {
    "tp x fsdp": ({}, LAYOUTS["tp x fsdp"][1]),
    "plain FSDP2": (PLUGIN, None),
    "hsdp": ({}, LAYOUTS["hsdp"][1]),
    "plain": ({}, None),
    "tp of a slice": ({}, LAYOUTS["tp of a slice"][1]),
}


@on_ranks(4)
def test_checkpoints(tmp_path):
    """Each layout continues from the checkpoint of the one before it, in the middle of the data."""
    expected, norms = plain_run(Model(), steps=len(CHAIN))
    for place, (options, shard) in enumerate(CHAIN.values()):
        accelerator = fresh(**options)
        model = Model(seed=0 if place == 0 else 7)
        if shard is not None:
            shard(model)
        model, optimizer = accelerator.prepare(model, make_optimizer(model))
        loader = accelerator.prepare(
            DataLoader(rows(len(CHAIN)), BATCH // accelerator.strategy.data_shard[1])
        )
        if place:
            accelerator.load_state(tmp_path / str(place - 1))
        found = train(accelerator, model, optimizer, itertools.islice(loader, ACCUMULATION))
        torch.testing.assert_close(found, [norms[place]], rtol=1e-8, atol=0)
        compare_state(accelerator, model, expected[place])
        accelerator.save_state(tmp_path / str(place))
        accelerator.save_model(model, tmp_path / f"model_{place}")


@on_ranks(2)
def test_precision():
    """A unit's own policy casts, and nothing else does; without one the forward is under autocast."""
    for policy, casts in (
        (None, True),
        (MixedPrecisionPolicy(torch.bfloat16, torch.float32), False),
    ):
        accelerator = fresh(mixed_precision="bf16")
        model = Model().to(torch.float32)
        by_units(model, world(), **({} if policy is None else {"mp_policy": policy}))
        seen = []
        model.frozen.register_forward_hook(
            lambda *_, seen=seen: seen.append(torch.is_autocast_enabled("cpu"))
        )
        model = accelerator.prepare(model)
        tokens = torch.arange(LENGTH)[None]
        accelerator.backward(model(tokens).float().sum())
        assert seen == [casts], policy
        assert {p.grad.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
        assert (
            accelerator.explain()
            .find("model: Model", "computes in")
            .startswith("bf16" if casts else "bfloat16")
        )


def replicate_embedding(model, mesh):
    model.embedding.weight = nn.Parameter(
        distribute_tensor(model.embedding.weight.detach(), mesh, [Replicate()])
    )


def both(model, mesh):
    fully_shard(model.blocks[0], mesh=mesh)
    parallelize_module(model.blocks[1], mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


REFUSED = {
    "nothing is sharded": ({}, replicate_embedding, "no parameter is sharded over its dimension 0"),
    "one dimension is both": (
        {},
        both,
        r"the gradient of blocks\.1\.up\.weight would not be an average",
    ),
    "other sizes": (
        {"parallelism_config": {"tp_size": 2}},
        by_units,
        r"has 1 data shards: shard the model on",
    ),
    "replicas": (
        {"parallelism_config": {"dp_replicate_size": 2}},
        by_units,
        "requests DistributedDataParallel",
    ),
    "pipeline": ({"parallelism_config": {"pp_size": 2}}, by_units, "requests pipeline parallel"),
    "options of DDP": (
        {"kwargs_handlers": [DistributedDataParallelKwargs()]},
        by_units,
        "DistributedDataParallelKwargs",
    ),
    "fp8": ({"mixed_precision": "fp8"}, by_units, "requests mixed_precision='fp8', which starts"),
}


class Both:
    """Two optimizers in one."""

    def __init__(self, optimizers):
        self.step = lambda: [optimizer.step() for optimizer in optimizers]
        self.zero_grad = lambda: [optimizer.zero_grad() for optimizer in optimizers]


@on_ranks(2)
def test_two_optimizers_before_and_after_their_model():
    expected, norms = plain_run(Model(), steps=2)
    for number in range(3):
        accelerator, model = fresh(), Model()
        by_layers(model, world())
        optimizers = [
            torch.optim.AdamW(g["params"], lr=g["lr"]) for g in make_optimizer(model).param_groups
        ]
        if number == 0:
            optimizers = accelerator.prepare(*optimizers)
        model = accelerator.prepare(model)
        if number == 1:
            optimizers = [accelerator.prepare(optimizer) for optimizer in optimizers]
        elif number == 2:
            optimizers = [accelerator.prepare_optimizer(optimizer) for optimizer in optimizers]
        loader = accelerator.prepare(DataLoader(rows(steps=2), BATCH))
        torch.testing.assert_close(
            train(accelerator, model, Both(optimizers), loader), norms, rtol=1e-8, atol=0
        )
        compare_state(accelerator, model, expected[-1])


@on_ranks(2)
def test_refusals():
    for options, shard, text in REFUSED.values():
        sizes = options.get("parallelism_config")
        accelerator = fresh(
            **(options | ({"parallelism_config": ParallelismConfig(**sizes)} if sizes else {}))
        )
        model = Model()
        shard(model, world())
        with pytest.raises(PrepareError, match=text):
            accelerator.prepare(model)
    accelerator, model = fresh(), Model()
    accelerator.prepare(DataLoader(rows(), BATCH))
    by_layers(model, world())
    with pytest.raises(PrepareError, match=r"2 data shards, but Model, .*has 1"):
        accelerator.prepare(model)
    with torch.device("meta"):
        model = Model()
    by_units(model, world())
    with pytest.raises(PrepareError, match=r"embedding\.weight of .*Model .*meta device"):
        fresh().prepare(model)


@on_ranks(2)
def test_parameters_that_are_added():
    """What is added after `fully_shard` is plain: made equal, and averaged."""
    accelerator, model = fresh(), Model()
    by_units(model, world())
    torch.manual_seed(accelerator.process_index)
    model.frozen = nn.Sequential(model.frozen, nn.Linear(WIDTH, WIDTH))
    model = accelerator.prepare(model)
    accelerator.backward(model(torch.full((1, LENGTH), accelerator.process_index)).square().sum())
    for tensor in (model.frozen[1].weight.detach(), model.frozen[1].weight.grad):
        assert torch.equal(*accelerator.gather(tensor[None]))
    matrices = [
        parameter
        for parameter in model.parameters()
        if parameter.ndim == 2 and parameter.requires_grad
    ]
    accelerator.prepare(torch.optim.Muon(matrices)).step()
    assert all(isinstance(p, DTensor) for p in model.blocks.parameters())
