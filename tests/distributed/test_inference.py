# SPDX-License-Identifier: Apache-2.0
"""A model cut over two processes gives the outputs of the whole one, in its own containers."""

from __future__ import annotations

from ranks import run_ranks

WORKER = """
import torch
from torch import nn

from accelerate import PartialState
from accelerate.inference import prepare_pippy

state = PartialState(cpu=True)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(4, 8)
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(5)])
        self.head = nn.Linear(8, 2)

    def forward(self, x, scale=None, want_hidden=False):
        hidden = self.embed(x)
        for block in self.blocks:
            hidden = hidden + torch.tanh(block(hidden))
        out = self.head(hidden) * scale
        return {"out": out, "past": None, "pair": (out + 1, out * 2)}


def make():
    torch.manual_seed(0)
    return Model().double()


torch.manual_seed(1)
x, scale = torch.randn(7, 4).double(), torch.rand(7, 1).double()
wanted = make()(x, scale=scale)


def check(found):
    assert list(found) == ["out", "past", "pair"] and found["past"] is None and type(found["pair"]) is tuple
    for ours, plain in zip([found["out"], *found["pair"]], [wanted["out"], *wanted["pair"]]):
        assert ours.shape == plain.shape
        torch.testing.assert_close(ours, plain, rtol=0, atol=1e-12)


# Seven samples in two and in three parts: padded on the way, cut at the end.
model = prepare_pippy(make(), example_args=(x,), example_kwargs={"scale": scale}, gather_output=True)
assert model.hf_split_points == ["blocks.2"], model.hf_split_points
check(model(x, scale=scale))

inputs = {"x": x, "scale": scale}
split = prepare_pippy(make(), split_points=["blocks.4"], example_kwargs=inputs, num_chunks=3)
found = split(x, scale=scale)
check(found) if state.is_last_process else None
assert state.is_last_process or found is None

try:
    model(x[:2], scale=scale[:2])
except ValueError as error:
    assert "traced with batches of 7" in str(error)
else:
    raise AssertionError("a batch of another size was taken")
print("done")
"""


def test_outputs_of_two_stages_equal_the_whole_model() -> None:
    for result in run_ranks(WORKER, 2, timeout=120):
        assert "done" in result.stdout
