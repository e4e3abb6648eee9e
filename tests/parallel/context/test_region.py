# SPDX-License-Identifier: Apache-2.0
"""Training with split sequences against the plain loop over whole ones, in float64 to 1e-8."""

import itertools
import re
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from cases import cases
from layouts import compare_state
from rank_pool import on_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

from accelerate import Accelerator
from accelerate.config.parallel import TorchContextParallelConfig
from accelerate.core.errors import ConfigurationError
from accelerate.parallelism_config import ParallelismConfig

sys.path.append(str(Path(__file__).parents[3] / "examples" / "parallel"))
from llama import Llama, LlamaConfig

BATCH, LENGTH, VOCABULARY, ACCUMULATION, CLIP, STEPS, SHORT = 4, 16, 32, 2, 0.1, 10, 4
pytestmark = pytest.mark.usefixtures("float64")


def build():
    torch.manual_seed(0)
    return Llama(
        LlamaConfig(vocabulary=VOCABULARY, width=16, hidden=32, layers=2, heads=4, kv_heads=2)
    )


def batches(steps):
    """Token ids and the labels of the rows after them; of some rows none, of the first sample's first half either."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps * ACCUMULATION):
        tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=generator)
        labels = tokens[:, 1:].clone()
        labels[torch.rand(BATCH, LENGTH, generator=generator) < 0.3] = -100
        labels[:, : LENGTH // 4] = -100
        yield tokens[:, :-1].contiguous(), labels


def plain_run(steps, mean_of_batches, change=None):
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    norms, window = [], []
    for ids, labels in batches(steps):
        window.append((ids, labels))
        if len(window) < ACCUMULATION:
            continue
        if change is not None:
            change(len(norms), model)
        items = sum((labels != -100).sum() for _, labels in window)
        for ids, labels in window:
            if mean_of_batches:
                loss = (
                    F.cross_entropy(model(ids).flatten(0, 1), labels.clamp(min=0).flatten())
                    / ACCUMULATION
                )
            else:
                loss = (
                    F.cross_entropy(model(ids).flatten(0, 1), labels.flatten(), reduction="sum")
                    / items
                )
            loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP))
        optimizer.step()
        optimizer.zero_grad()
        window = []
    return model.state_dict(), norms


def start(**kwargs):
    strategy = kwargs.pop("strategy", None)
    precision = kwargs.pop("mixed_precision", None)
    handler = {} if strategy is None else {"cp_handler": TorchContextParallelConfig(strategy)}
    return Accelerator(
        cpu=True,
        mixed_precision=precision,
        gradient_accumulation_steps=ACCUMULATION,
        parallelism_config=ParallelismConfig(**kwargs, **handler),
    )


def run(accelerator, steps, mean_of_batches=False, change=None):
    """The loop as a user writes it."""
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer = accelerator.prepare(model, optimizer)
    index, count = accelerator.strategy.data_shard
    norms = []
    for ids, labels in batches(steps):
        ids, labels = ids.chunk(count)[index].clone(), labels.chunk(count)[index].clone()
        whole = ids.clone()
        if change is not None:
            change(len(norms), accelerator.unwrap_model(model))
        with (
            accelerator.accumulate(model),
            accelerator.maybe_context_parallel([ids, labels], [1, 1], no_restore_buffers={labels}),
        ):
            if mean_of_batches:
                loss = F.cross_entropy(model(ids).flatten(0, 1), labels.clamp(min=0).flatten())
                accelerator.backward(loss)
            else:
                loss = F.cross_entropy(model(ids).flatten(0, 1), labels.flatten())
                accelerator.backward(loss, num_items=(labels != -100).sum())
            if accelerator.sync_gradients:
                norms.append(accelerator.clip_grad_norm_(model.parameters(), CLIP))
            optimizer.step()
            optimizer.zero_grad()
        assert torch.equal(ids, whole) and labels.shape[1] < LENGTH
    assert F.scaled_dot_product_attention.__name__ == "scaled_dot_product_attention"
    return model, optimizer, norms


def compare(accelerator, model, norms, expected, tolerance=1e-8):
    compare_state(accelerator, model, expected[0], tolerance)
    torch.testing.assert_close(
        torch.stack(norms), torch.stack(expected[1][: len(norms)]), rtol=tolerance, atol=0
    )


@pytest.fixture(scope="module")
def expected(float64):
    return plain_run(STEPS, False)


@on_ranks(2)
@pytest.mark.parametrize(
    "sizes",
    [
        {"cp_size": 2, "strategy": "allgather"},
        {"cp_size": 2, "strategy": "alltoall"},
        {"sp_size": 2},
    ],
    ids=["allgather", "alltoall", "sp"],
)
def test_two_ranks(sizes, expected):
    accelerator = start(**sizes)
    assert accelerator.strategy.data_shard == (0, 1) and accelerator.strategy.gradient_ranks == 2
    model, _, norms = run(accelerator, STEPS)
    compare(accelerator, model, norms, expected)
    told = str(accelerator.explain())
    assert (
        "heads for rows over sp" if "sp_size" in sizes else "keys and values over cp"
    ) in told, told


# What trains in each step, by patterns of names: of attention some, or none, of the three inputs needs a gradient.
TRAINED = ["", r"layers\.1", r"layers\.0.*q_proj", "head", r"v_proj|norm", r"layers\.0.*k_proj"]


def freeze_in_turn(step, model):
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(re.search(TRAINED[step], name) is not None)


@on_ranks(2)
@pytest.mark.parametrize(
    "sizes",
    [
        {"cp_size": 2, "strategy": "allgather"},
        {"cp_size": 2, "strategy": "alltoall"},
        {"sp_size": 2},
    ],
    ids=["allgather", "alltoall", "sp"],
)
def test_frozen_in_turn(sizes):
    accelerator = start(**sizes)
    model, _, norms = run(accelerator, len(TRAINED), change=freeze_in_turn)
    compare(accelerator, model, norms, plain_run(len(TRAINED), False, freeze_in_turn))


@on_ranks(2)
def test_means_of_batches():
    accelerator = start(cp_size=2, strategy="alltoall")
    model, _, norms = run(accelerator, STEPS, mean_of_batches=True)
    compare(accelerator, model, norms, plain_run(STEPS, True))


@on_ranks(2)
@pytest.mark.parametrize("size", ["cp_size", "sp_size"])
def test_bf16_follows_roughly(size):
    torch.set_default_dtype(torch.float32)
    _, _, norms = run(start(mixed_precision="bf16", **{size: 2}), 4)
    expected = torch.stack(plain_run(4, False)[1])
    torch.testing.assert_close(torch.stack(norms), expected, rtol=0.05, atol=0)


class Dropping(nn.Module):
    """Records what it drops; attention drops too where it is asked to."""

    def __init__(self, attention=0.0):
        super().__init__()
        self.inner, self.attention, self.seen = nn.Linear(LENGTH, LENGTH), attention, []

    def layer(self, x):
        x = F.dropout(x, 0.5)
        self.seen.append(x != 0)
        return self.inner(x)

    def forward(self, x, position_ids=None):
        x = checkpoint(self.layer, x, use_reentrant=False)
        # Scores are all alike; the values show each weight.
        shown = torch.eye(LENGTH)[position_ids[0]].expand(len(x), 4, -1, -1)
        return F.scaled_dot_product_attention(shown * 0, shown, shown, dropout_p=self.attention), x


@on_ranks(2)
@pytest.mark.parametrize("size", ["cp_size", "sp_size"])
def test_random(size):
    """Dropout differs along the sequence, is the same when it is computed again, and moves nothing else apart."""
    sizes = {size: 2}
    accelerator = start(**sizes)
    model = accelerator.prepare(Dropping(0.5))
    plain = accelerator.unwrap_model(model)

    def forward():
        x = torch.ones(2, LENGTH, LENGTH)
        with accelerator.maybe_context_parallel([x], [1], no_restore_buffers={x}):
            attended, out = model(x)
        # Outside of the block what was dropped is dropped again.
        accelerator.backward(out.sum())
        first, again = plain.seen
        assert torch.equal(first, again)
        plain.seen.clear()
        return first, attended

    torch.manual_seed(5)
    before = torch.get_rng_state()
    runs = [forward() for _ in range(2)]
    after = torch.rand(4)
    for dropped, attended in runs:
        everyone = accelerator.gather(dropped.to(torch.uint8)).chunk(accelerator.num_processes)
        assert 0.3 < dropped.double().mean() < 0.7 and not torch.equal(everyone[0], everyone[1])
        if "sp_size" in sizes:
            # Two heads of each rank, and no two of four drop the same.
            kept = [head != 0 for head in attended[0].unbind()]
            assert not any(
                torch.equal(one, other) for one, other in itertools.combinations(kept, 2)
            )
    assert not torch.equal(runs[0][0], runs[1][0])
    assert all(
        torch.equal(after, other)
        for other in accelerator.gather(after).chunk(accelerator.num_processes)
    )
    torch.set_rng_state(before)
    again = [forward() for _ in range(2)]
    assert all(
        torch.equal(*pair)
        for run in zip(runs, again, strict=True)
        for pair in zip(*run, strict=True)
    )
    # What draws nothing leaves the generators where a plain run has them.
    before = torch.get_rng_state()
    x = torch.ones(2, LENGTH, LENGTH)
    with (
        mock.patch.object(F, "dropout", lambda x, p: x),
        accelerator.maybe_context_parallel([x], [1]),
    ):
        plain.attention = 0.0
        model(x)
        assert torch.equal(before, torch.get_rng_state())
        with pytest.raises(ConfigurationError):
            model(torch.ones(2, 3, LENGTH))
        assert torch.equal(before, torch.get_rng_state())


FOUR = {
    "alltoall": {"cp_size": 4, "strategy": "alltoall"},
    "sp": {"sp_size": 4},
    "sp x fsdp": {"sp_size": 2, "dp_shard_size": 2},
    "cp x tp": {"cp_size": 2, "tp_size": 2},
    "cp x dp": {"cp_size": 2, "dp_replicate_size": 2},
}


@on_ranks(4)
@pytest.mark.parametrize("what", cases(FOUR, thorough=["alltoall", "sp"]))  # two ranks show them
def test_four_ranks(what, expected):
    short = what in ("cp x tp", "cp x dp")
    accelerator = start(**FOUR[what])
    model, _, norms = run(accelerator, SHORT if short else STEPS)
    compare(accelerator, model, norms, plain_run(SHORT, False) if short else expected)


def test_a_checkpoint_of_four_ranks_is_a_plain_state(ranks, expected, tmp_path):
    ranks(4).run(save, expected, tmp_path)
    ranks(1).run(load, expected, tmp_path)


def save(expected, folder):
    """Two data shards times two parts of the sequence."""
    accelerator = start(cp_size=2, dp_shard_size=2)
    model, _, norms = run(accelerator, STEPS)
    compare(accelerator, model, norms, expected)
    accelerator.save_state(folder)


def load(expected, folder):
    accelerator = Accelerator(cpu=True)
    model = build()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    accelerator.load_state(folder)
    compare_state(accelerator, model, expected[0])
    assert all(int(state["step"]) == STEPS for state in optimizer.state.values())
