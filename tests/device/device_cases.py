# SPDX-License-Identifier: Apache-2.0
"""Cases of `test_device.py`, each on simulated devices: `device_cases.py FOLDER CASE`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import simulated_device
import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader

from accelerate import (
    Accelerator,
    DataLoaderConfiguration,
    FullyShardedDataParallelPlugin,
    cpu_offload_with_hook,
    dispatch_model,
    infer_auto_device_map,
    init_empty_weights,
    load_checkpoint_and_dispatch,
)
from accelerate.parallelism_config import ParallelismConfig
from accelerate.state import AcceleratorState
from accelerate.utils import OptimizerOffloadKwargs, broadcast_object_list, gather_object, get_max_memory, set_seed

KIND, FOLDER = simulated_device.KIND, Path(sys.argv[1])
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
EPOCHS, BATCH, CLIP = 2, 8, 0.5
# Adam makes steps of 0.01 in the direction of rounding errors, and the scaler of fp16 leaves out the first steps.
LOW = 0.2
torch.set_default_dtype(torch.float32 if "16" in sys.argv[2] else torch.float64)
torch.manual_seed(0)
DATA = [(torch.randn(8), torch.randn(1)) for _ in range(32)]


class Block(nn.Module):
    def __init__(self, drop):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)
        self.drop = nn.Dropout(drop)

    def forward(self, x):
        return x + self.drop(self.down(torch.relu(self.up(self.norm(x)))))


class Net(nn.Module):
    _tp_plan = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}  # noqa: RUF012 - as transformers has it

    def __init__(self, drop=0.0):
        super().__init__()
        self.inputs = nn.Linear(8, 16)
        self.blocks = nn.ModuleList(Block(drop) for _ in range(4))
        self.output = nn.Linear(16, 1)

    def forward(self, x):
        x = self.inputs(x)
        for block in self.blocks:
            x = block(x)
        return self.output(x)


def build(drop=0.0):
    torch.manual_seed(1)
    model = Net(drop)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def plain(window):
    model, optimizer = build()
    for _ in range(EPOCHS):
        for number, (x, y) in enumerate(DataLoader(DATA, BATCH)):
            (nn.functional.mse_loss(model(x), y) / window).backward()
            if (number + 1) % window == 0:
                nn.utils.clip_grad_norm_(model.parameters(), CLIP)
                optimizer.step()
                optimizer.zero_grad()
    return model.state_dict()


def train(window=1, tolerance=1e-8, **options):
    accelerator = Accelerator(gradient_accumulation_steps=window, **options)
    assert accelerator.device == torch.device(KIND, RANK), accelerator.device
    model, optimizer = build()
    shards = 1 if accelerator.dataloader_config.split_batches else accelerator.strategy.data_shard[1]
    loader = DataLoader(DATA, BATCH // shards)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in range(EPOCHS):
        for x, y in loader:
            assert x.device == accelerator.device
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(x), y)
                accelerator.backward(loss)
                accelerator.gather_for_metrics(loss.detach().reshape(1))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), CLIP)
                optimizer.step()
                optimizer.zero_grad()
        if not epoch:
            accelerator.save_state(FOLDER / "checkpoint")
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
            accelerator.load_state(FOLDER / "checkpoint")
    state = {name.removeprefix("_orig_mod."): value for name, value in accelerator.get_state_dict(model).items()}
    assert gather_object([RANK]) == list(range(WORLD))
    assert broadcast_object_list([RANK]) == [0]
    accelerator.save_model(model, FOLDER / "model")
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        expected = plain(window)
        assert set(state) == set(expected)
        distance = max((state[name].cpu() - value).abs().max().item() for name, value in expected.items())
        assert distance <= tolerance, distance
    accelerator.end_training()


def fsdp(**options):
    return FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
        **options,
    )


def resume():
    """A run with dropout goes on with the device's random numbers."""

    def run(seed, stop=None, load=False):
        AcceleratorState._reset_state(reset_partial_state=True)
        set_seed(seed)
        accelerator = Accelerator()
        model, optimizer = build(drop=0.3)
        model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(DATA, BATCH, shuffle=True))
        first, done = loader, 0
        if load:
            accelerator.load_state(FOLDER / "checkpoint")
            first, done = accelerator.skip_first_batches(loader, 3), 3
        for epoch in range(EPOCHS):
            for x, y in loader if epoch else first:
                accelerator.backward(nn.functional.mse_loss(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
                done += 1
                if done == stop:
                    return accelerator.save_state(FOLDER / "checkpoint")
        return [parameter.cpu() for parameter in model.parameters()]

    expected = run(3)
    run(3, stop=3)
    assert all(map(torch.equal, run(9, load=True), expected))


def identity():
    """Parameters stay the same objects: an optimizer of another call, and tied layers, keep them."""
    accelerator = Accelerator()
    model, optimizer = build()
    model.blocks[1].up.weight = model.blocks[0].up.weight
    former = list(model.parameters())
    optimizer = accelerator.prepare(optimizer)
    model = accelerator.prepare(model)
    assert all(a is b for a, b in zip(model.parameters(), former, strict=True))
    assert model.blocks[1].up.weight is model.blocks[0].up.weight
    assert {parameter.device for parameter in model.parameters()} == {accelerator.device}


def placement():
    """Device maps over two devices, host memory and the disk; hooks of pipelines of models."""
    model, _ = build()
    x = torch.stack([x for x, _ in DATA])
    expected = model(x)
    save_file(model.state_dict(), FOLDER / "model.safetensors", metadata={"format": "pt"})
    assert list(get_max_memory()) == [0, 1, 2, 3, "cpu"]
    blocks = {f"blocks.{number}": place for number, place in enumerate((0, 1, "cpu", "disk"))}
    planned = infer_auto_device_map(build()[0], {0: 8000, 1: 8000, "cpu": 4000}, no_split_module_classes=["Block"])
    for devices in ({"inputs": 0, **blocks, "output": 0}, planned):
        with init_empty_weights():
            empty = Net()
        loaded = load_checkpoint_and_dispatch(
            empty, FOLDER / "model.safetensors", device_map=devices, offload_folder=FOLDER / "offload"
        )
        moved = dispatch_model(build()[0], devices, offload_dir=FOLDER / "offload")
        for found in (loaded, loaded, moved):
            torch.testing.assert_close(found(x).cpu(), expected, rtol=0, atol=1e-8)
    model, hook = cpu_offload_with_hook(model, torch.device(KIND, 0))
    torch.testing.assert_close(model(x).cpu(), expected, rtol=0, atol=1e-8)
    assert model.output.weight.device.type == KIND
    hook.offload()
    assert model.output.weight.device.type == "cpu"


LOADERS = {"dispatch": {"dispatch_batches": True}, "copies": {"non_blocking": True}, "split": {"split_batches": True}}
CASES = {
    "no": train,
    "bf16": lambda: train(mixed_precision="bf16", tolerance=LOW),
    "fp16": lambda: train(mixed_precision="fp16", tolerance=LOW),
    "accumulation": lambda: train(2),
    "telemetry": lambda: train(telemetry=FOLDER / "telemetry"),
    "offloaded state": lambda: train(kwargs_handlers=[OptimizerOffloadKwargs()]),
    **{
        name: lambda options=options: train(dataloader_config=DataLoaderConfiguration(**options))
        for name, options in LOADERS.items()
    },
    "fsdp2": lambda: train(fsdp_plugin=fsdp()),
    "fsdp2, accumulation": lambda: train(2, fsdp_plugin=fsdp(state_dict_type="SHARDED_STATE_DICT")),
    "fsdp2, bf16": lambda: train(mixed_precision="bf16", tolerance=LOW, fsdp_plugin=fsdp()),
    "fsdp2, offloaded": lambda: train(fsdp_plugin=fsdp(cpu_offload=True)),
    "fsdp2, offloaded, sharded": lambda: train(
        fsdp_plugin=fsdp(cpu_offload=True, state_dict_type="SHARDED_STATE_DICT")
    ),
    "fsdp2, recomputed": lambda: train(fsdp_plugin=fsdp(activation_checkpointing=True)),
    "fsdp2, from rank 0": lambda: train(fsdp_plugin=fsdp(cpu_ram_efficient_loading=True)),
    "tp": lambda: train(parallelism_config=ParallelismConfig(tp_size=2, dp_replicate_size=WORLD // 2)),
    "pp": lambda: train(parallelism_config=ParallelismConfig(pp_size=2, dp_replicate_size=WORLD // 2)),
    "hsdp": lambda: train(
        parallelism_config=ParallelismConfig(dp_replicate_size=2, dp_shard_size=2), fsdp_plugin=fsdp()
    ),
    "fsdp x tp": lambda: train(parallelism_config=ParallelismConfig(tp_size=2, dp_shard_size=2), fsdp_plugin=fsdp()),
    "resume": resume,
    "identity": identity,
    "placement": placement,
}

if __name__ == "__main__":
    CASES[sys.argv[2]]()
