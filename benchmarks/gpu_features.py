# SPDX-License-Identifier: Apache-2.0
"""Checks of `gpu_check.py`: sharding, compilation, checkpoints, adapters, averages, guards and memory on one GPU."""

from __future__ import annotations

import functools
import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

STEPS, WIDTH, TOKENS = 10, 128, 64


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 4 * WIDTH),
            nn.Linear(4 * WIDTH, WIDTH),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding, self.blocks = (
            nn.Embedding(TOKENS, WIDTH),
            nn.ModuleList(Block() for _ in range(3)),
        )
        self.dropout, self.head = nn.Dropout(dropout), nn.Linear(WIDTH, TOKENS)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.dropout(x))


def made(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return Model(dropout)


def batches(device: torch.device, first: int = 0, last: int = STEPS) -> Iterator[torch.Tensor]:
    ids = torch.randint(TOKENS, (STEPS, 16, 32), generator=torch.Generator().manual_seed(1))
    yield from ids[first:last].to(device)


def loss_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return cross_entropy(model(ids).float().flatten(0, 1), (ids.flatten() * 3 + 1) % TOKENS)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)


def plain(
    model: nn.Module, device: torch.device, dtype: torch.dtype | None = None, loss: Callable[..., Any] = loss_of,
    after: Callable[[], object] = lambda: None, skipped: int | None = None,
) -> list[float]:  # fmt: skip
    """The losses of a loop in plain PyTorch. The step numbered `skipped` is left out."""
    model.to(device)
    optimizer, losses = adamw(model), []
    for step, ids in enumerate(batches(device)):
        with torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
            value = loss(model, ids)
        value.backward()
        if step != skipped:
            optimizer.step()
        optimizer.zero_grad()
        after()
        losses.append(value.item())
    return losses


def through_api(
    accelerator: Any, model: nn.Module, optimizer: Any, first: int = 0, last: int = STEPS,
    loss: Callable[..., Any] = loss_of, infinite: int | None = None,
) -> list[float]:  # fmt: skip
    losses = []
    for step, ids in enumerate(batches(accelerator.device, first, last), first):
        value = loss(model, ids)
        accelerator.backward(value * (math.inf if step == infinite else 1.0))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())
    return losses


def fresh_state() -> None:
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def accelerator_on(device: torch.device, **options: Any) -> Any:
    from accelerate import Accelerator

    fresh_state()
    return Accelerator(cpu=device.type == "cpu", **options)


def assert_close(actual: list[float], expected: list[float], tolerance: float) -> None:
    assert len(actual) == len(expected), f"expected {len(expected)} losses, got {len(actual)}"
    difference = max(abs(a - b) for a, b in zip(actual, expected, strict=True))
    assert difference <= tolerance, (
        f"the losses differ by {difference:.2e}, more than {tolerance:.0e}"
    )


def assert_same(actual: nn.Module, expected: nn.Module, tolerance: float) -> None:
    for (name, one), two in zip(
        actual.state_dict().items(), expected.state_dict().values(), strict=True
    ):
        difference = (one - two).abs().max().item()
        assert difference <= tolerance, (
            f"{name} differs by {difference:.2e}, more than {tolerance:.0e}"
        )


def check_resumed(device: torch.device) -> None:
    """Check that a run with dropout equals the plain loop, and that its resumed second half repeats it to the bit."""
    accelerator = accelerator_on(device)
    model = made(0.2)
    model, optimizer = accelerator.prepare(model, adamw(model))
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(7)
        losses = through_api(accelerator, model, optimizer, 0, STEPS // 2)
        accelerator.save_state(folder, blocking=False)
        losses += through_api(accelerator, model, optimizer, STEPS // 2)
        accelerator.load_state(folder)
        again = through_api(accelerator, model, optimizer, STEPS // 2)
    raw = made(0.2)
    torch.manual_seed(7)
    assert_close(losses, plain(raw, device), 1e-4)
    assert again == losses[STEPS // 2 :], f"after the load {again}, before {losses[STEPS // 2 :]}"


def check_compiled(device: torch.device) -> None:
    accelerator = accelerator_on(device, dynamo_backend="inductor", mixed_precision="bf16")
    model = made()
    model, optimizer = accelerator.prepare(model, adamw(model))
    assert_close(
        through_api(accelerator, model, optimizer), plain(made(), device, torch.bfloat16), 2e-2
    )


def check_average(device: torch.device) -> None:
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    accelerator = accelerator_on(device)
    model = made()
    model, optimizer = accelerator.prepare(model, adamw(model))
    average = accelerator.track_average(model, decay=0.9)
    through_api(accelerator, model, optimizer)
    raw = made().to(device)
    expected = AveragedModel(raw, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    plain(raw, device, after=lambda: expected.update_parameters(raw))
    with average.applied():
        assert_same(model, expected.module, 1e-4)


def check_non_finite(device: torch.device) -> None:
    for precision, dtype in (("no", None), ("bf16", torch.bfloat16)):
        accelerator = accelerator_on(device, non_finite="skip", mixed_precision=precision)
        model = made()
        model, optimizer = accelerator.prepare(model, adamw(model))
        losses = through_api(accelerator, model, optimizer, infinite=4)
        assert_close(losses, plain(made(), device, dtype, skipped=4), 1e-4)


def check_precision_policy(device: torch.device) -> None:
    """Check that modules in fp32 compute what `autocast(enabled=False)` around them gives."""

    def by_hand(model: nn.Module) -> nn.Module:
        for block in model.blocks:
            forward = block.norm.forward

            def in_fp32(x: torch.Tensor, forward: Callable[..., Any] = forward) -> torch.Tensor:
                with torch.autocast(device.type, enabled=False):
                    return forward(x.float())

            block.norm.forward = in_fp32
        return model

    accelerator = accelerator_on(
        device, mixed_precision="bf16", precision_policy={"*norm": torch.float32}
    )
    model = made()
    model, optimizer = accelerator.prepare(model, adamw(model))
    assert_close(
        through_api(accelerator, model, optimizer),
        plain(by_hand(made()), device, torch.bfloat16),
        1e-4,
    )


def check_lazy_batches(device: torch.device) -> None:
    """Check that batches which are collected before their forward do not fill the GPU."""
    from torch.utils.data import DataLoader

    from accelerate import DataLoaderConfiguration

    size, used = 2**20 * 4, {}
    for placement in (None, "lazy"):
        accelerator = accelerator_on(
            device, dataloader_config=DataLoaderConfiguration(device_placement=placement)
        )
        model = nn.Linear(1024, 8)
        data = torch.zeros(8 * 1024, 1024)  # 8 batches of 4 MiB
        model, loader = accelerator.prepare(
            model, DataLoader(data, 1024, pin_memory=device.type == "cuda")
        )
        window = list(loader)
        used[placement] = torch.cuda.memory_allocated() if device.type == "cuda" else 0
        assert device.type == "cpu" or all(
            batch.is_cuda != (placement == "lazy") for batch in window
        )
        for batch in window:
            assert model(batch).device.type == device.type
        del window, batch, loader, model
    assert device.type == "cpu" or used[None] - used["lazy"] >= 7 * size, f"bytes allocated: {used}"


def check_out_of_memory(device: torch.device) -> None:
    """Check that a batch size is reduced until the GPU holds it, and that what was allocated is free again."""
    if device.type == "cpu":
        return
    from accelerate.utils import find_executable_batch_size

    accelerator_on(device)
    total, tried = torch.cuda.get_device_properties(0).total_memory, []

    @find_executable_batch_size(starting_batch_size=64)
    def fill(batch_size: int) -> int:
        tried.append(batch_size)
        held = [
            torch.empty(total // 20, dtype=torch.uint8, device=device) for _ in range(batch_size)
        ]
        return len(held)

    assert 16 <= fill() < 20 and len(tried) > 1, f"tried {tried}"
    assert torch.cuda.memory_allocated() < total // 20, (
        "the tensors of a failed try are still allocated"
    )
    torch.cuda.empty_cache()  # the benchmarks run in processes of their own


def check_device_map(device: torch.device) -> None:
    """Check that a model of which the GPU may hold a part, and main memory and the disk the rest, is what it was."""
    from accelerate import dispatch_model, infer_auto_device_map

    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(12))).requires_grad_(False)
    ids = torch.randn(4, 512, generator=torch.Generator().manual_seed(0))
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        import copy

        expected = copy.deepcopy(model).to(device)(ids.to(device)).cpu()
        first: Any = 0 if device.type == "cuda" else "cpu"
        limits = {0: "5MB", "cpu": "4MB"} if device.type == "cuda" else {"cpu": "5MB"}
        placed = infer_auto_device_map(model, max_memory=limits)
        assert len(set(placed.values())) == len(limits) + 1, f"not in all places: {placed}"
        dispatched = dispatch_model(model, placed, main_device=first, offload_dir=folder)
        for _ in range(3):
            output = dispatched(ids).cpu()
            # Products of another size may use another algorithm; the sizes are the same here.
            assert torch.equal(output, expected), (
                f"differs by {(output - expected).abs().max():.1e}"
            )


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=TOKENS, hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, eos_token_id=None, pad_token_id=0,
        )
    )  # fmt: skip


def own_loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids, labels=ids).loss


def check_adapters(device: torch.device, quantized: bool) -> None:
    """Check that LoRA, on a base in 4 bits too, equals the plain loop, and that peft loads what is saved."""
    from peft import LoraConfig, PeftModel, get_peft_model

    def base() -> nn.Module:
        model = llama()
        if quantized:
            import bitsandbytes

            for parent in list(model.modules()):
                for name, layer in list(parent.named_children()):
                    if isinstance(layer, nn.Linear) and name != "lm_head":
                        small = bitsandbytes.nn.Linear4bit(
                            layer.in_features, layer.out_features, bias=False, quant_type="nf4",
                            compute_dtype=torch.bfloat16,
                        )  # fmt: skip
                        weight = layer.weight.data
                        small.weight = bitsandbytes.nn.Params4bit(
                            weight, requires_grad=False, quant_type="nf4"
                        )
                        setattr(parent, name, small)
            model.is_loaded_in_4bit = model.is_quantized = True
            model.to(device)
        return model.requires_grad_(False)

    def adapted() -> nn.Module:
        options = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
        model = base()
        torch.manual_seed(3)
        return get_peft_model(model, options)

    accelerator = accelerator_on(device, mixed_precision="bf16")
    model = adapted()
    model, optimizer = accelerator.prepare(model, adamw(model))
    losses = through_api(accelerator, model, optimizer, loss=own_loss)
    raw = adapted()
    assert_close(losses, plain(raw, device, torch.bfloat16, loss=own_loss), 2e-3)
    with tempfile.TemporaryDirectory() as folder:
        saved = Path(accelerator.save_state(f"{folder}/state"))
        accelerator.save_model(model, f"{folder}/adapter")
        trained = {
            name: p
            for name, p in accelerator.unwrap_model(model).named_parameters()
            if p.requires_grad
        }
        for path in (saved / "adapter", Path(folder, "adapter")):
            loaded = dict(PeftModel.from_pretrained(base().to(device), path).named_parameters())
            assert all(torch.equal(loaded[name], tensor) for name, tensor in trained.items()), (
                f"{path} differs"
            )
        again = through_api(accelerator, model, optimizer, loss=own_loss)
        accelerator.load_state(saved)
        assert through_api(accelerator, model, optimizer, loss=own_loss) == again, (
            "the load changed the run"
        )


def sharded_worker() -> None:
    """One rank under FSDP: train, save, load, train the second half again, generate, and print the losses."""
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=int(sys.argv[2]), auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"], activation_checkpointing=sys.argv[2] == "2",
    )  # fmt: skip
    accelerator = Accelerator(fsdp_plugin=plugin, mixed_precision=sys.argv[3])
    model = llama()
    model, optimizer = accelerator.prepare(model, adamw(model))
    losses = through_api(accelerator, model, optimizer, 0, STEPS // 2, loss=own_loss)
    with tempfile.TemporaryDirectory() as folder:
        accelerator.save_state(folder)
        losses += through_api(accelerator, model, optimizer, STEPS // 2, loss=own_loss)
        accelerator.load_state(folder)
    again = through_api(accelerator, model, optimizer, STEPS // 2, loss=own_loss)
    model.eval()
    ids = next(batches(accelerator.device))[:2, :4]
    with torch.no_grad():
        generated = model.generate(ids, max_new_tokens=8, do_sample=False).tolist()
    print(json.dumps({"losses": losses, "again": again, "generated": generated}))
    accelerator.end_training()


def launched(device: torch.device, script: str, *arguments: str, options: tuple[str, ...]) -> str:
    """Return what a launched script prints on stdout. `options` are those of the launch."""
    command = [sys.executable, "-m", "accelerate.commands.main", "launch", *options]
    if device.type == "cpu":
        command.append("--cpu")
    done = subprocess.run(
        [*command, script, *arguments], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, f"exit code {done.returncode}:\n{done.stderr[-2000:]}"
    return done.stdout


def check_sharded(device: torch.device, version: int, precision: str) -> None:
    """Check that one shard trains, saves, loads and generates as the plain loop does."""
    output = launched(
        device,
        __file__,
        "sharded",
        str(version),
        precision,
        options=("--num_processes", "1", "--use_fsdp"),
    )
    found = json.loads(next(line for line in output.splitlines() if line.startswith("{")))
    raw = llama()
    expected = plain(raw, device, torch.bfloat16 if precision == "bf16" else None, loss=own_loss)
    # In bf16 FSDP computes with parameters in bf16, and autocast with operations in it.
    assert_close(found["losses"], expected, 1e-4 if precision == "no" else 3e-2)
    assert_close(found["again"], found["losses"][STEPS // 2 :], 0.0 if precision == "no" else 1e-3)
    if precision == "no":
        raw.eval()
        with torch.no_grad():
            ids = next(batches(device))[:2, :4]
            assert (
                raw.generate(ids, max_new_tokens=8, do_sample=False).tolist() == found["generated"]
            )


def recorded_worker() -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(project_dir=sys.argv[2])
    model = made()
    model, optimizer = accelerator.prepare(model, adamw(model))
    for _ in range(10):
        through_api(accelerator, model, optimizer)
    accelerator.end_training()


def check_recorded(device: torch.device) -> None:
    """Check that a recorded run has its steps and the GPU's memory."""
    with tempfile.TemporaryDirectory() as folder:
        launched(
            device, __file__, "recorded", folder, options=("--num_processes", "1", "--telemetry")
        )
        command = [
            sys.executable,
            "-m",
            "accelerate.commands.main",
            "report",
            folder,
            "--format",
            "json",
        ]
        found = subprocess.run(
            command, capture_output=True, text=True, timeout=120, check=True
        ).stdout
        assert json.loads(found), "the report is empty"
        assert device.type == "cpu" or "memory" in found, "no memory of the GPU in the report"


def checks(device: torch.device) -> dict[str, Callable[[], None]]:
    found: dict[str, Callable[..., None]] = {
        "dropout, checkpoint and resume": check_resumed,
        "compiled, bf16": check_compiled,
        "average of weights": check_average,
        "steps that are not finite": check_non_finite,
        "modules in fp32": check_precision_policy,
        "batches that wait on the host": check_lazy_batches,
        "out of memory, smaller batches": check_out_of_memory,
        "device map over GPU, memory and disk": check_device_map,
        "a recorded run": check_recorded,
    }
    if importlib.util.find_spec("transformers") is not None:
        for version, precision in ((2, "no"), (2, "bf16"), (1, "no")):
            name = f"FSDP{version} on one rank, {precision}"
            found[name] = functools.partial(check_sharded, version=version, precision=precision)
        if importlib.util.find_spec("peft") is not None:
            found["LoRA"] = functools.partial(check_adapters, quantized=False)
            if importlib.util.find_spec("bitsandbytes") is not None:
                found["QLoRA"] = functools.partial(check_adapters, quantized=True)
    return {name: functools.partial(check, device) for name, check in found.items()}


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    {"sharded": sharded_worker, "recorded": recorded_worker}[sys.argv[1]]()
