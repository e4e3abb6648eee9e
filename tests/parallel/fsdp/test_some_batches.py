# SPDX-License-Identifier: Apache-2.0
"""Units that only some batches of a window use, and forwards between a backward and its step: as in a plain loop."""

import pytest
import torch
from cases import pairs
from rank_pool import on_ranks
from torch import nn

from accelerate import Accelerator
from accelerate.core.errors import PrepareError
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import FullyShardedDataParallelPlugin as Plugin
from accelerate.utils import ParallelismConfig

# The units that each batch of a window uses.
WINDOWS = [["ab", "b"], ["b", "ab", "b"], ["ab", "b", "b", "a", "b", "b", "ab", "ab", "b"]]
UNITS = {"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 20}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.a, self.b, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.double()

    def forward(self, rows, used="ab"):
        rows = torch.tanh(self.first(rows))
        for name in used:
            rows = rows + getattr(self, name)(rows)
        return self.last(rows)


def rows_of(step, accelerator=None):
    rows = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
    return rows if accelerator is None else rows.chunk(accelerator.num_processes)[accelerator.process_index]


def make(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def start(accumulation=1, **options):
    AcceleratorState._reset_state(reset_partial_state=False)
    GradientState._reset_state()
    plugin = Plugin(**UNITS, **options)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation, fsdp_plugin=plugin)
    model = Net()
    return accelerator, *accelerator.prepare(model, make(model))


def check(accelerator, model, expected):
    found = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        torch.testing.assert_close(dict(found), expected.state_dict(), rtol=0, atol=1e-10)


@on_ranks(2)
@pytest.mark.parametrize(
    "sharding, flat",
    pairs(
        ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"],
        [False, True],
        usual=[("FULL_SHARD", True), ("SHARD_GRAD_OP", False), ("NO_SHARD", True)],
    ),
)
def test_units_of_some_batches(flat, sharding, tmp_path):
    options = {"fsdp_version": 1, "use_orig_params": not flat, "sharding_strategy": sharding}
    for window in WINDOWS:
        size = min(len(window), 3)
        expected = Net()
        optimizer = make(expected)
        for step, used in enumerate(window):
            (expected(rows_of(step), used).square().mean() / size).backward()
            if step % size == size - 1:
                optimizer.step()
                optimizer.zero_grad()
        for resumed in (False, True):
            accelerator, model, optimizer = start(size, **options)
            folder = str(tmp_path / f"{len(window)}")
            if resumed:
                accelerator.load_state(folder)
            for step, used in enumerate(window):
                if resumed and step == 0:
                    continue
                with accelerator.accumulate(model):
                    accelerator.backward(model(rows_of(step, accelerator), used).square().mean())
                    optimizer.step()
                    optimizer.zero_grad()
                if step == 0:
                    accelerator.save_state(folder)
            check(accelerator, model, expected)


@on_ranks(2)
@pytest.mark.parametrize(
    "options",
    [
        {"fsdp_version": 1, "sharding_strategy": "SHARD_GRAD_OP", "use_orig_params": True},
        {"fsdp_version": 1, "sharding_strategy": "SHARD_GRAD_OP", "use_orig_params": False},
        {"fsdp_version": 2, "reshard_after_forward": False},
    ],
    ids=["fsdp1", "fsdp1 flat", "fsdp2"],
)
def test_a_forward_between_backward_and_step(options):
    expected = Net()
    optimizer = make(expected)
    for step in range(4):
        expected(rows_of(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for gradients in (False, True):
        accelerator, model, optimizer = start(**options)
        for step in range(4):
            rows = rows_of(step, accelerator)
            accelerator.backward(model(rows).square().mean())
            with torch.set_grad_enabled(gradients):
                model(rows)
            optimizer.step()
            optimizer.zero_grad()
        check(accelerator, model, expected)


@on_ranks(2)
@pytest.mark.parametrize(
    "options",
    [
        {"fsdp_version": 1, "use_orig_params": True},
        {"fsdp_version": 1, "sharding_strategy": "SHARD_GRAD_OP", "use_orig_params": False},
        {"fsdp_version": 2},
        {"fsdp_version": 2, "reshard_after_forward": False},
    ],
    ids=["fsdp1", "fsdp1 kept", "fsdp2", "fsdp2 kept"],
)
def test_evaluation_in_inference_mode(options):
    """Before the first step, between steps and between a backward and its step."""
    expected = Net()
    optimizer = make(expected)
    accelerator, model, prepared = start(**options)

    @torch.inference_mode()
    def evaluate(step):
        model.eval()
        losses = accelerator.gather(model(rows_of(step, accelerator)).square().mean()[None])
        with torch.no_grad():
            torch.testing.assert_close(losses.mean(), expected(rows_of(step)).square().mean(), rtol=1e-10, atol=0)
        model.train()

    evaluate(0)
    for step in range(3):
        expected(rows_of(step)).square().mean().backward()
        accelerator.backward(model(rows_of(step, accelerator)).square().mean())
        evaluate(step)
        for one in (optimizer, prepared):
            one.step()
            one.zero_grad()
        evaluate(step + 1)
    with torch.inference_mode():
        check(accelerator, model, expected)


@on_ranks(2)
@pytest.mark.parametrize(
    "options",
    [
        {"fsdp_plugin": {"fsdp_version": 1, "use_orig_params": True}},
        {"fsdp_plugin": {"fsdp_version": 2}},
        {"parallelism_config": ParallelismConfig(tp_size=2)},
    ],
    ids=["fsdp1", "fsdp2", "tp"],
)
def test_gradient_hooks_that_would_not_be_called_are_refused(options):
    plugin = options.get("fsdp_plugin")
    accelerator = Accelerator(cpu=True, **({"fsdp_plugin": Plugin(**plugin)} if plugin else options))
    model = Net()
    model.last.weight.register_hook(torch.neg)
    with pytest.raises(PrepareError, match=r"last\.weight of Net has a gradient hook"):
        accelerator.prepare(model)
    if plugin:
        model = accelerator.prepare(Net())
        with pytest.raises(PrepareError, match="register_hook on a parameter that FSDP shards"):
            next(model.parameters()).register_hook(torch.neg)
    if plugin and plugin["fsdp_version"] == 1:
        with pytest.raises(PrepareError, match="register_post_accumulate_grad_hook on a parameter that FSDP shards"):
            next(model.parameters()).register_post_accumulate_grad_hook(print)
        with pytest.raises(PrepareError, match=r"a model that torch\.compile has wrapped"):
            accelerator.prepare(torch.compile(Net(), backend="eager"))
