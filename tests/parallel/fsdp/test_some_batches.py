# SPDX-License-Identifier: Apache-2.0
"""Forwards between a backward and its step, as in a plain loop."""

import torch
from layouts import compare_state
from rank_pool import on_ranks
from states import reset_states
from torch import nn

from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin as Plugin

UNITS = {"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 20}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.a, self.b, self.last = (
            nn.Linear(6, 6),
            nn.Linear(6, 6),
            nn.Linear(6, 6),
            nn.Linear(6, 3),
        )
        self.double()

    def forward(self, rows, used="ab"):
        rows = torch.tanh(self.first(rows))
        for name in used:
            rows = rows + getattr(self, name)(rows)
        return self.last(rows)


def rows_of(step, accelerator=None):
    rows = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
    return (
        rows
        if accelerator is None
        else rows.chunk(accelerator.num_processes)[accelerator.process_index]
    )


def make(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def start(accumulation=1, **options):
    reset_states()
    plugin = Plugin(**UNITS, **options)
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=accumulation, fsdp_plugin=plugin
    )
    model = Net()
    return accelerator, *accelerator.prepare(model, make(model))


@on_ranks(2)
def test_a_forward_between_backward_and_step():
    options = {"fsdp_version": 2, "reshard_after_forward": False}
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
        compare_state(accelerator, model, expected.state_dict(), 1e-10)
