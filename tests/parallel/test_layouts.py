# SPDX-License-Identifier: Apache-2.0
"""One unchanged loop in each layout of 4 ranks, against the plain loop in float64, to 1e-8."""

import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from cases import cases
from layouts import compare_state, units_of
from rank_pool import on_ranks
from states import reset_states
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Dataset

from accelerate import Accelerator
from accelerate.config.parallel import TorchTensorParallelConfig
from accelerate.config.training import TorchDynamoPlugin
from accelerate.parallelism_config import ParallelismConfig

sys.path.append(str(Path(__file__).parents[2] / "examples" / "parallel"))
from llama import Llama, LlamaConfig

BATCH, LENGTH, STEPS, ACCUMULATION, CLIP = 8, 6, 10, 2, 0.3
pytestmark = pytest.mark.usefixtures("float64")
CONFIG = LlamaConfig(vocabulary=16, width=16, hidden=24, layers=2)
# What each layout asks for: sizes, FSDP or not, options of tensor parallelism.
LAYOUTS = {
    "dp x tp": ({"dp_replicate_size": 2, "tp_size": 2}, False, {}),
    "fsdp x tp": ({"dp_shard_size": 2, "tp_size": 2}, True, {}),
    "hsdp": ({"dp_replicate_size": 2, "dp_shard_size": 2}, True, {}),
    "tp": ({"tp_size": 4}, False, {}),
    "tp, sequence and loss": (
        {"tp_size": 4},
        False,
        {"sequence_parallel": True, "loss_parallel": True},
    ),
    "fsdp x tp, sequence": ({"dp_shard_size": 2, "tp_size": 2}, True, {"sequence_parallel": True}),
    "fsdp x tp, loss": ({"dp_shard_size": 2, "tp_size": 2}, True, {"loss_parallel": True}),
    "fsdp": ({"dp_shard_size": 4}, True, {}),
}


class Sequences(Dataset):
    """Tokens; the same on every rank."""

    def __init__(self):
        generator = torch.Generator().manual_seed(1)
        shape = (BATCH * ACCUMULATION * STEPS, LENGTH + 1)
        self.tokens = torch.randint(CONFIG.vocabulary, shape, generator=generator)

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return {"input_ids": self.tokens[index, :-1], "labels": self.tokens[index, 1:]}


def make(seed=0, tied=False):
    torch.manual_seed(seed)
    model = Llama(LlamaConfig(**{**vars(CONFIG), "tied": tied}))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.95**step)


def loss_of(model, batch, inside):
    """The loss that the model computes itself, or the same outside of it."""
    if inside:
        return model(**batch)[0]
    return F.cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())


def plain(steps=STEPS, tied=False):
    model, optimizer, scheduler = make(tied=tied)
    losses = []
    for number, batch in enumerate(DataLoader(Sequences(), batch_size=BATCH)):
        if number == steps * ACCUMULATION:
            break
        loss = loss_of(model, batch, inside=True)
        losses.append(loss.item())
        (loss / ACCUMULATION).backward()
        if number % ACCUMULATION:
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return {name: value.clone() for name, value in model.state_dict().items()}, losses


def start(layout, precision="no", compiled=False):
    """A fresh Accelerator in this layout; the process group stays."""
    reset_states()
    sizes, fsdp, options = layout
    parallelism = (
        ParallelismConfig(**sizes, tp_handler=TorchTensorParallelConfig(**options))
        if sizes
        else None
    )
    return Accelerator(
        cpu=True,
        mixed_precision=precision,
        gradient_accumulation_steps=ACCUMULATION,
        parallelism_config=parallelism,
        fsdp_plugin=units_of("Block") if fsdp else None,
        dynamo_plugin=TorchDynamoPlugin(backend="aot_eager", use_regional_compilation=True)
        if compiled
        else None,
    )


def prepared(accelerator, seed, tied=False):
    model, optimizer, scheduler = make(seed, tied)
    loader = DataLoader(Sequences(), batch_size=BATCH // accelerator.strategy.data_shard[1])
    # Prepared schedulers move once for each part of the data, as the API has it.
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step, parts=accelerator.strategy.data_shard[1]: 0.95 ** (step // parts)
    )
    return accelerator.prepare(model, optimizer, scheduler, loader)


def train(accelerator, parts, steps=STEPS, inside=True):
    model, optimizer, scheduler, loader = parts
    losses = []
    for number, batch in enumerate(loader):
        if number == steps * ACCUMULATION:
            break
        with accelerator.accumulate(model):
            loss = loss_of(model, batch, inside)
            mean = (
                accelerator.gather_for_metrics(loss.detach().reshape(1))
                if inside
                else loss.detach()
            )
            losses.append(mean.mean())
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return losses


def check_share(accelerator, model, what):
    """What this rank holds of the model, in parameters: its part of all that is split or sharded, and the norms."""
    held = sum(
        p.to_local().numel() if isinstance(p, DTensor) else p.numel() for p in model.parameters()
    )
    whole = sum(p.numel() for p in model.parameters())
    layout = accelerator.parallelism_config
    ranks = layout.dp_shard_size * layout.tp_size
    norms = sum(p.numel() for p in model.parameters() if p.ndim == 1)
    assert held <= whole / ranks + norms, f"{what}: a rank holds {held} of {whole} parameters"
    return held / whole


def check_overflow(what, accelerator, model, optimizer):
    """A gradient that is not finite in one rank's part leaves the step out on all of them."""
    before = [local(parameter).clone() for parameter in model.parameters()]
    accelerator.backward(model(Sequences().tokens[:4, :-1]).square().mean())
    if accelerator.process_index == 3:
        local(next(p for p in reversed(list(model.parameters())) if local(p).numel()).grad).fill_(
            float("inf")
        )
    optimizer.step()
    assert accelerator.optimizer_step_was_skipped, what
    assert all(
        torch.equal(local(p), former) for p, former in zip(model.parameters(), before, strict=True)
    ), what


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@pytest.fixture(scope="module")
def references(float64):
    return {steps: plain(steps) for steps in (STEPS, 4)}


@on_ranks(4)
@pytest.mark.parametrize("what", LAYOUTS)
def test_one_loop_in_every_layout(what, references):
    layout = LAYOUTS[what]
    # Options of tensor parallelism: a shorter run of a layout that has its long one.
    steps = 4 if layout[2] else STEPS
    inside = list(LAYOUTS).index(what) % 3 < 2
    expected, losses = references[steps]
    accelerator = start(layout)
    # Other ranks start from other weights: the first one's count.
    parts = prepared(accelerator, seed=accelerator.process_index)
    check_share(accelerator, parts[0], what)
    found = train(accelerator, parts, steps, inside=inside)
    if inside:
        assert max(abs(a.item() - b) for a, b in zip(found, losses, strict=True)) < 1e-9
    compare_state(accelerator, parts[0], expected)


@on_ranks(4)
@pytest.mark.parametrize("what", ["tp", "fsdp x tp, loss"])
def test_tied(what):
    expected, _ = plain(steps=4, tied=True)
    accelerator = start(LAYOUTS[what])
    parts = prepared(accelerator, seed=accelerator.process_index, tied=True)
    train(accelerator, parts, steps=4)
    compare_state(accelerator, parts[0], expected)


@on_ranks(4)
@pytest.mark.parametrize("into", ["fsdp", "tp"])
def test_what_one_layout_has_saved_another_loads(into, tmp_path):
    """Parameters and optimizer state, and it trains on."""
    accelerator = start(LAYOUTS["fsdp x tp"])
    parts = prepared(accelerator, seed=0)
    train(accelerator, parts, steps=4)
    accelerator.save_state(tmp_path)
    saved = accelerator.prepared_model(parts[0]).prepared_optimizer(parts[1].optimizer).state_dict()
    expected, _ = plain(steps=4)
    accelerator = start(LAYOUTS[into])
    parts = prepared(accelerator, seed=5)
    accelerator.load_state(tmp_path)
    model, optimizer = parts[0], parts[1].optimizer
    compare_state(accelerator, model, expected)
    own = accelerator.prepared_model(model).prepared_optimizer(optimizer).state_dict()
    if accelerator.is_main_process:
        torch.testing.assert_close(own["state"], saved["state"], rtol=0, atol=0)
        assert own["param_groups"][0]["lr"] == saved["param_groups"][0]["lr"]
    train(accelerator, parts, steps=1)


@on_ranks(4)
@pytest.mark.thorough  # test_compile_layouts.py compiles each layout
def test_compiled():
    """Compiled by regions under both at once, with nothing compiled after the first window."""
    expected, _ = plain(steps=3)
    accelerator = start(LAYOUTS["fsdp x tp"], compiled=True)
    parts = prepared(accelerator, seed=accelerator.process_index)
    train(accelerator, parts, steps=1)
    counts = torch._dynamo.utils.counters["stats"]
    graphs = counts["unique_graphs"]
    train(
        accelerator, (*parts[:-1], accelerator.skip_first_batches(parts[-1], ACCUMULATION)), steps=2
    )
    assert graphs > 0 and counts["unique_graphs"] == graphs, counts
    compare_state(accelerator, parts[0], expected)


@on_ranks(4)
@pytest.mark.parametrize(
    ("precision", "what"),
    cases(
        [
            *(("bf16", what) for what in ("fsdp x tp, sequence", "tp, sequence and loss")),
            *(("fp16", what) for what in ("tp", "fsdp x tp", "hsdp")),
        ],
        thorough=[("bf16", "tp, sequence and loss"), ("fp16", "tp"), ("fp16", "hsdp")],
    ),
)
def test_low_precision(precision, what):
    """bf16 and fp16 compute near what fp32 does."""
    torch.set_default_dtype(torch.float32)
    _, losses = plain(steps=5)
    accelerator = start(LAYOUTS[what], precision)
    parts = prepared(accelerator, seed=accelerator.process_index)
    found = train(accelerator, parts, steps=5)
    assert all(p.dtype == torch.float32 for p in parts[0].parameters())
    off = max(abs(a.item() - b) for a, b in zip(found, losses, strict=False))
    assert 0 < off < 0.05
    if precision == "fp16":
        check_overflow(what, accelerator, *parts[:2])
