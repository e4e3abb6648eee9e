# SPDX-License-Identifier: Apache-2.0
"""The compile transform on a single process: same numbers, one graph for equal blocks, nothing compiled twice."""

import copy

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch._dynamo.utils import counters

from accelerate import Accelerator
from accelerate.config.precision import MasterWeightsKwargs
from accelerate.config.training import TorchDynamoPlugin
from accelerate.core.modules import has_compiled_regions, is_compiled_module
from accelerate.parallel.compile import Compile
from accelerate.state import AcceleratorState


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inlet = nn.Linear(4, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))

    def forward(self, x):
        x = self.inlet(x)
        for block in self.blocks:
            x = block(x)
        return x.sum()


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("regional", [False, True])
def test_same_gradients_and_no_recompilation(regional):
    plain = Model()
    model = copy.deepcopy(plain)
    plugin = TorchDynamoPlugin(backend="aot_eager", use_regional_compilation=regional)
    compiled = Compile(plugin).apply(model)
    assert is_compiled_module(compiled) is not regional and has_compiled_regions(compiled) is regional
    x = torch.randn(3, 4)
    for _ in range(3):
        plain(x).backward()
        compiled(x).backward()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
    # One graph for the whole; or one for the inlet and one that serves the four blocks.
    assert counters["stats"]["unique_graphs"] == (2 if regional else 1)
    assert compiled._orig_mod is model
    if not regional:
        assert Compile(plugin).apply(compiled) is compiled


@pytest.mark.parametrize("masters", [False, True])
def test_regions_are_compiled_under_mixed_precision(masters, tmp_path):
    """Autocast stands around the model's forward: it has to call the compiled parts. Saving compiles nothing again."""
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(
        cpu=True,
        mixed_precision="bf16",
        dynamo_plugin=TorchDynamoPlugin(backend="aot_eager", use_regional_compilation=True),
        kwargs_handlers=[MasterWeightsKwargs()] if masters else [],
    )
    model = Model()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(3):
        loss = model(torch.ones(3, 4))
        assert loss.dtype == torch.float32
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            accelerator.save_state(tmp_path)
            accelerator.load_state(tmp_path)
            # Under the names of the user's model: a run that compiles nothing, or has DDP, loads them too.
            assert set(load_file(tmp_path / "model.safetensors")) == set(Model().state_dict())
    assert counters["stats"]["unique_graphs"] == 2
    AcceleratorState._reset_state(reset_partial_state=True)
