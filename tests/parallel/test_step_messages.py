# SPDX-License-Identifier: Apache-2.0
"""All that a process group carries in an optimizer step of ours, against the same loop by hand.

A whole step: loader, accumulation, clipping, optimizer, schedule. Every call of the group is counted, with its bytes.
"""

import contextlib
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from layouts import units_of
from rank_pool import on_ranks
from states import reset_states
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.parallel.report.models import communication_volume

BATCH, WINDOWS, WIDTH = 2, 3, 8
SENT: Counter = Counter()


class CountingGroup(dist.ProcessGroup):
    """Hands each collective on to gloo, and counts it with the bytes of the larger side."""

    def __init__(self, inner, rank, size):
        super().__init__(rank, size)
        self.inner = inner

    def getBackendName(self):
        return "counting"

    @property
    def group_name(self):
        return self.name

    def _set_group_name(self, name):
        self.name = name


# What gloo calls these.
OLDER = {
    "all_gather_single": "_allgather_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "all_to_all_single": "alltoall_base",
}
# What a layout calls them.
TOLD = {
    "all-gather": "_allgather_base",
    "reduce-scatter": "_reduce_scatter_base",
    "all-reduce": "allreduce",
}


def counted(name):
    def call(self, *args, **kwargs):
        sides = [
            sum(leaf.nbytes for leaf in tree_leaves(arg) if isinstance(leaf, torch.Tensor))
            for arg in args
        ]
        SENT[OLDER.get(name, name), max(sides, default=0)] += 1
        return getattr(self.inner, OLDER.get(name, name))(*args, **kwargs)

    return call


for _name in (
    *OLDER, *OLDER.values(), "allreduce", "allgather", "reduce_scatter", "broadcast", "gather", "scatter", "alltoall",
    "reduce", "send", "recv", "allreduce_coalesced", "allgather_coalesced", "barrier",
):  # fmt: skip
    setattr(CountingGroup, _name, counted(_name))


def make_group(store, rank, size, timeout):
    return CountingGroup(dist.ProcessGroupGloo(store, rank, size, timeout), rank, size)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return torch.tanh(self.linear(x))


def parts():
    """Model, optimizer, schedule, and a loader of all samples."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, WIDTH), Block(), Block(), nn.Linear(WIDTH, 1))
    x = torch.randn(BATCH * WINDOWS * 3 * dist.get_world_size(), 4)
    return model, DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=BATCH)


def steps_of(model):
    optimizer = torch.optim.AdamW(model.parameters())
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1)


def clip_by_hand(model, kind):
    """torch's own clipping of shards sends a norm for each parameter; by hand it is one number."""
    if kind == "ddp":
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        return
    gradients = [parameter.grad.to_local() for parameter in model.parameters()]
    squares = torch.stack([gradient.pow(2).sum() for gradient in gradients]).sum()
    dist.all_reduce(squares)
    torch._foreach_mul_(gradients, (1.0 / (squares.sqrt() + 1e-6)).clamp(max=1.0))


def by_hand(kind, steps, precision):
    """What each window sends; DDP orders its buckets and FSDP2 its units in the first."""
    model, loader = parts()
    if kind == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    else:
        low = torch.bfloat16 if precision == "bf16" else None
        policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=low, output_dtype=low)
        for block in model[1:3]:
            fully_shard(block, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
    optimizer, schedule = steps_of(model)
    data = DataLoader(
        loader.dataset,
        batch_size=BATCH,
        sampler=torch.utils.data.DistributedSampler(loader.dataset, shuffle=False),
    )
    windows = []
    for number, (x, y) in enumerate(data):
        last = (number + 1) % steps == 0
        wait = contextlib.nullcontext()
        if kind == "ddp" and not last:
            wait = model.no_sync()
        elif kind == "fsdp":
            model.set_requires_gradient_sync(last)
        autocast = torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16")
        with wait:
            with autocast:
                out = model(x)
            (nn.functional.mse_loss(out.float(), y) / steps).backward()
        if last:
            clip_by_hand(model, kind)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            windows.append(dict(SENT))
            SENT.clear()
    return windows


def ours(kind, steps, precision, items):
    reset_states()
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=steps, mixed_precision=precision,
        fsdp_plugin=units_of("Block") if kind == "fsdp" else None,
    )  # fmt: skip
    model, loader = parts()
    model, optimizer, schedule, loader = accelerator.prepare(model, *steps_of(model), loader)
    assert len(loader) == 3 * WINDOWS
    SENT.clear()
    windows = []
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss, **({"num_items": len(x)} if items else {}))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            windows.append(dict(SENT))
            SENT.clear()
    for told in communication_volume(accelerator.prepared_model(model), steps):
        kind = next(kind for word, kind in TOLD.items() if told.what.startswith(word))
        sent = {
            size: number
            for (name, size), number in windows[-1].items()
            if name == kind and size > 8
        }
        found = (sum(sent.values()), sum(size * number for size, number in sent.items()))
        assert (told.messages, told.sent) == found, (kind, told, sent)
    accelerator.free_memory()
    return windows


@on_ranks(2)
@pytest.mark.parametrize(("steps", "precision"), [(1, "no"), (3, "no"), (3, "bf16")])
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_messages_are_those_of_the_hand_written_step(kind, steps, precision):
    dist.Backend.register_backend("counting", make_group, devices=["cpu"])
    dist.init_process_group("counting")
    expected = by_hand(kind, steps, precision)
    assert len(expected) == 9 // steps and all(expected), expected
    SENT.clear()
    found = ours(kind, steps, precision, items=False)
    assert found[1:] == expected[1:]
    counted_items = ours(kind, steps, precision, items=True)
    # The number of items: one double, summed while the backward runs.
    with_count = [dict(Counter(window) + Counter({("allreduce", 8): 1})) for window in expected]
    assert counted_items[1:] == with_count[1:]
