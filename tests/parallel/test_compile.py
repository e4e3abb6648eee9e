# SPDX-License-Identifier: Apache-2.0
"""The compile transform on a single process: same numbers, one graph for equal blocks, nothing compiled twice."""

import copy
import inspect

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from accelerate import Accelerator
from accelerate.config.precision import MasterWeightsKwargs
from accelerate.config.training import TorchDynamoPlugin
from accelerate.hooks import ModelHook, add_hook_to_module
from accelerate.parallel.compile import Compile, compile_regions
from accelerate.precision.amp import MixedPrecision
from accelerate.torch_internals.compiled import has_compiled_regions, is_compiled_module


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
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("regional", [False, True])
def test_same_gradients_and_no_recompilation(regional):
    plain = Model()
    model = copy.deepcopy(plain)
    plugin = TorchDynamoPlugin(backend="aot_eager", use_regional_compilation=regional)
    compiled = Compile(plugin).apply(model)
    assert (
        is_compiled_module(compiled) is not regional and has_compiled_regions(compiled) is regional
    )
    x = torch.randn(3, 4)
    for _ in range(3):
        plain(x).backward()
        compiled(x).backward()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
    # One graph for the whole; or one for the inlet and one that serves the four blocks.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == (2 if regional else 1)
    assert compiled._orig_mod is model
    if not regional:
        assert Compile(plugin).apply(compiled) is compiled


@pytest.mark.parametrize("masters", [False, True])
def test_regions_are_compiled_under_mixed_precision(masters, tmp_path):
    """Autocast stands around the model's forward: it has to call the compiled parts. Saving compiles nothing again."""
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
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


@pytest.mark.parametrize("autocast", [False, True])
def test_regions_of_a_model_with_a_hook(autocast):
    plain = Model()
    hooked = add_hook_to_module(copy.deepcopy(plain), ModelHook())
    if autocast:
        MixedPrecision("bf16", torch.bfloat16, "cpu").wrap_forward(hooked)
        assert inspect.signature(hooked.forward) == inspect.signature(plain.forward)
    compiled = compile_regions(hooked, backend="aot_eager")
    x = torch.randn(3, 4)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        torch.testing.assert_close(compiled(x), plain(x).float())
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


@pytest.mark.parametrize("wrap", [torch.compile, compile_regions, "child", "plugin"])
def test_saved_names_are_those_of_the_plain_model(wrap, tmp_path):
    model, names = Model(), list(Model().state_dict())
    if wrap == "child":
        model.inlet = torch.compile(model.inlet, backend="eager")
    elif wrap != "plugin":
        model = wrap(model, backend="eager")
    accelerator = Accelerator(
        cpu=True, dynamo_plugin=TorchDynamoPlugin(backend="eager") if wrap == "plugin" else None
    )
    model = accelerator.prepare(model)
    assert list(accelerator.get_state_dict(model)) == names
    accelerator.save_model(model, tmp_path)
    assert set(load_file(tmp_path / "model.safetensors")) == set(names)
    accelerator.save_state(tmp_path / "state")
    assert set(load_file(tmp_path / "state" / "model.safetensors")) == set(names)
    saved = {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    accelerator.load_state(tmp_path / "state")
    torch.testing.assert_close(dict(accelerator.get_state_dict(model)), saved, rtol=0, atol=0)
