# SPDX-License-Identifier: Apache-2.0
"""fp8 through a stand-in for Transformer Engine that computes in full precision: the steps of plain bf16 autocast."""

import sys
from pathlib import Path

import pytest
import torch
from rank_pool import on_ranks
from states import reset_states
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.config.fsdp import FullyShardedDataParallelPlugin
from accelerate.config.parallel import TorchTensorParallelConfig
from accelerate.config.precision import TERecipeKwargs
from accelerate.core.enums import FP8BackendType
from accelerate.core.errors import PrepareError
from accelerate.parallelism_config import ParallelismConfig

STEPS, GLOBAL_BATCH, WIDTH = 4, 32, 32
STAND_INS = str(Path(__file__).parents[1] / "stand_ins")


def make_model():
    torch.manual_seed(0)
    hidden = [
        nn.Linear(WIDTH, 64),
        nn.GELU(),
        nn.LayerNorm(64),
        nn.Linear(64, WIDTH, bias=False),
        nn.GELU(),
    ]
    return nn.Sequential(*hidden, nn.Linear(WIDTH, 4))


def data():
    x = torch.randn(STEPS * GLOBAL_BATCH, WIDTH, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x[:, :4].sin())


def reference(parts):
    """The plain loop in bf16 autocast, which the ranks' parts of a batch go through one by one."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in DataLoader(data(), batch_size=GLOBAL_BATCH):
        for inputs, labels in zip(x.chunk(parts), y.chunk(parts), strict=True):
            with torch.autocast("cpu", torch.bfloat16):
                output = model(inputs)
            (nn.functional.mse_loss(output.float(), labels) / parts).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


@pytest.fixture(scope="module")
def expected():
    return reference(2)


def stand_in():
    """The stand-in's (pytorch, recipe), importable on this rank from now on."""
    sys.path.insert(0, STAND_INS)
    import transformer_engine.pytorch as engine
    from transformer_engine.common import recipe

    return engine, recipe


def make_accelerator(plugin=None, layout=None, **options):
    stand_in()
    reset_states()
    handler = TERecipeKwargs(fp8_format="E4M3", amax_history_len=32, margin=1, **options)
    plugins = {"fsdp_plugin": plugin, "parallelism_config": layout}
    return Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=[handler], **plugins)


@on_ranks(2)
@pytest.mark.parametrize("sharded", [False, True])
def test_layers_train_as_those_they_replace(sharded, expected, tmp_path):
    engine, recipe = stand_in()
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2) if sharded else None
    options = {"use_autocast_during_eval": True} if sharded else {}
    accelerator = make_accelerator(plugin, **options)
    assert accelerator.fp8_backend is FP8BackendType.TE
    model = make_model()
    # Of the layers that stay and of those that are replaced: it has to train both.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(data(), batch_size=GLOBAL_BATCH // accelerator.num_processes)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    assert accelerator.precision.converted == ["0", "3"] and accelerator.precision.left == ["5"]
    report = accelerator.explain()
    assert "2 of 3 linear layers in float8 (TE); not: 5" in str(report), report
    assert "fp8 (Linear)   x 2" in str(report) and "fp8 (LayerNorm)" in str(report), report
    engine.entered.clear(), engine.computed.clear()
    for x, y in loader:
        output = model(x)
        assert output.dtype is (torch.bfloat16 if sharded else torch.float32)
        accelerator.backward(nn.functional.mse_loss(output.float(), y))
        optimizer.step()
        optimizer.zero_grad()
    requested = recipe.DelayedScaling(1, recipe.Format.E4M3, 32, "most_recent")
    assert engine.entered == [(True, requested)] * STEPS, engine.entered
    assert engine.computed == [(True, "Linear"), (True, "LayerNorm"), (True, "Linear")] * STEPS, (
        engine.computed
    )
    state = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        found = {name: value for name, value in state.items() if not name.endswith("_extra_state")}
        # FSDP2 casts norms and biases too, which autocast leaves in fp32.
        torch.testing.assert_close(found, dict(expected), rtol=0, atol=1e-4 if plugin else 1e-5)
    accelerator.save_state(tmp_path / "state")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    accelerator.load_state(tmp_path / "state")
    again = accelerator.get_state_dict(model)
    assert all(torch.equal(value, again[name]) for name, value in state.items())
    model.eval()
    engine.computed.clear()
    with torch.no_grad():
        model(x)
    assert {enabled for enabled, _ in engine.computed} == {
        bool(options.get("use_autocast_during_eval"))
    }


@on_ranks(2)
def test_refusals():
    with pytest.raises(PrepareError, match="the 1 linear layers of Sequential"):
        make_accelerator().prepare(nn.Sequential(nn.Linear(16, 20), nn.LayerNorm(20)))
    with pytest.raises(PrepareError, match=r"tp_size=2: 0 is a Transformer Engine layer"):
        plan = TorchTensorParallelConfig(plan={"0": "colwise"})
        make_accelerator(layout=ParallelismConfig(tp_size=2, tp_handler=plan)).prepare(make_model())
