# SPDX-License-Identifier: Apache-2.0
"""DDP and losses that use other parameters than the forward: against the plain loop, or an error before the step."""

import pytest
import torch
from rank_pool import on_ranks
from torch import nn

from accelerate import Accelerator
from accelerate.config.training import DistributedDataParallelKwargs
from accelerate.parallel.ddp.strategy import DataParallel
from accelerate.precision.base import Precision

pytestmark = pytest.mark.usefixtures("float64")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.unused, self.last = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 1)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)))


def penalty(model):
    return sum(parameter.square().sum() for parameter in model.parameters())


def train(steps, **options):
    """Three steps; in those of `steps` the loss has the penalty."""
    run = Accelerator(cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(**options)])
    plain, module = Net(), Net()
    model, optimizer = run.prepare(module, torch.optim.SGD(module.parameters(), 0.1))
    expected = torch.optim.SGD(plain.parameters(), 0.1)
    for step in range(3):
        x = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(step))
        with_penalty = step in steps
        run.backward(
            model(x[run.process_index]).square().mean() + (penalty(model) if with_penalty else 0)
        )
        (
            plain(x.flatten(0, 1)).square().mean() + (penalty(plain) if with_penalty else 0)
        ).backward()
        for each in (optimizer, expected):
            each.step()
            each.zero_grad()
    torch.testing.assert_close(
        dict(module.state_dict()), dict(plain.state_dict()), rtol=0, atol=1e-12
    )


@on_ranks(2)
def test_penalties_on_parameters_that_the_forward_misses():
    train({0, 1, 2})


def test_a_model_that_is_left_elsewhere_has_no_device_of_ddp():
    """With device_placement=False: torch refuses `device_ids` of another device than the model's."""
    strategy = DataParallel(torch.device("xpu", 0), Precision())
    assert "device_ids" not in strategy.arguments(torch.nn.Linear(1, 1))
    assert strategy.arguments(torch.nn.Identity())["device_ids"] == [0]
