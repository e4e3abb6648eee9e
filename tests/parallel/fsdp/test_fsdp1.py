# SPDX-License-Identifier: Apache-2.0
"""FSDP1 through the Accelerator: the plain loop's parameters to 1e-8, saved and loaded by any other layout."""

import pytest
import torch
import torch.distributed as dist
from layouts import compare_state
from rank_pool import on_ranks
from safetensors.torch import load_file
from states import reset_states
from torch import nn
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.utils.data import DataLoader, TensorDataset
from windows import ACCUMULATION, CLIP, squared_error, train_by_hand

from accelerate import Accelerator
from accelerate.config.fsdp import FullyShardedDataParallelPlugin as Plugin
from accelerate.core.errors import ConfigurationError, PrepareError
from accelerate.parallelism_config import ParallelismConfig
from accelerate.state import PartialState

STEPS, GLOBAL_BATCH, WIDTH = 4, 8, 8
BLOCKS = {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
FLAT, ORIGINAL = {"use_orig_params": False}, {"use_orig_params": True}
SHARDED = {"state_dict_type": "SHARDED_STATE_DICT"}
pytestmark = pytest.mark.usefixtures("float64")
everywhere = on_ranks(2, thorough=[1, 4])


def hybrid(world):
    return ParallelismConfig(dp_replicate_size=2, dp_shard_size=2) if world == 4 else None


def parts_of(world):
    """The settings of each part of the run, the first of which all the others need."""
    return [
        ({**BLOCKS, **ORIGINAL, "sync_module_states": True, "activation_checkpointing": True}, {}),
        ({"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 200, **FLAT, **SHARDED}, {}),
        ({**BLOCKS, **ORIGINAL, **SHARDED, "sharding_strategy": "SHARD_GRAD_OP"}, {"late": True}),
        ({**BLOCKS, **FLAT, "ignored_modules": "extra", "forward_prefetch": True}, {}),
        ({**BLOCKS, **ORIGINAL, "sharding_strategy": "HYBRID_SHARD" if world == 4 else "NO_SHARD", **SHARDED},
             {"layout": hybrid(world)}),
        (None, {}),
        ({**BLOCKS, **ORIGINAL, "state_dict_type": "LOCAL_STATE_DICT"}, {}),
        ({"fsdp_version": 2, **BLOCKS}, {}),
    ]  # fmt: skip


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 3 * WIDTH)
        self.down = nn.Linear(3 * WIDTH, WIDTH)
        self.register_buffer("scale", torch.full((1,), 0.5))

    def forward(self, x):
        return x + self.scale * self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    """Tied ends, two blocks, a module that may be left whole."""

    _no_split_modules = ("Block",)

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.extra = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(5, WIDTH, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return nn.functional.linear(self.extra(x), self.last.weight.t())


def make_model(seed=0):
    torch.manual_seed(seed)
    return Model()


def make_optimizer(model, groups):
    parameters = list(model.parameters())
    if not groups:
        return torch.optim.AdamW(parameters, lr=0.01)
    vectors = [p for p in parameters if p.ndim == 1]
    matrices = [p for p in parameters if p.ndim > 1]
    return torch.optim.AdamW([{"params": matrices}, {"params": vectors, "lr": 0.01}], lr=0.01)


def data(part):
    generator = torch.Generator().manual_seed(part)
    x = torch.randn(STEPS * ACCUMULATION * GLOBAL_BATCH, 5, generator=generator)
    return TensorDataset(x, torch.randn(len(x), 5, generator=generator))


def reference(parts):
    """The plain loop on global batches: its weights after each part."""
    model = make_model()
    optimizer = make_optimizer(model, False)
    loaders = [DataLoader(data(part), GLOBAL_BATCH) for part in range(parts)]
    return [train_by_hand(model, optimizer, loader, squared_error)[0][-1] for loader in loaders]


def make_accelerator(options, **others):
    reset_states()
    return Accelerator(
        cpu=True,
        fsdp_plugin=Plugin(**options) if options is not None else None,
        gradient_accumulation_steps=ACCUMULATION,
        **others,
    )


def run(part, options, folder, expected, groups=False, late=False, layout=None):
    """Train one part of the run, from what the former part saved to what the next one loads."""
    accelerator = make_accelerator(options, parallelism_config=layout)
    # Ranks that must be made equal begin with other weights.
    synced = options is not None and options.get("sync_module_states")
    model = make_model(dist.get_rank() if synced and dist.is_initialized() else 0)
    optimizer = None if late else make_optimizer(model, groups)
    loader = DataLoader(data(part), batch_size=GLOBAL_BATCH // accelerator.num_processes)
    if late:
        model = accelerator.prepare(model)
        optimizer, loader = accelerator.prepare(make_optimizer(model, groups), loader)
    else:
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if part:
        accelerator.load_state(folder / f"part{part - 1}")
    norms = []
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(squared_error(model, batch))
            if accelerator.sync_gradients:
                norms.append(accelerator.clip_grad_norm_(model.parameters(), CLIP))
            optimizer.step()
            optimizer.zero_grad()
    assert len(norms) == STEPS and min(norms) > CLIP
    compare_state(accelerator, model, expected[part], what=f"part {part}")
    accelerator.save_state(folder / f"part{part}")
    return accelerator, model


@pytest.fixture(scope="module")
def expected(float64):
    return reference(len(parts_of(1)))


@everywhere
def test_a_run_goes_on_through_all_settings(expected, nproc, tmp_path):
    """Each part goes on from what the one before it has saved."""
    PartialState(cpu=True)
    for number, (options, others) in enumerate(parts_of(nproc)):
        accelerator, model = run(number, options, tmp_path, expected, **others)
        if number == 0:
            assert (
                isinstance(model, FullyShardedDataParallel)
                and type(accelerator.unwrap_model(model)) is Model
            )
            accelerator.save_model(model, tmp_path / "weights")
    accelerator.wait_for_everyone()
    weights = load_file(tmp_path / "weights" / "model.safetensors")
    assert {tuple(value.shape) for name, value in weights.items() if "blocks.0.up" in name} == {
        (24, 8),
        (24,),
    }
    assert all(value.dtype is torch.float64 for value in weights.values())


@everywhere
def test_groups_of_parameters(expected, tmp_path):
    PartialState(cpu=True)
    run(0, {**BLOCKS, **ORIGINAL}, tmp_path, expected, groups=True)


@on_ranks(2, thorough=[4])
def test_weights_of_no_rank():
    """Each module fills itself, alike on all ranks."""
    accelerator = Accelerator(
        cpu=True, fsdp_plugin=Plugin(fsdp_version=1, cpu_ram_efficient_loading=True)
    )
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(WIDTH, 64), nn.LayerNorm(64), nn.Linear(64, 1))
    state = accelerator.get_state_dict(accelerator.prepare(model))
    if dist.get_rank() == 0:
        limit = WIDTH**-0.5
        assert (
            0.8 * limit < state["0.weight"].abs().max() <= limit
            and state["0.weight"].std() > limit / 3
        )
        assert torch.equal(state["1.weight"], torch.ones(64)) and torch.equal(
            state["1.bias"], torch.zeros(64)
        )


@on_ranks(2, thorough=[4])
def test_refusals(nproc):
    PartialState(cpu=True)
    with pytest.raises(ConfigurationError, match="cpu_offload"):
        make_accelerator({"cpu_offload": True})
    with pytest.raises(ConfigurationError, match="does not work with tp"):
        make_accelerator({}, parallelism_config=ParallelismConfig(dp_shard_size=1, tp_size=nproc))
    for policy in ({}, BLOCKS, {"auto_wrap_policy": ModuleWrapPolicy({Block})}):
        model = make_model()
        model.blocks[0].up.weight.requires_grad_(False)
        with pytest.raises(ValueError, match="requires_grad"):
            make_accelerator({**FLAT, **policy}).prepare(model)
    accelerator = make_accelerator(FLAT)
    model = make_model()
    parameters = list(model.parameters())
    groups = [{"params": parameters[:2]}, {"params": parameters[2:]}]
    with pytest.raises(PrepareError, match="different groups"):
        accelerator.prepare(model, torch.optim.SGD(groups, lr=0.1))
    with pytest.raises(PrepareError, match="not train anything"):
        accelerator.prepare(make_model(), torch.optim.SGD(make_model().parameters(), lr=0.1))


@everywhere
@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_low_precision(name):
    """Trains in bf16 or fp16: the weights that the optimizer has stay fp32, and follow the plain run's roughly."""
    torch.set_default_dtype(torch.float32)
    accelerator = make_accelerator({**BLOCKS, "use_orig_params": True}, mixed_precision=name)
    model, optimizer = accelerator.prepare(
        *(lambda m: (m, torch.optim.SGD(m.parameters(), lr=0.1)))(make_model())
    )
    losses = []
    x, y = torch.randn(8, 5), torch.randn(8, 5)
    for _ in range(20):
        out = model(x)
        assert out.dtype is torch.float32
        loss = nn.functional.mse_loss(out, y)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0], losses
    assert all(parameter.dtype is torch.float32 for parameter in model.parameters())


def full_states(where):
    """What each rank gets of a model and its optimizer, with state dict configs of their own."""
    reset_states()
    plugin = Plugin(
        fsdp_version=1,
        **ORIGINAL,
        state_dict_type="FULL_STATE_DICT",
        state_dict_config=FullStateDictConfig(**where),
        optim_state_dict_config=FullOptimStateDictConfig(**where),
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    model = make_model()
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    model, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters()))
    state = accelerator.get_state_dict(model)
    for name, value in state.items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=0)
    accelerator.backward(model(torch.ones(2, 5)).square().sum())
    optimizer.step()
    (prepared,) = accelerator._objects.models
    moments = prepared.prepared_optimizer(optimizer.optimizer).state_dict()
    return len(expected), len(state), len(moments.get("state", {}))


@pytest.mark.parametrize("rank0_only", [True, False])
def test_state_dict_configs_say_which_ranks_get_the_full_state(rank0_only, ranks):
    where = {"offload_to_cpu": True, "rank0_only": rank0_only}
    first, second = ranks(2).run(full_states, where)
    count, moments = first[0], first[2]
    assert first == (count, count, moments) and moments > 0
    assert second == ((count, 0, 0) if rank0_only else first)
