# SPDX-License-Identifier: Apache-2.0
"""Cases of `test_device.py`, each on simulated devices: `device_cases.py FOLDER CASE`."""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import os
import sys
from pathlib import Path

import pytest
import simulated_device
import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader

from accelerate import (
    Accelerator,
    DataLoaderConfiguration,
    FullyShardedDataParallelPlugin,
    cpu_offload,
    cpu_offload_with_hook,
    disk_offload,
    dispatch_model,
    infer_auto_device_map,
    init_empty_weights,
    load_checkpoint_and_dispatch,
)
from accelerate.hooks import remove_hook_from_submodules
from accelerate.parallelism_config import ParallelismConfig
from accelerate.state import AcceleratorState
from accelerate.utils import (
    AORecipeKwargs,
    DistributedDataParallelKwargs,
    OptimizerOffloadKwargs,
    broadcast_object_list,
    find_executable_batch_size,
    gather_object,
    get_max_memory,
    release_memory,
    send_to_device,
    set_seed,
    synchronize_rng_states,
)

sys.path.append(str(Path(__file__).parents[2] / "examples" / "parallel"))
from llama import Llama, LlamaConfig

KIND, FOLDER = simulated_device.KIND, Path(sys.argv[1])
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
EPOCHS, BATCH, CLIP = 2, 8, 0.5
# Adam makes steps of 0.01 in the direction of rounding errors, and the scaler of fp16 leaves out the first steps.
LOW = 0.2
IS_LOW = ("16" in sys.argv[2] and "hook" not in sys.argv[2]) or "fp8" in sys.argv[2]
torch.set_default_dtype(torch.float32 if IS_LOW else torch.float64)
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
    shards = (
        1 if accelerator.dataloader_config.split_batches else accelerator.strategy.data_shard[1]
    )
    loader = DataLoader(DATA, BATCH // shards)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    is_lazy = accelerator.dataloader_config.device_placement == "lazy"
    for epoch in range(EPOCHS):
        for x, y in loader:
            assert x.device == (torch.device("cpu") if is_lazy else accelerator.device)
            y = y.to(accelerator.device)
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
    state = {
        name.removeprefix("_orig_mod."): value
        for name, value in accelerator.get_state_dict(model).items()
    }
    assert gather_object([RANK]) == list(range(WORLD))
    assert broadcast_object_list([RANK]) == [0]
    accelerator.save_model(model, FOLDER / "model")
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        expected = plain(window)
        assert set(state) == set(expected)
        distance = max(
            (state[name].cpu() - value).abs().max().item() for name, value in expected.items()
        )
        assert distance <= tolerance, distance
    accelerator.end_training()


def fsdp(**options):
    return FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
        **options,
    )


def fp8(**options):
    """Emulated float8, in which weights are gathered too."""
    from torchao.float8 import Float8LinearConfig

    config = Float8LinearConfig(emulate=True, enable_fsdp_float8_all_gather=True)
    train(
        mixed_precision="fp8", tolerance=LOW, kwargs_handlers=[AORecipeKwargs(config=config)],
        fsdp_plugin=fsdp(**options),
    )  # fmt: skip


def resume():
    """A run with dropout goes on with the device's random numbers."""

    def run(seed, stop=None, load=False):
        AcceleratorState._reset_state(reset_partial_state=True)
        set_seed(seed)
        accelerator = Accelerator()
        model, optimizer = build(drop=0.3)
        model, optimizer, loader = accelerator.prepare(
            model, optimizer, DataLoader(DATA, BATCH, shuffle=True)
        )
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


def placement():
    """Device maps over two devices, host memory and the disk; hooks of pipelines of models."""
    model, _ = build()
    x = torch.stack([x for x, _ in DATA])
    expected = model(x)
    save_file(model.state_dict(), FOLDER / "model.safetensors", metadata={"format": "pt"})
    assert list(get_max_memory()) == [0, 1, 2, 3, "cpu"]
    blocks = {f"blocks.{number}": place for number, place in enumerate((0, 1, "cpu", "disk"))}
    planned = infer_auto_device_map(
        build()[0], {0: 8000, 1: 8000, "cpu": 4000}, no_split_module_classes=["Block"]
    )
    for devices in ({"inputs": 0, **blocks, "output": 0}, planned):
        with init_empty_weights():
            empty = Net()
        loaded = load_checkpoint_and_dispatch(
            empty,
            FOLDER / "model.safetensors",
            device_map=devices,
            offload_folder=FOLDER / "offload",
        )
        moved = dispatch_model(build()[0], devices, offload_dir=FOLDER / "offload")
        for found in (loaded, loaded, moved):
            torch.testing.assert_close(found(x).cpu(), expected, rtol=0, atol=1e-8)
    streamed()
    model, hook = cpu_offload_with_hook(model, torch.device(KIND, 0))
    torch.testing.assert_close(model(x).cpu(), expected, rtol=0, atol=1e-8)
    assert model.output.weight.device.type == KIND
    hook.offload()
    assert model.output.weight.device.type == "cpu"


class Adapted(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base = base
        self.down, self.up = nn.Linear(512, 4, bias=False), nn.Linear(4, 512, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def streamed():
    """Weights copied ahead from main memory and from files: outputs, gradients and the memory of the device."""
    device = torch.device(KIND, 0)
    layers = [nn.Linear(512, 512).double().requires_grad_(False) for _ in range(6)]
    model = nn.Sequential(*layers)
    x = torch.randn(4, 512, dtype=torch.double, requires_grad=True)
    expected = model(x)
    (wanted,) = torch.autograd.grad(expected.square().sum(), x)
    size = (512 * 512 + 512) * 8
    for offload in (cpu_offload, functools.partial(disk_offload, offload_dir=FOLDER / "streamed")):
        moved = offload(copy.deepcopy(model), execution_device=device)
        for step in range(4):
            if step == 2:
                torch.npu.reset_peak_memory_stats(device)
                before = torch.npu.memory_allocated(device)
            output = moved(x)
            (gradient,) = torch.autograd.grad(output.square().sum(), x)
            torch.testing.assert_close(output, expected, rtol=0, atol=1e-10)
            torch.testing.assert_close(gradient, wanted, rtol=0, atol=1e-10)
        peak = torch.npu.max_memory_allocated(device)
        assert peak - before < size, (before, peak)
        assert size < peak < 2 * size + 2**19
        remove_hook_from_submodules(moved)
        del output, gradient
        assert torch.npu.memory_allocated(device) < 2**16
        assert torch.equal(moved(x), expected)
    # Adapters stay on the device, their base is on the host.
    resident = nn.Sequential(*map(Adapted, layers))
    moved = copy.deepcopy(resident)
    places: dict[str, object] = {"": "cpu"}
    for name, parameter in moved.named_parameters():
        if parameter.requires_grad:
            places[name] = 0
    dispatch_model(moved, places)
    for _ in range(3):
        resident(x).square().sum().backward()
        moved(x).square().sum().backward()
    for name, parameter in resident.named_parameters():
        if parameter.requires_grad:
            gradient = moved.get_parameter(name).grad
            assert gradient.device == device
            torch.testing.assert_close(gradient.cpu(), parameter.grad, rtol=1e-10, atol=0)
        else:
            assert moved.get_parameter(name).is_meta


def collectives():
    """Tensors and objects of the device and of the host, in one message or alone."""
    accelerator = Accelerator()
    ranks = list(range(WORLD))
    for device in (accelerator.device, torch.device("cpu")):
        padded = accelerator.pad_across_processes(
            torch.full((RANK + 1, 2), float(RANK), device=device)
        )
        assert padded.shape == (WORLD, 2) and padded.device == device
        found = accelerator.gather({"x": padded, "ranks": [torch.tensor([RANK], device=device)]})
        assert found["x"].device == device and found["ranks"][0].tolist() == ranks
        assert (
            accelerator.reduce(torch.tensor([1.0 + RANK], device=device), "mean").item()
            == (WORLD + 1) / 2
        )
        for dtype in (
            torch.bfloat16,
            torch.float16,
            torch.int64,
            torch.bool,
            torch.uint8,
            torch.complex64,
        ):
            assert accelerator.gather(torch.ones(2, dtype=dtype, device=device)).shape == (
                2 * WORLD,
            )
    mixed = accelerator.gather({"device": torch.ones(1, device=KIND), "host": torch.ones(1)})
    assert mixed["device"].device == accelerator.device and mixed["host"].device.type == "cpu"
    assert [
        each.item() for each in gather_object([torch.tensor(RANK, device=accelerator.device)])
    ] == ranks
    objects = [torch.full((2,), RANK, device=accelerator.device), {"rank": RANK}]
    broadcast_object_list(objects)
    assert objects[0].sum() == 0 and objects[1] == {"rank": 0}
    with accelerator.split_between_processes({"x": torch.arange(5, device=KIND)}) as part:
        assert part["x"].device == accelerator.device
    synchronize_rng_states(["torch", KIND])
    assert len(accelerator.gather(torch.rand(1, device=KIND)).unique()) == 1


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    name: str


def batches():
    """Batches of a class of their own and ragged tensors, with each way to copy them; each sample once."""
    for options in ({}, {"dispatch_batches": True}, {"non_blocking": True}):
        AcceleratorState._reset_state()
        accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(**options))
        loader = DataLoader(
            DATA[:13], 4, pin_memory="non_blocking" in options,
            collate_fn=lambda rows: Batch(torch.stack([x for x, _ in rows]), "rows"),
        )  # fmt: skip
        found = []
        for batch in accelerator.prepare(loader):
            assert batch.x.device == accelerator.device
            found.append(accelerator.gather_for_metrics(batch.x).cpu())
        assert torch.equal(
            torch.cat(found).sort(0)[0], torch.stack([x for x, _ in DATA[:13]]).sort(0)[0]
        )
    ragged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    assert send_to_device({"x": [ragged]}, accelerator.device)["x"][0].device == accelerator.device


def memory():
    """Nothing is left on the device; a smaller batch is tried after the device's error."""
    allocated = torch.get_device_module(KIND).memory_allocated
    accelerator = Accelerator()
    for release in (accelerator.free_memory, release_memory):
        model, optimizer, loader = accelerator.prepare(*build(), DataLoader(DATA, BATCH))
        for x, y in loader:
            accelerator.backward(nn.functional.mse_loss(model(x), y))
            optimizer.step()
        del x, y
        assert allocated() > 4000
        accelerator.clear()
        model, optimizer, loader = release(model, optimizer, loader)
        gc.collect()
        assert allocated() <= 64, allocated()

    @find_executable_batch_size(starting_batch_size=64)
    def largest(size):
        kept = torch.ones(size * 1000, device=accelerator.device)
        if len(kept) > 16000:
            raise RuntimeError("NPU out of memory. Tried to allocate 2.00 GiB")
        return size

    assert 8 < largest() <= 16 and allocated() <= 64


def places():
    """A checkpoint of the CPU goes on on a device, and back."""

    def run(cpu, load=None):
        AcceleratorState._reset_state(reset_partial_state=True)
        accelerator = Accelerator(cpu=cpu)
        model, optimizer, loader = accelerator.prepare(*build(), DataLoader(DATA, BATCH))
        if load is not None:
            accelerator.load_state(FOLDER / load)
        for x, y in loader:
            accelerator.backward(nn.functional.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        assert {value.device.type for value in model.state_dict().values()} == {
            "cpu" if cpu else KIND
        }
        accelerator.save_state(FOLDER / f"after {load}")
        return accelerator.get_state_dict(model)

    expected = [run(True), run(True, "after None"), run(True, "after after None")]
    found = [run(True), run(False, "after None"), run(True, "after after None")]
    for one, other in zip(expected, found, strict=True):
        for name, value in one.items():
            torch.testing.assert_close(other[name].cpu(), value, rtol=0, atol=1e-8)


def refused():
    """What a backend with few functions cannot do is an error of torch, which names it."""
    with pytest.raises(AssertionError, match="AMP"):
        Accelerator(mixed_precision="bf16").prepare(nn.Linear(8, 1))(torch.ones(1, 8, device=KIND))
    with pytest.raises(AttributeError, match="get_rng_state"):
        synchronize_rng_states([KIND])
    assert list(get_max_memory()) == ["cpu"]


def split_sequence(**sizes):
    """Sequences over the ranks; with dp_shard_size the parameters too."""

    def start():
        torch.manual_seed(0)
        model = Llama(
            LlamaConfig(vocabulary=32, width=16, hidden=32, layers=2, heads=4, kv_heads=2)
        )
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    def loss_of(model, ids, labels):
        return nn.functional.cross_entropy(model(ids).flatten(0, 1), labels.flatten())

    tokens = [torch.randint(32, (4, 17)) for _ in range(4)]
    plain_model, optimizer = start()
    for batch in tokens:
        loss_of(plain_model, batch[:, :-1], batch[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
    accelerator = Accelerator(parallelism_config=ParallelismConfig(**sizes), fsdp_plugin=fsdp())
    model, optimizer = accelerator.prepare(*start())
    index, count = accelerator.strategy.data_shard
    for batch in tokens:
        batch = batch.chunk(count)[index].to(accelerator.device)
        ids, labels = batch[:, :-1].clone(), batch[:, 1:].clone()
        with accelerator.maybe_context_parallel([ids, labels], [1, 1], no_restore_buffers={labels}):
            accelerator.backward(loss_of(model, ids, labels))
            optimizer.step()
            optimizer.zero_grad()
    state = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        for name, value in plain_model.state_dict().items():
            torch.testing.assert_close(state[name].cpu(), value, rtol=0, atol=1e-8)
    accelerator.end_training()


def packed():
    """Masks and positions of packed rows are on the device."""

    def start():
        torch.manual_seed(0)
        model = Llama(
            LlamaConfig(vocabulary=32, width=16, hidden=32, layers=2, heads=4, kv_heads=2)
        )
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    def loss_of(model, ids, labels, **lengths):
        logits = model(ids, **lengths).flatten(0, 1)
        return nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum")

    lengths = [[5, 8, 3], [7, 9]]
    plain_model, plain_optimizer = start()
    accelerator = Accelerator()
    model, optimizer = accelerator.prepare(*start())
    for _ in range(4):
        ids, labels = torch.randint(32, (2, 2, 16))
        for row, sizes in enumerate(lengths):
            for document, targets in zip(
                ids[row].split(sizes), labels[row].split(sizes), strict=True
            ):
                loss_of(plain_model, document[None], targets[None]).backward()
        batch = ids.to(accelerator.device), labels.to(accelerator.device)
        accelerator.backward(loss_of(model, *batch, seq_lens=torch.tensor([[5, 8, 3], [7, 9, 0]])))
        for each in (plain_optimizer, optimizer):
            each.step()
            each.zero_grad()
    state = accelerator.get_state_dict(model)
    for name, value in plain_model.state_dict().items():
        torch.testing.assert_close(state[name].cpu(), value, rtol=0, atol=1e-8)
    accelerator.end_training()


LOADERS = {
    "dispatch": {"dispatch_batches": True},
    "copies": {"non_blocking": True},
    "split": {"split_batches": True},
    "lazy": {"device_placement": "lazy"},
}
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
    "activations on the host": lambda: train(transforms=["activation_offload"]),
    "compiled": lambda: train(dynamo_backend="aot_eager"),
    **{
        f"hook {hook}": lambda hook=hook: train(
            kwargs_handlers=[DistributedDataParallelKwargs(comm_hook=hook, static_graph=True)],
            tolerance=LOW,
        )
        for hook in ("fp16", "power_sgd")
    },
    "fsdp2, fp16": lambda: train(mixed_precision="fp16", tolerance=LOW, fsdp_plugin=fsdp()),
    "fsdp2": lambda: train(fsdp_plugin=fsdp()),
    "fsdp2, bf16": lambda: train(mixed_precision="bf16", tolerance=LOW, fsdp_plugin=fsdp()),
    "fsdp2, fp8": fp8,
    "fsdp2, fp8, from rank 0": lambda: fp8(cpu_ram_efficient_loading=True),
    "fsdp2, offloaded": lambda: train(fsdp_plugin=fsdp(cpu_offload=True)),
    "fsdp2, offloaded, sharded": lambda: train(
        fsdp_plugin=fsdp(cpu_offload=True, state_dict_type="SHARDED_STATE_DICT")
    ),
    "fsdp2, recomputed": lambda: train(fsdp_plugin=fsdp(activation_checkpointing=True)),
    "fsdp2, from rank 0": lambda: train(fsdp_plugin=fsdp(cpu_ram_efficient_loading=True)),
    **{
        f"lazy, {name}": lambda options=options: train(
            dataloader_config=DataLoaderConfiguration(device_placement="lazy"), **options()
        )
        for name, options in {
            "tp": lambda: {"parallelism_config": ParallelismConfig(tp_size=2)},
            "pp": lambda: {"parallelism_config": ParallelismConfig(pp_size=2)},
            "fsdp2": lambda: {"fsdp_plugin": fsdp()},
            "compiled": lambda: {"dynamo_backend": "aot_eager"},
        }.items()
    },
    "tp": lambda: train(
        parallelism_config=ParallelismConfig(tp_size=2, dp_replicate_size=WORLD // 2)
    ),
    "pp": lambda: train(
        parallelism_config=ParallelismConfig(pp_size=2, dp_replicate_size=WORLD // 2)
    ),
    "hsdp": lambda: train(
        parallelism_config=ParallelismConfig(dp_replicate_size=2, dp_shard_size=2),
        fsdp_plugin=fsdp(),
    ),
    "fsdp x tp": lambda: train(
        parallelism_config=ParallelismConfig(tp_size=2, dp_shard_size=2), fsdp_plugin=fsdp()
    ),
    "pp x fsdp": lambda: train(
        parallelism_config=ParallelismConfig(pp_size=2, dp_shard_size=2), fsdp_plugin=fsdp()
    ),
    "pp x tp": lambda: train(parallelism_config=ParallelismConfig(pp_size=2, tp_size=2)),
    "cp": lambda: split_sequence(cp_size=2),
    "sp": lambda: split_sequence(sp_size=2),
    "cp x fsdp": lambda: split_sequence(cp_size=2, dp_shard_size=2),
    "cp x tp": lambda: split_sequence(cp_size=2, tp_size=2),
    "refused": refused,
    "collectives": collectives,
    "batches": batches,
    "memory": memory,
    "places": places,
    "packed": packed,
    "resume": resume,
    "placement": placement,
}

if __name__ == "__main__":
    CASES[sys.argv[2]]()
