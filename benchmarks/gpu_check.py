# SPDX-License-Identifier: Apache-2.0
"""What needs a GPU: training in each precision, scaling, prefetch, pinned copies, a launched run; values, then times.

Without a GPU it says so and succeeds. `--cpu` runs the same checks on the processor, to try the checks themselves.
With `--peer PYTHON` the times are taken beside that interpreter's accelerate.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from timing import alternate, emit
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

WIDTH, CLASSES, BATCH, BATCHES = 256, 10, 64, 12
DTYPES = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def fresh_state() -> None:
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


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
    """The losses of a plain PyTorch loop: autocast, and a gradient scaler where the precision needs one."""
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
        cpu=cpu, mixed_precision=precision, dataloader_config=DataLoaderConfiguration(non_blocking=pin)
    )
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, make_loader(pin))
    losses = []
    for x, y in loader:
        assert x.device.type == accelerator.device.type, f"the batch is on {x.device}, not on {accelerator.device}"
        loss = cross_entropy(model(x), y)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def close(found: list[float], wanted: list[float], tolerance: float) -> None:
    assert len(found) == len(wanted), f"{len(found)} losses, not {len(wanted)}"
    worst = max(abs(a - b) for a, b in zip(found, wanted, strict=True))
    assert worst <= tolerance, f"the losses differ by {worst:.2e}, more than {tolerance:.0e}"


def check_precision(device: torch.device, precision: str) -> None:
    """The losses of a run equal those of the plain loop in the same precision."""
    # The same kernels in the same order: what is left is the order of atomic additions, if any.
    close(own_losses(device.type == "cpu", precision), raw_losses(device, DTYPES[precision]), 1e-4)


def check_skipped_step(device: torch.device) -> None:
    """In fp16 an infinite gradient skips the step, says so, and leaves the parameters alone."""
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
                "the step with an infinite gradient was not reported skipped"
            )
            for old, new in zip(before, model.parameters(), strict=True):
                assert torch.equal(old, new.detach()), "a skipped step changed a parameter"


def check_pinned(device: torch.device) -> None:
    """Pinned memory and copies that do not block give the same losses."""
    close(own_losses(device.type == "cpu", "no", pin=device.type != "cpu"), raw_losses(device, None), 1e-4)


def check_loader_values(device: torch.device) -> None:
    """Every batch arrives whole, in order and on the device, also when the next one is copied meanwhile."""
    from accelerate import Accelerator, DataLoaderConfiguration

    fresh_state()
    options = DataLoaderConfiguration(non_blocking=True)
    accelerator = Accelerator(cpu=device.type == "cpu", dataloader_config=options)
    loader = accelerator.prepare(make_loader(pin=device.type != "cpu"))
    kept = []
    for x, y in loader:
        kept.append((x, y))
        _ = (x @ x.T).sum()  # work on the device beside the next copy
    for (x, y), (wanted_x, wanted_y) in zip(kept, make_loader(), strict=True):
        assert torch.equal(x.cpu(), wanted_x) and torch.equal(y.cpu(), wanted_y), "a batch differs from its samples"


def check_launched(device: torch.device, processes: int) -> None:
    """`accelerate launch` on this machine's devices: the losses of all ranks together equal the plain loop's."""
    command = [sys.executable, "-m", "accelerate.commands.main", "launch", "--num_processes", str(processes)]
    if device.type == "cpu":
        command.append("--cpu")
    done = subprocess.run([*command, __file__, "--worker"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"exit code {done.returncode}:\n{done.stderr[-2000:]}"
    found = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("[")))
    close(found, raw_losses(device, None), 1e-3)


def worker() -> None:
    """One rank of a launched run over the same global batches: prints the mean losses of all ranks."""
    from accelerate import Accelerator

    accelerator = Accelerator()
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = make_loader(batch=BATCH // accelerator.num_processes, batches=BATCHES * accelerator.num_processes)
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


def take_times(device: torch.device) -> None:
    """Print what a step and an epoch of the loader cost here, beside the plain loop: one JSON line each."""
    from accelerate import Accelerator

    fresh_state()
    cpu = device.type == "cpu"
    accelerator = Accelerator(cpu=cpu, mixed_precision="bf16")

    def finish() -> None:
        if not cpu:
            torch.cuda.synchronize()

    x, y = (part.to(device) for part in next(iter(make_loader())))
    raw_model = make_model().to(device)
    raw_optimizer = torch.optim.AdamW(raw_model.parameters(), lr=1e-3)
    own_model = make_model()
    own_model, own_optimizer = accelerator.prepare(own_model, torch.optim.AdamW(own_model.parameters(), lr=1e-3))

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


@contextlib.contextmanager
def reported(name: str, failures: list[str]) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        failures.append(name)
        print(f"FAILED  {name}: {type(error).__name__}: {error}", flush=True)
    else:
        print(f"passed  {name}", flush=True)


def checks(device: torch.device) -> dict[str, Callable[[], None]]:
    several = min(2, torch.cuda.device_count()) if device.type == "cuda" else 2
    found: dict[str, Callable[[], None]] = {
        f"training in {name}": lambda name=name: check_precision(device, name) for name in DTYPES
    }
    found["a skipped step in fp16"] = lambda: check_skipped_step(device)
    found["prefetched batches are whole"] = lambda: check_loader_values(device)
    found["pinned memory, copies that do not block"] = lambda: check_pinned(device)
    for processes in sorted({1, several}):
        found[f"launched on {processes} process(es)"] = lambda n=processes: check_launched(device, n)
    return found


def large_models(peer: str | None, small: bool) -> None:
    """Tokens a second, MFU and memory of a large model: plain PyTorch, ours, the peer's; fp8 where it is there."""
    script, shared = str(Path(__file__).with_name("gpu_llama.py")), ["--small", "--steps", "3"] if small else []
    runs = [("raw", sys.executable, ["--variant", "raw"]), ("ours", sys.executable, ["--variant", "api"])]
    if peer is not None:
        runs.append(("peer", peer, ["--variant", "api"]))
    if importlib.util.find_spec("torchao") is not None and not small:
        runs.append(("ours, fp8", sys.executable, ["--variant", "api", "--fp8"]))
    for who, python, options in runs:
        done = subprocess.run([python, script, *options, *shared], capture_output=True, text=True, timeout=600)
        print(f"{who}: {done.stdout.strip() or 'failed: ' + done.stderr[-1000:]}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer", help="the interpreter of the environment that has the peer")
    parser.add_argument("--cpu", action="store_true", help="run the checks on the processor")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--times", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker()
        return 0
    if not (args.cpu or torch.cuda.is_available()):
        print("no GPU here: there is nothing to check")
        return 0
    device = torch.device("cpu" if args.cpu else "cuda:0")
    if args.times:
        take_times(device)
        return 0
    print(f"on {'the processor' if args.cpu else torch.cuda.get_device_name(0)}, torch {torch.__version__}")
    failures: list[str] = []
    for name, check in checks(device).items():
        with reported(name, failures):
            check()
    for who, python in (("ours", sys.executable), ("peer", args.peer)):
        if python is not None:
            command = [python, str(Path(__file__)), "--times", *(["--cpu"] if args.cpu else [])]
            done = subprocess.run(command, capture_output=True, text=True, timeout=300)
            print(f"{who}:\n{done.stdout or done.stderr[-1000:]}", end="")
    large_models(args.peer, args.cpu)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
