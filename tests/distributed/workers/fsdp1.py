# SPDX-License-Identifier: Apache-2.0
"""A run through FSDP1's settings, each going on from what the last one saved, against the plain loop (float64)."""

import contextlib
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.config.fsdp import FullyShardedDataParallelPlugin as Plugin
from accelerate.core.errors import ConfigurationError, PrepareError
from accelerate.parallelism_config import ParallelismConfig
from accelerate.state import AcceleratorState, GradientState, PartialState

STEPS, ACCUMULATION, GLOBAL_BATCH, CLIP, WIDTH = 4, 2, 8, 0.05, 8
BLOCKS = {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}


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
    found = []
    for part in range(parts):
        for number, (x, y) in enumerate(DataLoader(data(part), batch_size=GLOBAL_BATCH)):
            (nn.functional.mse_loss(model(x), y) / ACCUMULATION).backward()
            if (number + 1) % ACCUMULATION == 0:
                nn.utils.clip_grad_norm_(model.parameters(), CLIP)
                optimizer.step()
                optimizer.zero_grad()
        found.append({name: value.clone() for name, value in model.state_dict().items()})
    return found


def make_accelerator(options, **others):
    for state in (AcceleratorState, GradientState):
        state._reset_state()
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
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.mse_loss(model(x), y))
            if accelerator.sync_gradients:
                norms.append(accelerator.clip_grad_norm_(model.parameters(), CLIP))
            optimizer.step()
            optimizer.zero_grad()
    assert len(norms) == STEPS and min(norms) > CLIP
    compare(accelerator, model, expected[part], part)
    accelerator.save_state(folder / f"part{part}")
    return accelerator, model


def compare(accelerator, model, expected, where):
    state = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        assert set(state) == set(expected), (where, set(state) ^ set(expected))
        for name, value in expected.items():
            assert (state[name] - value).abs().max() < 1e-8, (where, name)


def refusals(world):
    with pytest.raises(ConfigurationError, match="cpu_offload"):
        make_accelerator({"cpu_offload": True})
    with pytest.raises(ConfigurationError, match="does not compose with tp"):
        make_accelerator({}, parallelism_config=ParallelismConfig(dp_shard_size=1, tp_size=world))
    accelerator = make_accelerator({"use_orig_params": False})
    model = make_model()
    parameters = list(model.parameters())
    groups = [{"params": parameters[:2]}, {"params": parameters[2:]}]
    with pytest.raises(PrepareError, match="different groups"):
        accelerator.prepare(model, torch.optim.SGD(groups, lr=0.1))
    with pytest.raises(PrepareError, match="train nothing"):
        accelerator.prepare(make_model(), torch.optim.SGD(make_model().parameters(), lr=0.1))


def low_precision(name):
    """Trains in bf16 or fp16: the weights that the optimizer has stay fp32, and follow the plain run's roughly."""
    torch.set_default_dtype(torch.float32)
    accelerator = make_accelerator({**BLOCKS, "use_orig_params": True}, mixed_precision=name)
    model, optimizer = accelerator.prepare(*(lambda m: (m, torch.optim.SGD(m.parameters(), lr=0.1)))(make_model()))
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
    torch.set_default_dtype(torch.float64)


def from_nowhere():
    """No rank has weights: each module fills itself, alike on all ranks."""
    AcceleratorState._reset_state()
    accelerator = Accelerator(cpu=True, fsdp_plugin=Plugin(fsdp_version=1, cpu_ram_efficient_loading=True))
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(WIDTH, 64), nn.LayerNorm(64), nn.Linear(64, 1))
    state = accelerator.get_state_dict(accelerator.prepare(model))
    if dist.get_rank() == 0:
        limit = WIDTH**-0.5
        assert 0.8 * limit < state["0.weight"].abs().max() <= limit and state["0.weight"].std() > limit / 3
        assert torch.equal(state["1.weight"], torch.ones(64)) and torch.equal(state["1.bias"], torch.zeros(64))


def main(folder):
    torch.set_default_dtype(torch.float64)
    warnings.simplefilter("ignore")
    PartialState(cpu=True)
    world = dist.get_world_size() if dist.is_initialized() else 1
    sharded, flat = {"state_dict_type": "SHARDED_STATE_DICT"}, {"use_orig_params": False}
    original = {"use_orig_params": True}
    copies = ParallelismConfig(dp_replicate_size=2, dp_shard_size=world // 2) if world == 4 else None
    parts = [
        ({**BLOCKS, **original, "sync_module_states": True, "activation_checkpointing": True}, {}),
        ({"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 200, **flat, **sharded}, {}),
        ({**BLOCKS, **original, **sharded, "sharding_strategy": "SHARD_GRAD_OP"}, {"late": True}),
        ({**BLOCKS, **flat, "ignored_modules": "extra", "forward_prefetch": True}, {}),
        ({**BLOCKS, **original, "sharding_strategy": "HYBRID_SHARD" if copies else "NO_SHARD", **sharded},
             {"layout": copies}),
        (None, {}),
        ({**BLOCKS, **original, "state_dict_type": "LOCAL_STATE_DICT"}, {}),
        ({"fsdp_version": 2, **BLOCKS}, {}),
    ]  # fmt: skip
    expected = reference(len(parts))
    with contextlib.redirect_stderr(sys.stdout):
        for number, (options, others) in enumerate(parts):
            accelerator, model = run(number, options, folder, expected, **others)
            if number == 0:
                assert isinstance(model, FullyShardedDataParallel) and type(accelerator.unwrap_model(model)) is Model
                accelerator.save_model(model, folder / "weights")
            print(f"part {number} equal", flush=True)
        run(0, {**BLOCKS, **original}, folder, expected, groups=True)
        if world > 1:
            from_nowhere()
            refusals(world)
        low_precision("bf16")
        low_precision("fp16")
    print("all equal")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
