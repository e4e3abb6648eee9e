# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint costs: 100M parameters with AdamW (1.2 GB), beside torch.save and fsync of the same tensors.

And what it costs to go on a thousand batches into an epoch.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import shutil
import tempfile
import time
from pathlib import Path

import torch
from timing import alternate, emit
from torch.utils.data import DataLoader, Dataset

ROUNDS = 5
BATCH, SKIPPED = 8, 1000


def big_run(accelerator):
    """96 blocks of 1024 x 1024 weights, whose optimizer has stepped."""
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(96)))
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = accelerator.prepare(model, optimizer)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def raw_save(model, optimizer, path: Path) -> None:
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def forget(folder: Path) -> None:
    """Drop the folder from the system's file cache, so that a load reads the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def raw_read(folder: Path) -> None:
    """Every byte of the folder from the disk into memory that is mapped already: what any load costs at least."""
    forget(folder)
    buffer = memoryview(bytearray(8 << 20))
    for path in folder.rglob("*"):
        if path.is_file():
            with open(path, "rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass


def background_wait(accelerator, folder: Path) -> float:
    """Seconds for which a background save holds the loop; the save before is finished first."""
    waits = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        accelerator.save_state(str(folder), blocking=False)
        waits.append(time.perf_counter() - begin)
        accelerator.save_state(str(folder))
    return sorted(waits)[len(waits) // 2]


def verify_whole(folder: Path) -> None:
    """Print what it costs to read a checkpoint and compare it with its checksums; nothing where there are none."""
    try:
        from accelerate.checkpointing import verify
    except ImportError:
        return

    def check() -> None:
        forget(folder)
        verify(folder)

    seconds = alternate({"raw": lambda: raw_read(folder), "own": check}, rounds=ROUNDS, warmup=1)
    emit("checkpoint verify", "ms", seconds["raw"], seconds["own"])


class Read(Dataset):
    """100,000 numbers; notes how often one is read."""

    reads = 0

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> torch.Tensor:
        self.reads += 1
        return torch.tensor(index)


def resume_data(accelerator) -> float:
    """Seconds from a position 1,000 batches into an epoch to the batch that follows it; the median."""
    data = Read()
    waits = []
    for _ in range(ROUNDS):
        loader = accelerator.prepare(DataLoader(data, batch_size=BATCH, shuffle=True))
        state = None
        if hasattr(loader, "load_state_dict"):
            batches = iter(loader)
            for _ in range(SKIPPED):
                next(batches)
            # The peer's loaders have a state where torchdata is installed, and the method everywhere.
            with contextlib.suppress(AttributeError):
                state = loader.state_dict()
            loader = accelerator.prepare(DataLoader(data, batch_size=BATCH, shuffle=True))
        data.reads = 0
        begin = time.perf_counter()
        if state is None:
            loader = accelerator.skip_first_batches(loader, SKIPPED)
        else:
            loader.load_state_dict(state)
        next(iter(loader))
        waits.append(time.perf_counter() - begin)
        # A loader may read one batch ahead.
        assert data.reads <= 2 * BATCH, f"{data.reads} samples were read"
    return sorted(waits)[len(waits) // 2]


def memory(name: str) -> int:
    """A line of the system's account of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


def load_memory(load) -> None:
    """Print the most memory that a load takes over what was resident before it."""
    clear = Path("/proc/self/clear_refs")
    if not clear.exists():
        return
    found = []
    for _ in range(ROUNDS):
        clear.write_text("5")  # forgets the highest use so far
        before = memory("VmRSS")
        load()
        found.append(memory("VmHWM") - before)
    print(json.dumps({"what": "checkpoint load memory", "unit": "MB", "raw": None, "own": max(found) / 1e6}))


def main() -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    emit("checkpoint resume data", "ms", None, resume_data(accelerator))
    accelerator.free_memory()
    model, optimizer = big_run(accelerator)
    with tempfile.TemporaryDirectory(dir=os.getcwd()) as root:
        folder, file = Path(root) / "checkpoint", Path(root) / "raw.bin"

        def save() -> None:
            shutil.rmtree(folder, ignore_errors=True)
            accelerator.save_state(str(folder))

        def raw() -> None:
            file.unlink(missing_ok=True)
            raw_save(model, optimizer, file)

        seconds = alternate({"raw": raw, "own": save}, rounds=ROUNDS, warmup=1)
        emit("checkpoint save", "ms", seconds["raw"], seconds["own"])
        save()

        def load() -> None:
            forget(folder)
            accelerator.load_state(str(folder))

        seconds = alternate({"raw": lambda: raw_read(folder), "own": load}, rounds=ROUNDS, warmup=1)
        emit("checkpoint load", "ms", seconds["raw"], seconds["own"])
        load_memory(load)
        verify_whole(folder)
        if "blocking" in inspect.signature(accelerator.save_state).parameters:
            waited = background_wait(accelerator, folder)
        else:
            # Without a background save the loop waits for the whole of it.
            waited = alternate({"own": save}, rounds=ROUNDS, warmup=1)["own"]
        emit("checkpoint wait", "ms", None, waited)
        accelerator.end_training()


if __name__ == "__main__":
    main()
