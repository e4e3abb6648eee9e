# SPDX-License-Identifier: Apache-2.0
"""FSDP1 in the middle of an accumulation window: saved, loaded, and at the end of the window where a plain loop is."""

import pytest
import torch
from rank_pool import on_ranks
from torch import nn

from accelerate import Accelerator
from accelerate.config.fsdp import FullyShardedDataParallelPlugin as Plugin
from accelerate.config.training import GradientAccumulationPlugin
from accelerate.parallelism_config import ParallelismConfig

pytestmark = pytest.mark.usefixtures("float64")
WINDOW, ROWS = 3, 4
SIZED = {"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 40}
KINDS = {
    "whole": {"sharding_strategy": "FULL_SHARD"},
    "units": {"sharding_strategy": "SHARD_GRAD_OP", **SIZED},
    "flat": {"sharding_strategy": "FULL_SHARD", "use_orig_params": False, **SIZED},
    "replicas": {"sharding_strategy": "NO_SHARD"},
    "ignored": {"sharding_strategy": "FULL_SHARD", "ignored_modules": "rest"},
    "hybrid": {"sharding_strategy": "HYBRID_SHARD", **SIZED},
}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.early, self.rest = nn.Linear(4, 12), nn.Linear(12, 12), nn.Linear(12, 2)

    def forward(self, x, early):
        hidden = torch.tanh(self.first(x))
        # If only the first batch of a window uses it, its gradient has to come from the checkpoint. Where that is all
        # of a unit torch's FSDP1 fails.
        return self.rest(hidden + self.early(hidden) if early else hidden)


def batch(number, index, count):
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(ROWS * count, 4, generator=generator, dtype=torch.float64)
    return x[index * ROWS : (index + 1) * ROWS]


def fresh():
    torch.manual_seed(0)
    model = Net()
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


def expected(count, steps, always):
    model, optimizer = fresh()
    for number in range(steps * WINDOW):
        x = torch.cat([batch(number, index, count) for index in range(count)])
        loss = model(x, always or number % WINDOW == 0).square().mean()
        (loss / WINDOW).backward()
        if (number + 1) % WINDOW == 0:
            optimizer.step()
            optimizer.zero_grad()
    return model.state_dict()


def run(accelerator, model, optimizer, numbers, always):
    for number in numbers:
        with accelerator.accumulate(model):
            x = batch(number, accelerator.process_index, accelerator.num_processes)
            accelerator.backward(model(x, always or number % WINDOW == 0).square().mean())
            optimizer.step()
            optimizer.zero_grad()


def stop_and_go_on(folder, kind, each):
    def begin():
        layout = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2) if kind == "hybrid" else None
        accelerator = Accelerator(
            cpu=True,
            fsdp_plugin=Plugin(fsdp_version=1, **KINDS[kind]),
            parallelism_config=layout,
            gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=WINDOW, sync_each_batch=each),
        )
        return accelerator, *accelerator.prepare(*fresh())

    always = "min_num_params" in KINDS[kind]
    first = begin()
    run(*first, range(WINDOW + 2), always)
    first[0].save_state(folder / "middle")
    accelerator, model, optimizer = begin()
    accelerator.load_state(folder / "middle")
    run(accelerator, model, optimizer, range(WINDOW + 2, 2 * WINDOW), always)
    found = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        for name, value in expected(accelerator.num_processes, 2, always).items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-8)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "hybrid"])
@on_ranks(2)
def test_a_window_goes_on(kind, tmp_path):
    stop_and_go_on(tmp_path, kind, False)


@on_ranks(4)
def test_a_window_of_shards_with_replicas_goes_on(tmp_path):
    stop_and_go_on(tmp_path, "hybrid", False)


@on_ranks(2)
def test_a_window_whose_batches_are_reduced_at_once_goes_on(tmp_path):
    stop_and_go_on(tmp_path, "units", True)
