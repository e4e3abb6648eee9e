# SPDX-License-Identifier: Apache-2.0
"""A separate package's strategy, transform and precision, found by entry points, train on one and on two processes."""

import os
from pathlib import Path

import pytest
from ranks import run_ranks

PACKAGE = Path(__file__).parents[1] / "helpers" / "plugin_package"

WORKER = """
import torch
from accelerate import Accelerator
from accelerate.core.errors import ConfigurationError

torch.manual_seed(0)
rows = torch.randint(0, 8, (8, 3))
goals = torch.rand(8, 1, dtype=torch.float64)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(8, 4)
        self.out = torch.nn.Linear(4, 1)

    def forward(self, x):
        return self.out(self.embedding(x).mean(1))


def mean_loss(model, x, y):
    return (model(x) - y).pow(2).mean()


model = Model()
start = {name: value.double() for name, value in model.state_dict().items()}
accelerator = Accelerator(strategy="slow_average", transforms=["freeze_embeddings"], mixed_precision="double")
assert accelerator.plan.strategy == "slow average"
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
loader = torch.utils.data.DataLoader(list(zip(rows, goals)), batch_size=2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for x, y in loader:
    optimizer.zero_grad()
    accelerator.backward(mean_loss(model, x, y))
    optimizer.step()

# The same by hand: each part of the data takes its own step, then the parameters are averaged.
plain, world = Model().double(), accelerator.num_processes
plain.load_state_dict(start)
for step in range(4 // world):
    found = []
    for part in range(world):
        at = (step * world + part) * 2
        plain.zero_grad()
        mean_loss(plain, rows[at : at + 2], goals[at : at + 2]).backward()
        found.append([p - 0.5 * p.grad for p in plain.out.parameters()])
    for parameter, *values in zip(plain.out.parameters(), *found):
        parameter.data = sum(values) / world
for name, value in plain.state_dict().items():
    assert (model.state_dict()[name] - value).abs().max() < 1e-12, name

accelerator.state._reset_state(True)
try:
    Accelerator(strategy="slow_avrage")
except ConfigurationError as error:
    assert "did you mean slow_average?" in str(error), error
else:
    raise AssertionError("an unknown strategy was accepted")
print("equal")
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_package_of_somebody_else(ranks):
    path = os.pathsep.join(filter(None, [str(PACKAGE), os.environ.get("PYTHONPATH")]))
    results = run_ranks(WORKER, ranks, env={"PYTHONPATH": path})
    assert all("equal" in result.stdout for result in results)
