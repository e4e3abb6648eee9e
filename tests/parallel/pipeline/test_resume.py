# SPDX-License-Identifier: Apache-2.0
"""A run with dropout, saved in the middle of a window, goes on bit by bit in the same layout.

Pipelines above all: each stage draws from a stream of its own. Shards and split matrices without one, too.
"""

import logging

import pytest
import torch
from cases import cases
from pipelines import accelerator
from rank_pool import on_ranks
from torch import nn

from accelerate.config.fsdp import FullyShardedDataParallelPlugin as Plugin
from accelerate.config.parallel import PipelineParallelConfig as Options
from accelerate.config.parallel import TorchTensorParallelConfig
from accelerate.core.imports import is_torch_version
from accelerate.state import PartialState

BATCHES, SAVED_AFTER, ROWS = 8, 3, 4
pytestmark = pytest.mark.usefixtures("float64")
PLAN = TorchTensorParallelConfig(plan={"layers.*.fc1": "colwise", "layers.*.fc2": "rowwise"})
UNITS = {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "transformer_cls_names_to_wrap": ["Block"]}
TWO_A_RANK = "zbv" if is_torch_version(">=", "2.13") else "interleaved"
# Sizes, options of the pipeline, and whether backward is told the items of a loss.
LAYOUTS = {
    "pp x dp": ({"pp_size": 2, "dp_replicate_size": 2}, {}, True),
    "pp x fsdp, 1f1b": ({"pp_size": 2, "dp_shard_size": 2}, {"schedule": "1f1b"}, False),
    # torch before 2.13 has no zbv that is right.
    "pp x fsdp, two a rank, bf16": (
        {"pp_size": 2, "dp_shard_size": 2},
        {"schedule": TWO_A_RANK},
        False,
    ),
    "pp x fsdp": ({"pp_size": 2, "dp_shard_size": 2}, {}, False),
    "pp x tp, interleaved": (
        {"pp_size": 2, "tp_size": 2, "tp_handler": PLAN},
        {"schedule": "interleaved"},
        False,
    ),
    "fsdp x tp": ({"dp_shard_size": 2, "tp_size": 2, "tp_handler": PLAN}, {}, True),
    "fsdp, bf16": ({"dp_shard_size": 4}, {}, False),
}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.fc1, self.fc2, self.dropout = nn.Linear(16, 32), nn.Linear(32, 16), nn.Dropout(0.3)

    def forward(self, x):
        return x + self.dropout(self.fc2(torch.relu(self.fc1(self.norm(x)))))


class Model(nn.Module):
    """Dropout in the blocks, and after them."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Linear(8, 16)
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.norm, self.dropout, self.head = nn.LayerNorm(16), nn.Dropout(0.3), nn.Linear(16, 4)

    def forward(self, x, labels):
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.dropout(self.norm(x)))
        return nn.functional.cross_entropy(logits, labels), logits


def start(layout, seed):
    sizes, options, _ = LAYOUTS[layout]
    plugin = Plugin(fsdp_version=2, **UNITS) if "fsdp" in layout else None
    precision = "bf16" if "bf16" in layout else None
    run = accelerator(
        Options(num_microbatches=4, loss_reduction="mean", **options), plugin, precision, **sizes
    )
    torch.manual_seed(seed)
    model = Model().float() if precision else Model()
    return run, *run.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.05))


def train(run, model, optimizer, numbers, with_items):
    index, _ = run.strategy.data_shard
    for number in numbers:
        generator = torch.Generator().manual_seed(100 * number + index)
        dtype = torch.float32 if run.mixed_precision == "bf16" else None
        x = torch.randn(ROWS, 8, generator=generator, dtype=dtype)
        labels = torch.randint(4, (ROWS,), generator=generator)
        with run.accumulate(model):
            loss = model(x, labels=labels)[0]
            run.backward(loss, **({"num_items": ROWS + number} if with_items else {}))
            if run.sync_gradients:
                run.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    return loss.detach()


def parts(model, optimizer):
    """This rank's part of everything that is trained."""
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    values = [
        *model.parameters(),
        *(v for p in held for _, v in sorted(optimizer.state[p].items())),
    ]
    return [getattr(value, "_local_tensor", value).detach().clone() for value in values]


def saved(layout, folder):
    run, model, optimizer = start(layout, seed=0)
    train(run, model, optimizer, range(SAVED_AFTER), LAYOUTS[layout][2])
    assert not run.sync_gradients
    run.save_state(folder)
    return run, model, optimizer


@on_ranks(4)
@pytest.mark.parametrize(
    "layout",
    cases(
        LAYOUTS,
        thorough=[
            "pp x fsdp, 1f1b",
            "pp x fsdp",
            "fsdp, bf16",
            "fsdp x tp",
            "pp x tp, interleaved",
        ],
    ),
)
def test_it_goes_on_bit_by_bit(layout, tmp_path):
    PartialState(cpu=True)
    left, with_items = range(SAVED_AFTER, BATCHES), LAYOUTS[layout][2]
    run, model, optimizer = saved(layout, tmp_path)
    expected = train(run, model, optimizer, left, with_items)
    whole = parts(model, optimizer)
    run, model, optimizer = start(layout, seed=5)
    run.load_state(tmp_path)
    loss = train(run, model, optimizer, left, with_items)
    assert torch.equal(loss, expected)
    assert (
        max((a - b).abs().max().item() for a, b in zip(parts(model, optimizer), whole, strict=True))
        == 0.0
    )


@on_ranks(4)
def test_what_has_no_place_in_another_layout_is_dropped_with_a_word(tmp_path):
    PartialState(cpu=True)
    saved("pp x fsdp, 1f1b", tmp_path)
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("accelerate.checkpointing.loading").addHandler(handler)
    run, model, optimizer = start("pp x tp, interleaved", seed=3)
    run.load_state(tmp_path)
    train(run, model, optimizer, range(SAVED_AFTER, BATCHES), False)
    if run.is_main_process:
        assert any("pp=2, tp=2" in line and "unfinished gradients, " in line for line in said), said
