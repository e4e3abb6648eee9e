# SPDX-License-Identifier: Apache-2.0
"""Time to save and load a checkpoint of 100M parameters with AdamW (1.1 GiB), compared with torch.save and fsync.

Also measures the time to resume a data loader after a thousand batches of an epoch.
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


def large_model(accelerator):
    """Return a model with 96 linear layers of 1024 x 1024, and its optimizer after one step."""
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


def drop_file_cache(folder: Path) -> None:
    """Drop the folder from the file cache of the system, so that a load reads from the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def raw_read(folder: Path) -> None:
    """Read all files from the disk into a reused buffer: the lower bound for a load."""
    drop_file_cache(folder)
    buffer = memoryview(bytearray(8 << 20))
    for path in folder.rglob("*"):
        if path.is_file():
            with open(path, "rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass


def background_wait(accelerator, folder: Path) -> float:
    """Return the median seconds for which a background save blocks the loop."""
    waits = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        accelerator.save_state(str(folder), blocking=False)
        waits.append(time.perf_counter() - begin)
        accelerator.save_state(str(folder))  # waits for the background save
    return sorted(waits)[len(waits) // 2]


def time_verify(folder: Path) -> None:
    """Print the time to verify the checksums of a checkpoint, if the installed `accelerate` has any."""
    try:
        from accelerate.checkpointing import verify
    except ImportError:
        return

    def check() -> None:
        drop_file_cache(folder)
        verify(folder)

    seconds = alternate({"raw": lambda: raw_read(folder), "own": check}, rounds=ROUNDS, warmup=1)
    emit("checkpoint verify", "ms", seconds["raw"], seconds["own"])


class CountingDataset(Dataset):
    """100,000 numbers. Counts the reads."""

    reads = 0

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> torch.Tensor:
        self.reads += 1
        return torch.tensor(index)


def resume_data(accelerator) -> float:
    """Return the median seconds to resume a loader after 1,000 batches and read the next batch."""
    data = CountingDataset()
    waits = []
    for _ in range(ROUNDS):
        loader = accelerator.prepare(DataLoader(data, batch_size=BATCH, shuffle=True))
        state = None
        if hasattr(loader, "load_state_dict"):
            batches = iter(loader)
            for _ in range(SKIPPED):
                next(batches)
            # Without torchdata, the peer's loaders have the method but raise AttributeError.
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
    """Return a field of /proc/self/status in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


def load_memory(load) -> None:
    """Print the peak memory of a load in addition to the resident memory before it."""
    clear = Path("/proc/self/clear_refs")
    if not clear.exists():
        return
    peaks = []
    for _ in range(ROUNDS):
        clear.write_text("5")  # resets VmHWM, the peak resident memory
        before = memory("VmRSS")
        load()
        peaks.append(memory("VmHWM") - before)
    print(
        json.dumps(
            {"name": "checkpoint load memory", "unit": "MB", "raw": None, "own": max(peaks) / 1e6}
        )
    )


def main() -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    emit("checkpoint resume data", "ms", None, resume_data(accelerator))
    accelerator.free_memory()
    model, optimizer = large_model(accelerator)
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
            drop_file_cache(folder)
            accelerator.load_state(str(folder))

        seconds = alternate({"raw": lambda: raw_read(folder), "own": load}, rounds=ROUNDS, warmup=1)
        emit("checkpoint load", "ms", seconds["raw"], seconds["own"])
        load_memory(load)
        time_verify(folder)
        if "blocking" in inspect.signature(accelerator.save_state).parameters:
            wait = background_wait(accelerator, folder)
        else:
            # Without background saves, the loop waits for the entire save.
            wait = alternate({"own": save}, rounds=ROUNDS, warmup=1)["own"]
        emit("checkpoint wait", "ms", None, wait)
        accelerator.end_training()


if __name__ == "__main__":
    main()
