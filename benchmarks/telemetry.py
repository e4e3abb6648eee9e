# SPDX-License-Identifier: Apache-2.0
"""What the recorder adds to a step: a small model, SGD, clipping, a prepared loader; with and without it.

The loader batches samples, or the dataset has batches, whose sizes the recorder must look up.

An epoch with the recorder alternates with one without. A figure is the median, over these pairs, of the difference
between the mean durations of a step: the mean contains what the recorder does in one of several steps, and in its
thread.
"""

from __future__ import annotations

import inspect
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from timing import emit
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

STEPS = 256
ROUNDS = 60
# Epochs before the recorder is in its usual state: it records the first steps of a process one by one.
WARMUP = 6


def make_loop(telemetry: str | bool, width: int, batch: int, batched: bool = False) -> Callable[[], float]:
    """A function that trains for an epoch and returns the mean duration of a step in seconds."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, telemetry=telemetry)
    torch.manual_seed(0)
    model = (
        torch.nn.Linear(width, 1)
        if width < 100
        else torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, 1))
    )
    data = TensorDataset(torch.randn(STEPS * batch, width), torch.randn(STEPS * batch, 1))
    loader = DataLoader(data, batch)
    if batched:
        loader = DataLoader([tuple(pair) for pair in loader], None)
    prepared = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3), loader)
    model, optimizer, loader = prepared

    def run() -> float:
        begin = time.perf_counter()
        for x, y in loader:
            loss = mse_loss(model(x), y)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        return (time.perf_counter() - begin) / STEPS

    return run


def added(loops: dict[str, Callable[[], float]]) -> tuple[float, dict[str, float]]:
    """The seconds of a step of the first loop, and what each of the others adds."""
    rounds = [{name: loop() for name, loop in loops.items()} for _ in range(WARMUP + ROUNDS)][WARMUP:]
    first, *others = loops
    usual = statistics.median(found[first] for found in rounds)
    return usual, {name: statistics.median(found[name] - found[first] for found in rounds) for name in others}


def main() -> None:
    from accelerate import Accelerator

    if "telemetry" not in inspect.signature(Accelerator).parameters:
        return  # the peer has none
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        wide, given = (384, 256, True), (16, 8, True)
        long = {"off": make_loop(False, *wide), "telemetry of a long step": make_loop(folder + "/long", *wide)}
        named = {"off": make_loop(False, *given), "telemetry of given batches": make_loop(folder + "/given", *given)}
        loops = {"off": make_loop(False, 16, 8), "telemetry": make_loop(folder, 16, 8)}
        os.environ["ACCELERATE_STATUS_DIR"] = folder
        loops["telemetry status"] = make_loop(False, 16, 8)
        Path(folder, "rank_00000.status").unlink()
        loops["telemetry both"] = make_loop(str(Path(folder, "both")), 16, 8)
        for compared in (loops, named, long):
            usual, more = added(compared)
            for name, seconds in more.items():
                emit(name, "us", usual, usual + seconds)


if __name__ == "__main__":
    main()
