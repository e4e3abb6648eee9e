# SPDX-License-Identifier: Apache-2.0
"""Checks that need a GPU: mixed precision, loss scaling, prefetching, pinned memory and launching. Then benchmarks.

Exits with code 0 if there is no GPU. `--cpu` runs the same checks on the CPU, to test this script. `--peer PYTHON`
also runs the benchmarks with the `accelerate` of that interpreter.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import importlib.util
import inspect
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gpu_features
import torch
import torch.utils.checkpoint
from gpu_features import assert_close, fresh_state, launched
from timing import alternate, emit
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

WIDTH, CLASSES, BATCH, BATCHES = 256, 10, 64, 12
DTYPES = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    layers = (torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU(), torch.nn.Linear(WIDTH, CLASSES))
    return torch.nn.Sequential(*layers)


def make_loader(pin: bool = False, batches: int = BATCHES, batch: int = BATCH) -> DataLoader:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(batches * batch, WIDTH, generator=generator)
    y = torch.randint(CLASSES, (batches * batch,), generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=batch, pin_memory=pin)


def raw_losses(device: torch.device, dtype: torch.dtype | None) -> list[float]:
    """Return the losses of a plain PyTorch loop with autocast, and with a gradient scaler in fp16."""
    model = make_model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype is torch.float16)
    losses = []
    for x, y in make_loader():
        x, y = x.to(device), y.to(device)
        with torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
            output = model(x)
        loss = cross_entropy(output.float(), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def own_losses(cpu: bool, precision: str, pin: bool = False) -> list[float]:
    from accelerate import Accelerator, DataLoaderConfiguration

    fresh_state()
    accelerator = Accelerator(
        cpu=cpu,
        mixed_precision=precision,
        dataloader_config=DataLoaderConfiguration(non_blocking=pin),
    )
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, make_loader(pin))
    losses = []
    for x, y in loader:
        assert x.device.type == accelerator.device.type, (
            f"expected the batch on {accelerator.device}, got {x.device}"
        )
        loss = cross_entropy(model(x), y)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def check_precision(device: torch.device, precision: str) -> None:
    """Check that the losses equal those of the plain loop in the same precision."""
    # Both run the same kernels in the same order. Only the order of atomic additions may differ.
    assert_close(
        own_losses(device.type == "cpu", precision), raw_losses(device, DTYPES[precision]), 1e-4
    )


def check_skipped_step(device: torch.device) -> None:
    """Check that an infinite gradient in fp16 skips the step, reports it and leaves the parameters unchanged."""
    from accelerate import Accelerator

    fresh_state()
    accelerator = Accelerator(cpu=device.type == "cpu", mixed_precision="fp16")
    model = torch.nn.Linear(4, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for factor, skipped in ((float("inf"), True), (1.0, False)):
        loss = model(torch.ones(2, 4, device=accelerator.device)).sum() * factor
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if skipped:
            assert accelerator.optimizer_step_was_skipped, (
                "a step with an infinite gradient was not reported as skipped"
            )
            for old, new in zip(before, model.parameters(), strict=True):
                assert torch.equal(old, new.detach()), "a skipped step changed a parameter"


def check_pinned(device: torch.device) -> None:
    """Check that pinned memory with non-blocking copies gives the same losses."""
    assert_close(
        own_losses(device.type == "cpu", "no", pin=device.type != "cpu"),
        raw_losses(device, None),
        1e-4,
    )


def check_loader_values(device: torch.device) -> None:
    """Check that prefetched batches arrive complete and in order."""
    from accelerate import Accelerator, DataLoaderConfiguration

    fresh_state()
    options = DataLoaderConfiguration(non_blocking=True)
    accelerator = Accelerator(cpu=device.type == "cpu", dataloader_config=options)
    loader = accelerator.prepare(make_loader(pin=device.type != "cpu"))
    batches = []
    for x, y in loader:
        batches.append((x, y))
        _ = (x @ x.T).sum()  # overlaps with the next copy
    for (x, y), (expected_x, expected_y) in zip(batches, make_loader(), strict=True):
        assert torch.equal(x.cpu(), expected_x) and torch.equal(y.cpu(), expected_y), (
            "a batch differs from its samples"
        )


def check_launched(device: torch.device, processes: int) -> None:
    """Check that the mean losses of a launched run equal those of the plain loop."""
    output = launched(device, __file__, "--worker", options=("--num_processes", str(processes)))
    losses = json.loads(next(line for line in output.splitlines() if line.startswith("[")))
    assert_close(losses, raw_losses(device, None), 1e-3)


def check_streamed_weights(device: torch.device) -> None:
    """Check that a model whose weights come from main memory and from disk computes the same in each pass."""
    from accelerate import cpu_offload, disk_offload

    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(8)))
    batch = torch.randn(16, 1024)
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        expected = copy.deepcopy(model).to(device)(batch.to(device)).cpu()
        for offload in (cpu_offload, functools.partial(disk_offload, offload_dir=folder)):
            offloaded = offload(copy.deepcopy(model), execution_device=device)
            for _ in range(20):
                output = offloaded(batch).cpu()
                assert torch.equal(output, expected), "streamed weights differ from resident ones"


def check_packed(device: torch.device, precision: str) -> None:
    """Check attention in packed rows against that of each document, in the kernel that the device has for it."""
    from accelerate.core.documents import Documents
    from accelerate.parallel import document_attention

    is_gpu = device.type == "cuda"
    scale = 64 if is_gpu else 1
    lengths = [[40 * scale, 200 * scale, 16 * scale], [100 * scale, 156 * scale]]
    dtype = DTYPES[precision] or torch.float32
    shape = 3, 2, 4, 256 * scale, 64
    inputs = torch.randn(shape, device=device, dtype=dtype, requires_grad=True)
    kernel = None
    if is_gpu:
        is_half = dtype != torch.float32
        kernel = (
            document_attention.attend_by_length if is_half else document_attention.attend_in_blocks
        )
    assert document_attention.kernel_for(*inputs) is kernel, f"the kernel is not {kernel}"
    plain = functools.partial(torch.nn.functional.scaled_dot_product_attention, is_causal=True)
    parts = []
    for row, sizes in enumerate(lengths):
        parts.append(torch.cat([plain(*part) for part in inputs[:, row].split(sizes, 2)], 1))
    output = torch.stack(parts)
    expected = output, torch.autograd.grad(output.float().square().sum(), inputs)[0]
    tolerance = max(16 * torch.finfo(dtype).eps, 2e-5)

    def attend(inputs: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=True)

    forwards = {
        "plain": attend,
        "compiled": torch.compile(attend, backend="aot_eager"),
        "recomputed": functools.partial(
            torch.utils.checkpoint.checkpoint, attend, use_reentrant=False
        ),
    }
    for name, forward in forwards.items():
        if is_gpu:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        with document_attention.DocumentAttention().separating(Documents(lengths, device)):
            output = forward(inputs)
            gradient = torch.autograd.grad(output.float().square().sum(), inputs)[0]
        if is_gpu:
            # A mask for each row, of one byte for each of its elements.
            peak = torch.cuda.max_memory_allocated() - before
            assert peak < 2 * (256 * scale) ** 2, f"{name}: {peak / 2**20:.0f} MiB"
        for value, reference in zip((output, gradient), expected, strict=True):
            torch.testing.assert_close(value, reference, rtol=16 * tolerance, atol=tolerance)


def copy_rate(device: torch.device, size: int) -> float:
    """The speed of a copy of `size` bytes of pinned memory to the device, in bytes a second."""
    pinned = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    target = torch.empty_like(pinned, device=device)

    def copy_pinned() -> None:
        target.copy_(pinned, non_blocking=True)
        if device.type == "cuda":
            torch.cuda.synchronize()

    return size / alternate({"copy": copy_pinned}, rounds=7)["copy"]


def check_offloaded(device: torch.device) -> None:
    """Time forwards with offloaded weights: at 80% of a pinned copy's speed, with two modules more on the device."""
    from accelerate import cpu_offload, dispatch_model
    from accelerate.hooks import remove_hook_from_submodules

    is_gpu = device.type == "cuda"
    width, layers = (8192, 28) if is_gpu else (256, 4)
    module = 2 * width**2
    with torch.device(device):
        linear = functools.partial(torch.nn.Linear, width, width, bias=False, dtype=torch.bfloat16)
        model = torch.nn.Sequential(*(linear() for _ in range(layers)))
        batch = torch.randn(16, width, dtype=torch.bfloat16)

    def forward() -> torch.Tensor:
        output = model(batch)
        if is_gpu:
            torch.cuda.synchronize()
        return output

    rate = copy_rate(device, 4 * module)
    half = {str(layer): "cpu" if layer % 2 else device for layer in range(layers)}
    on_disk = {name: "disk" if place == "cpu" else place for name, place in half.items()}
    failures = []
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        expected = forward().cpu()
        cases = {
            "cpu_offload": (functools.partial(cpu_offload, execution_device=device), layers),
            "half on the CPU": (functools.partial(dispatch_model, device_map=half), layers // 2),
            "half on disk": (
                functools.partial(dispatch_model, device_map=on_disk, offload_dir=folder),
                layers // 2,
            ),
        }
        for name, (offload, offloaded) in cases.items():
            offload(model.cpu())
            assert torch.equal(forward().cpu(), expected), f"{name}: outputs differ"
            modules = 0.0
            if is_gpu:
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            seconds = alternate({"forward": forward}, rounds=7, warmup=3)["forward"]
            if is_gpu:
                peak = torch.cuda.max_memory_allocated() - (layers - offloaded) * module
                modules = peak / module
            limit = offloaded * module / rate
            line = f"{name}: {seconds:.4f} s, limit {limit:.4f} s ({limit / seconds:.0%})"
            print(f"        {line}, {modules:.2f} modules more than those that stay", flush=True)
            if is_gpu and (limit / seconds < 0.8 or modules > 2.1):
                failures.append(line)
            remove_hook_from_submodules(model)
    assert not failures, failures


def worker() -> None:
    """Train on one rank with the same global batches, and print the mean losses over all ranks."""
    from accelerate import Accelerator

    accelerator = Accelerator()
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = make_loader(
        batch=BATCH // accelerator.num_processes, batches=BATCHES * accelerator.num_processes
    )
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for x, y in loader:
        loss = cross_entropy(model(x), y)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), reduction="mean").item())
    accelerator.print(json.dumps(losses))
    accelerator.end_training()


def benchmark(device: torch.device) -> None:
    """Time a step and a loader with this package and with plain PyTorch. Prints one JSON line each."""
    from accelerate import Accelerator

    fresh_state()
    cpu = device.type == "cpu"
    accelerator = Accelerator(cpu=cpu, mixed_precision="bf16")

    def finish() -> None:
        if not cpu:
            torch.cuda.synchronize()

    x, y = (tensor.to(device) for tensor in next(iter(make_loader())))
    raw_model = make_model().to(device)
    raw_optimizer = torch.optim.AdamW(raw_model.parameters(), lr=1e-3)
    own_model = make_model()
    own_model, own_optimizer = accelerator.prepare(
        own_model, torch.optim.AdamW(own_model.parameters(), lr=1e-3)
    )

    def raw_step() -> None:
        for _ in range(50):
            with torch.autocast(device.type, dtype=torch.bfloat16):
                output = raw_model(x)
            cross_entropy(output.float(), y).backward()
            raw_optimizer.step()
            raw_optimizer.zero_grad()
        finish()

    def own_step() -> None:
        for _ in range(50):
            with accelerator.accumulate(own_model):
                accelerator.backward(cross_entropy(own_model(x), y))
                own_optimizer.step()
                own_optimizer.zero_grad()
        finish()

    seconds = alternate({"raw": raw_step, "own": own_step}, rounds=11)
    emit(f"bf16 step on {device.type}", "us", seconds["raw"] / 50, seconds["own"] / 50)

    plain = make_loader(pin=not cpu, batches=64, batch=512)
    own_loader = accelerator.prepare(make_loader(pin=not cpu, batches=64, batch=512))

    def raw_epoch() -> None:
        for batch in plain:
            a = batch[0].to(device)
            for _ in range(8):
                a @ a.T
        finish()

    def own_epoch() -> None:
        for batch in own_loader:
            a = batch[0]
            for _ in range(8):
                a @ a.T
        finish()

    seconds = alternate({"raw": raw_epoch, "own": own_epoch}, rounds=5)
    emit(f"loader to {device.type}, a batch of 512", "us", seconds["raw"] / 64, seconds["own"] / 64)
    benchmark_checkpoint(accelerator, 64 if cpu else 2048)


def benchmark_checkpoint(accelerator: Any, width: int) -> None:
    """Time saving and loading of 16 layers and AdamW's state: 0.75 GiB of values for a width of 2048."""
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(16)))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.backward(model(torch.ones(1, width, device=accelerator.device)).sum())
    optimizer.step()
    with tempfile.TemporaryDirectory() as folder:

        def raw_save() -> None:
            torch.save((model.state_dict(), optimizer.state_dict()), f"{folder}/raw.pt")

        def raw_load() -> None:
            values = torch.load(f"{folder}/raw.pt", map_location=accelerator.device)
            model.load_state_dict(values[0])
            optimizer.load_state_dict(values[1])

        for name, raw, own in (
            ("save_state", raw_save, lambda: accelerator.save_state(f"{folder}/own")),
            ("load_state", raw_load, lambda: accelerator.load_state(f"{folder}/own")),
        ):
            seconds = alternate({"raw": raw, "own": own}, rounds=5)
            emit(f"{name}, a width of {width}", "ms", seconds["raw"], seconds["own"])
        if "blocking" in inspect.signature(accelerator.save_state).parameters:
            seconds = alternate(
                {
                    "raw": raw_save,
                    "own": lambda: accelerator.save_state(f"{folder}/own", blocking=False),
                },
                rounds=5,
            )
            emit(
                "save_state(blocking=False), until the loop goes on",
                "ms",
                seconds["raw"],
                seconds["own"],
            )
            accelerator.end_training()


@contextlib.contextmanager
def report_result(name: str, failures: list[str]) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        failures.append(name)
        print(f"FAILED  {name}: {type(error).__name__}: {error}", flush=True)
    else:
        print(f"passed  {name}", flush=True)


def checks(device: torch.device) -> dict[str, Callable[[], None]]:
    processes = min(2, torch.cuda.device_count()) if device.type == "cuda" else 2
    result: dict[str, Callable[[], None]] = {
        f"training in {name}": lambda name=name: check_precision(device, name) for name in DTYPES
    }
    for name in DTYPES:
        result[f"packed rows in {name}"] = lambda name=name: check_packed(device, name)
    result["streamed weights"] = lambda: check_streamed_weights(device)
    result["offloaded weights at the speed of a copy"] = lambda: check_offloaded(device)
    result["skipped step in fp16"] = lambda: check_skipped_step(device)
    result["prefetched batches"] = lambda: check_loader_values(device)
    result["pinned memory, non-blocking copies"] = lambda: check_pinned(device)
    for count in sorted({1, processes}):
        result[f"launched on {count} process(es)"] = lambda n=count: check_launched(device, n)
    return result | gpu_features.checks(device)


def large_models(peer: str | None, small: bool) -> None:
    """Benchmark a large model with plain PyTorch, this package, the peer and, if torchao is installed, fp8."""
    script, options = (
        str(Path(__file__).with_name("gpu_llama.py")),
        ["--small", "--steps", "3"] if small else [],
    )
    runs = [
        ("raw", sys.executable, ["--variant", "raw"]),
        ("ours", sys.executable, ["--variant", "api"]),
    ]
    if peer is not None:
        runs.append(("peer", peer, ["--variant", "api"]))
    if importlib.util.find_spec("torchao") is not None and not small:
        runs.append(("ours, fp8", sys.executable, ["--variant", "api", "--fp8"]))
    for package, python, variant in runs:
        done = subprocess.run(
            [python, script, *variant, *options], capture_output=True, text=True, timeout=600
        )
        print(f"{package}: {done.stdout.strip() or 'failed: ' + done.stderr[-1000:]}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer", help="Python interpreter of the environment with the peer")
    parser.add_argument("--cpu", action="store_true", help="run the checks on the CPU")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--times", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker()
        return 0
    if not (args.cpu or torch.cuda.is_available()):
        print("no GPU available: nothing to check")
        return 0
    device = torch.device("cpu" if args.cpu else "cuda:0")
    if args.times:
        benchmark(device)
        return 0
    print(
        f"device: {'CPU' if args.cpu else torch.cuda.get_device_name(0)}, torch {torch.__version__}"
    )
    failures: list[str] = []
    for name, check in checks(device).items():
        with report_result(name, failures):
            check()
    for package, python in (("ours", sys.executable), ("peer", args.peer)):
        if python is not None:
            command = [python, str(Path(__file__)), "--times", *(["--cpu"] if args.cpu else [])]
            done = subprocess.run(command, capture_output=True, text=True, timeout=300)
            print(f"{package}:\n{done.stdout or done.stderr[-1000:]}", end="")
    large_models(args.peer, args.cpu)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
