# SPDX-License-Identifier: Apache-2.0
"""A checkpoint from before the first optimizer step, in a window: neither the run nor a resumed one counts a step."""

import pytest
import torch
from layouts import compare_state
from rank_pool import on_ranks
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin as Plugin

ROWS = torch.randn(24, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def make_run(batch_size):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()
    # Its buffer is not contiguous in memory.
    model.register_buffer("turned", torch.randn(3, 2).t())
    return (
        model,
        torch.optim.Adam(model.parameters(), lr=0.01),
        DataLoader(TensorDataset(ROWS), batch_size),
    )


@on_ranks(2)
@pytest.mark.parametrize(
    "options",
    [
        {"fsdp_version": 2, "state_dict_type": "SHARDED_STATE_DICT"},
        {"fsdp_version": 2, "state_dict_type": "FULL_STATE_DICT"},
    ],
    ids=["fsdp2 sharded", "fsdp2"],
)
def test_equals_one_process(options, tmp_path):
    expected, plain, loader = make_run(4)
    for number, (rows,) in enumerate(loader):
        (expected(rows).square().mean() / 2).backward()
        if number % 2:
            plain.step()
            plain.zero_grad()
    for resumed in (False, True):
        plugin = Plugin(**options)
        accelerator = Accelerator(
            cpu=True, exact=True, gradient_accumulation_steps=2, fsdp_plugin=plugin
        )
        model, optimizer, loader = accelerator.prepare(*make_run(2))
        if resumed:
            accelerator.load_state(str(tmp_path / "saved"))
        for number, (rows,) in enumerate(loader):
            with accelerator.accumulate(model):
                accelerator.backward(model(rows).square().mean())
                optimizer.step()
                optimizer.zero_grad()
            if number == 0 and not resumed:
                accelerator.save_state(str(tmp_path / "saved"))
        compare_state(accelerator, model, expected.state_dict(), 1e-10)
