# SPDX-License-Identifier: Apache-2.0
"""One run through seven layouts on 4 ranks, each of which continues from the checkpoint of the one before it.

One process loads what the last of them saved and trains on. One loop serves all. After each layout parameters,
optimizer state, gradient norms and learning rates are those of one plain PyTorch loop over the same samples: to 1e-8
in float64. In bf16 the losses stay near.
"""

import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from layouts import compare, units_of
from states import all_ranks, reset_states
from torch.utils.data import DataLoader, Dataset

from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.config.parallel import PipelineParallelConfig, TorchContextParallelConfig
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import set_seed

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "parallel"))
from llama import Llama, LlamaConfig

BATCH, LENGTH, STEPS, ACCUMULATION, CLIP = 8, 8, 2, 2, 0.3
CONFIG = LlamaConfig(vocabulary=16, width=16, hidden=24, layers=2, heads=4, kv_heads=2, tied=True)
MICRO = PipelineParallelConfig(num_microbatches=2)
RING = TorchContextParallelConfig("alltoall")
# In the order of the run: sizes and options, the form of FSDP state or None, the data shards of ranks 0 to 3.
LAYOUTS = {
    "cp x fsdp": (
        {"cp_size": 2, "dp_shard_size": 2, "cp_handler": RING},
        "SHARDED_STATE_DICT",
        (0, 0, 1, 1),
    ),
    "pp x tp": ({"pp_size": 2, "tp_size": 2, "pp_handler": MICRO}, None, (0, 0, 0, 0)),
    "hsdp": ({"dp_replicate_size": 2, "dp_shard_size": 2}, "FULL_STATE_DICT", (0, 1, 2, 3)),
    "pp x dp": ({"pp_size": 2, "dp_replicate_size": 2, "pp_handler": MICRO}, None, (0, 1, 0, 1)),
    "fsdp x tp": ({"dp_shard_size": 2, "tp_size": 2}, "SHARDED_STATE_DICT", (0, 0, 1, 1)),
    "pp x fsdp": (
        {"pp_size": 2, "dp_shard_size": 2, "pp_handler": MICRO},
        "SHARDED_STATE_DICT",
        (0, 1, 0, 1),
    ),
    "dp x tp": ({"dp_replicate_size": 2, "tp_size": 2}, None, (0, 0, 1, 1)),
    "one process": ({}, None, (0,)),
}


class Sequences(Dataset):
    """Tokens of the entire run; the same on every rank."""

    def __init__(self):
        shape = (BATCH * ACCUMULATION * STEPS * len(LAYOUTS), LENGTH + 1)
        self.tokens = torch.randint(
            CONFIG.vocabulary, shape, generator=torch.Generator().manual_seed(1)
        )

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        row = self.tokens[index]
        return {"input_ids": row[:-1], "labels": row[1:], "position_ids": torch.arange(LENGTH)}


def make(seed):
    """Norms have another learning rate, so that the order of groups and parameters matters."""
    torch.manual_seed(seed)
    model = Llama(CONFIG)
    norms = [parameter for name, parameter in model.named_parameters() if "norm" in name]
    rest = [parameter for name, parameter in model.named_parameters() if "norm" not in name]
    optimizer = torch.optim.AdamW([{"params": norms, "lr": 0.02}, {"params": rest}], lr=0.01)
    return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.95**step)


def plain_run():
    """After each layout: parameters, optimizer state, rates; of each step the norm, of each batch the loss."""
    model, optimizer, scheduler = make(seed=0)
    states, norms, losses = [], [], []
    for number, batch in enumerate(DataLoader(Sequences(), batch_size=BATCH)):
        loss = F.cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())
        losses.append(loss.item())
        (loss / ACCUMULATION).backward()
        if number % ACCUMULATION:
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if len(norms) % STEPS == 0:
                copy = {name: value.clone() for name, value in model.state_dict().items()}
                entries = {
                    key: {k: v.clone() for k, v in entry.items()}
                    for key, entry in optimizer.state.items()
                }
                own = [
                    parameter for group in optimizer.param_groups for parameter in group["params"]
                ]
                rates = [group["lr"] for group in optimizer.param_groups]
                states.append((copy, [entries[parameter] for parameter in own], rates))
    return states, norms, losses


def start(sizes, form, precision):
    """A fresh Accelerator in this layout; the process group stays."""
    reset_states()
    plugin = units_of("Block", state_dict_type=form)
    return Accelerator(
        cpu=True,
        mixed_precision=precision,
        gradient_accumulation_steps=ACCUMULATION,
        dataloader_config=DataLoaderConfiguration(split_batches=True),
        parallelism_config=ParallelismConfig(**sizes) if sizes else None,
        fsdp_plugin=plugin if form else None,
    )


def train(accelerator, model, optimizer, scheduler, loader):
    """The loop. No layout is in it."""
    norms, losses = [], []
    for batch in loader:
        buffers = list(batch.values())
        with (
            accelerator.accumulate(model),
            accelerator.maybe_context_parallel(buffers, [1, 1, 1], no_restore_buffers=set(buffers)),
        ):
            logits = model(batch["input_ids"], position_ids=batch["position_ids"])
            loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norms.append(accelerator.clip_grad_norm_(model.parameters(), CLIP).item())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
        if len(norms) == STEPS:
            break
    return norms, losses


def check(what, accelerator, model, optimizer, expected):
    """Compare everything that a checkpoint of this layout contains with the plain loop."""
    parameters, entries, rates = expected
    if accelerator.num_processes > 1:
        state = accelerator.get_state_dict(model)
        own = accelerator.prepared_model(model).prepared_optimizer(optimizer.optimizer).state_dict()
    else:
        state, own = model.state_dict(), optimizer.state_dict()
    assert torch.allclose(
        torch.tensor([g["lr"] for g in optimizer.param_groups]), torch.tensor(rates)
    ), what
    compare(state, parameters, what=what)
    if accelerator.is_main_process:
        compare(own["state"], enumerate(entries), what=what)


def check_reading(what, accelerator, loader, shards):
    """Ranks with the same data shard read the same samples and draw the same numbers; others read and draw others."""
    set_seed(3, device_specific=True)
    mine = (
        accelerator.strategy.data_shard[0],
        next(iter(loader))["input_ids"].tolist(),
        torch.rand(()).item(),
    )
    found = all_ranks(mine)
    assert tuple(shard for shard, _, _ in found) == shards, (
        f"{what}: {[shard for shard, _, _ in found]}"
    )
    for one, (_, samples, drawn) in zip(shards, found, strict=True):
        for other, (_, others, redrawn) in zip(shards, found, strict=True):
            assert (samples == others) == (drawn == redrawn) == (one == other), (
                f"{what}: {one}, {other}: {found}"
            )


def run_layout(place, what, folder, plain, precision):
    sizes, form, shards = LAYOUTS[what]
    states, norms, losses = plain
    accelerator = start(sizes, form, precision)
    # Rank 0 initializes the weights of the first layout; the others load theirs from the checkpoint. In some of them
    # only rank 0 builds a model with storage.
    with torch.device("meta" if place % 2 and not accelerator.is_main_process else "cpu"):
        model, optimizer, scheduler = make(seed=accelerator.process_index if place == 0 else 7)
    loader = DataLoader(Sequences(), batch_size=BATCH)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    if place:
        accelerator.load_state(folder / f"after_{place - 1}")
    found = train(accelerator, model, optimizer, scheduler, loader)
    accelerator.save_state(folder / f"after_{place}")
    norms = norms[place * STEPS : (place + 1) * STEPS]
    losses = losses[place * STEPS * ACCUMULATION : (place + 1) * STEPS * ACCUMULATION]
    near = max(abs(one - other) for one, other in zip(found[1], losses, strict=True))
    if precision == "bf16":
        assert all(parameter.dtype == torch.float32 for parameter in model.parameters()), what
        assert 0 < near < 0.05, f"{what} in bf16: losses are off by {near}"
        return
    assert near <= 1e-8, f"{what}: losses are off by {near}"
    assert max(abs(one - other) for one, other in zip(found[0], norms, strict=True)) <= 1e-8, (
        f"{what}: {found[0]}"
    )
    check(what, accelerator, model, optimizer, states[place])
    if len(shards) > 1:
        check_reading(what, accelerator, loader, shards)


class Dropout(torch.nn.Module):
    """Drops half of its input, and records which half in each call."""

    def __init__(self):
        super().__init__()
        self.kept = []

    def forward(self, x):
        y = F.dropout(x, 0.5)
        self.kept.append((y != 0).tolist())
        return y


def drop(what, folder):
    """Each rank has another seed, and loads such a state from a checkpoint: tensor-parallel ranks draw the same masks.

    The dropout is before and after the sharded layers, so unsharded activations stay equal. Ranks with other data draw
    other masks.
    """
    torch.set_default_dtype(torch.float64)
    sizes, form, shards = LAYOUTS[what]
    accelerator = start(sizes, form, "no")
    torch.manual_seed(accelerator.process_index)
    model, dropout = Llama(CONFIG), Dropout()
    for layer in model.layers:
        layer.mlp_norm = torch.nn.Sequential(layer.mlp_norm, dropout)
    model.norm = torch.nn.Sequential(model.norm, dropout)
    model = accelerator.prepare(model)
    tokens = Sequences().tokens[:2, :-1]
    model(tokens)
    torch.manual_seed(accelerator.process_index)
    accelerator.save_state(folder / f"seeded {what}")
    accelerator.load_state(folder / f"seeded {what}")
    model(tokens)
    found = all_ranks(dropout.kept)
    for one, masks in zip(shards, found, strict=True):
        for other, others in zip(shards, found, strict=True):
            assert (
                len(masks) == 6
                and [a == b for a, b in zip(masks, others, strict=True)] == [one == other] * 6
            ), what


def run_chain(names, folder, precision):
    torch.set_default_dtype(torch.float64 if precision == "no" else torch.float32)
    plain = plain_run()
    for place, what in enumerate(LAYOUTS):
        if what in names:
            run_layout(place, what, folder, plain, precision)


@pytest.mark.timeout(420)
@pytest.mark.parametrize("precision", ["no", pytest.param("bf16", marks=pytest.mark.thorough)])
def test_one_run_through_seven_layouts(precision, ranks, tmp_path):
    *distributed, alone = LAYOUTS
    ranks(4).run(run_chain, distributed, tmp_path, precision, timeout=280)
    ranks(1).run(run_chain, [alone], tmp_path, precision, timeout=100)


@pytest.mark.parametrize("what", ["dp x tp", "fsdp x tp"])
def test_tensor_parallel_ranks_draw_the_same_dropout(what, ranks, tmp_path):
    ranks(4).run(drop, what, tmp_path)
