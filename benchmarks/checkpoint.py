# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint costs: 100M parameters with AdamW (1.2 GB), beside torch.save and fsync of the same tensors."""

from __future__ import annotations

import inspect
import os
import shutil
import tempfile
import time
from pathlib import Path

import torch
from timing import alternate, emit

ROUNDS = 5


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


def main() -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
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
        if "blocking" in inspect.signature(accelerator.save_state).parameters:
            waited = background_wait(accelerator, folder)
        else:
            # Without a background save the loop waits for the whole of it.
            waited = alternate({"own": save}, rounds=ROUNDS, warmup=1)["own"]
        emit("checkpoint wait", "ms", None, waited)
        accelerator.end_training()


if __name__ == "__main__":
    main()
