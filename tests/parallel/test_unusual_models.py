# SPDX-License-Identifier: Apache-2.0
"""Models with parameters in containers, transposed ones and a recorded graph: exact=True against one process."""

from dataclasses import dataclass

import pytest
import torch
from rank_pool import on_ranks
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.core.errors import PrepareError
from accelerate.utils import DistributedDataParallelKwargs
from accelerate.utils import FullyShardedDataParallelPlugin as Plugin

ROWS = torch.randn(14, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
SIZES = {"auto_wrap_policy": "size_based_wrap", "min_num_params": 20}
LAYOUTS = {
    "static graph": {"kwargs_handlers": [DistributedDataParallelKwargs(static_graph=True)]},
    "fsdp2": {"fsdp_plugin": Plugin(fsdp_version=2, **SIZES)},
    "fsdp1": {"fsdp_plugin": Plugin(fsdp_version=1, **SIZES)},
}


class Containers(nn.Module):
    """Parameters in a dict and a list, which are modules without a forward, and a transposed one."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.matrices = nn.ParameterDict({"square": torch.randn(6, 6) / 3})
        self.rows = nn.ParameterList([torch.randn(6, 6) / 3])
        self.turned = nn.Parameter((torch.randn(4, 6) / 3).t())

    def forward(self, x):
        x = torch.tanh(self.first(x)) @ self.matrices["square"]
        return torch.tanh(x @ self.rows[0]) @ self.turned


def make_run(kind):
    torch.manual_seed(0)
    model = Containers().double()
    loader = DataLoader(TensorDataset(ROWS), batch_size=2 if kind == "ours" else 4)
    return model, torch.optim.Rprop(model.parameters(), lr=0.01), loader


@on_ranks(2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_equals_one_process(layout):
    # 14 rows are windows of 8 and of 6: the second ends with a batch that is smaller.
    expected, plain, loader = make_run("plain")
    for _ in range(2):
        for number, (rows,) in enumerate(loader):
            (expected(rows).square().mean() / 2).backward()
            if number % 2:
                plain.step()
                plain.zero_grad()
    accelerator = Accelerator(cpu=True, exact=True, gradient_accumulation_steps=2, **LAYOUTS[layout])
    model, optimizer, loader = accelerator.prepare(*make_run("ours"))
    for _ in range(2):
        for (rows,) in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(rows).square().mean())
                optimizer.step()
                optimizer.zero_grad()
    found = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        torch.testing.assert_close(dict(found), dict(expected.state_dict()), rtol=0, atol=1e-10)


@dataclass
class Output:
    values: torch.Tensor


class Dataclass(nn.Linear):
    def forward(self, x):
        return Output(super().forward(x))


@on_ranks(2)
def test_a_recorded_graph_whose_outputs_torch_does_not_find_is_refused():
    accelerator = Accelerator(cpu=True, **LAYOUTS["static graph"])
    model = accelerator.prepare(Dataclass(6, 2).double())
    with torch.no_grad():
        model(ROWS)
    with pytest.raises(PrepareError, match="static_graph=True finds no tensors inside of a Output"):
        model(ROWS)
