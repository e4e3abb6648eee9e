# SPDX-License-Identifier: Apache-2.0
"""Load a model of 24 linear layers (384 MiB) to memory, or leave half of it on disk, and run it."""

from __future__ import annotations

import copy
import functools
import json
import os
import statistics
import tempfile
import threading
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from timing import alternate, emit
from torch import nn

from accelerate import cpu_offload, init_empty_weights, load_checkpoint_and_dispatch

WIDTH, LAYERS, BATCH, ROUNDS = 2048, 24, 64, 7


def empty() -> nn.Sequential:
    with init_empty_weights():
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def places(path: Path) -> list[tuple[int, int]]:
    """(begin, end) in the file of the weights that `main` leaves on disk, in the order of the layers."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    offsets = (header[f"{layer}.weight"]["data_offsets"] for layer in range(0, LAYERS, 2))
    return [(8 + length + begin, 8 + length + end) for begin, end in offsets]


def drop_file_cache(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def memory(field: str) -> int:
    """Return a field of the memory statistics of this process in bytes: VmRSS, or VmHWM for its peak."""
    line = next(
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith(field)
    )
    return int(line.split()[1]) * 1024


def anonymous_peak(run) -> int:
    """Return how far the memory of this process that is not of files grows while `run` runs, in bytes."""
    before = memory("RssAnon")
    done = threading.Event()
    peak = [before]

    def sample() -> None:
        while not done.wait(0.001):
            peak.append(memory("RssAnon"))

    sampler = threading.Thread(target=sample)
    sampler.start()
    run()
    done.set()
    sampler.join()
    return max(peak) - before


def seconds(run) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def offload_all(resident: nn.Module, batch: torch.Tensor) -> None:
    """Time the forward of a copy whose weights are offloaded in memory."""
    offloaded = cpu_offload(copy.deepcopy(resident))
    assert torch.equal(offloaded(batch), resident(batch))
    times = alternate(
        {"raw": lambda: resident(batch), "own": lambda: offloaded(batch)}, rounds=ROUNDS
    )
    emit("big model cpu_offload", "ms", times["raw"], times["own"])


@torch.no_grad()
def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path, offload = Path(folder, "model.safetensors"), Path(folder, "offload")
        weights = {f"{layer}.weight": torch.randn(WIDTH, WIDTH) * 0.02 for layer in range(LAYERS)}
        biases = {f"{layer}.bias": torch.zeros(WIDTH) for layer in range(LAYERS)}
        save_file({**weights, **biases}, path, metadata={"format": "pt"})
        del weights
        half = {str(layer): "cpu" if layer % 2 else "disk" for layer in range(LAYERS)}
        load = functools.partial(load_checkpoint_and_dispatch, checkpoint=str(path))
        times = alternate(
            {
                "cpu": lambda: load(empty(), device_map={"": "cpu"}),
                "half": lambda: load(empty(), device_map=half, offload_folder=str(offload)),
            },
            rounds=ROUNDS,
        )
        written = sum(file.stat().st_size for file in offload.rglob("*"))
        emit("big model load", "ms", None, times["cpu"])
        emit("big model load half", "ms", None, times["half"])
        emit("big model written", "MB", None, written)

        resident = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
        resident.load_state_dict(load(empty(), device_map={"": "cpu"}).state_dict())
        model = load(empty(), device_map=half, offload_folder=str(offload))
        batch = torch.randn(BATCH, WIDTH)
        assert torch.equal(model(batch), resident(batch))
        times = alternate(
            {"raw": lambda: resident(batch), "own": lambda: model(batch)}, rounds=ROUNDS
        )
        emit("big model forward", "ms", times["raw"], times["own"])
        offload_all(resident, batch)
        # The peer maps no files.
        files = getattr(model[0]._hf_hook.weights_map.dataset, "_files", None)
        emit("big model memory", "MB", None, anonymous_peak(lambda: model(batch)))

        block = bytearray(256 << 10)
        on_disk = places(path)

        def drop() -> None:
            if files is not None:
                files._files.clear()  # the system keeps pages that are mapped
            for file in (path, *offload.rglob("*.dat")):
                drop_file_cache(file)

        def read() -> None:
            """Read the layers that are on disk, at their places: the lower bound of a forward without compute."""
            with open(path, "rb", buffering=0) as file:
                for begin, end in on_disk:
                    file.seek(begin)
                    while begin < end:
                        begin += file.readinto(memoryview(block)[: end - begin])

        def cold() -> float:
            drop()
            return seconds(lambda: model(batch))

        measured = []
        for _ in range(ROUNDS):
            drop()
            measured.append((seconds(read), seconds(lambda: resident(batch)), cold()))
        reading, compute, own = (
            statistics.median(column) for column in zip(*measured, strict=True)
        )
        emit("big model cold forward", "ms", max(reading, compute), own)


if __name__ == "__main__":
    main()
