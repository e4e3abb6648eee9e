# SPDX-License-Identifier: Apache-2.0
"""What the recorder adds to a step: Linear(16, 1), batch 8, SGD, clipping, a prepared loader; with and without it.

The loop itself takes more than 100 us, and the machine has other load. So an epoch with the recorder alternates with
one without, and the added time is the median of the differences between the medians of both.
"""

from __future__ import annotations

import inspect
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from timing import emit
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

STEPS = 256
ROUNDS = 60


def make_loop(telemetry: str | bool) -> Callable[[], float]:
    """A function that trains for an epoch and returns the median duration of a step in seconds."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, telemetry=telemetry)
    torch.manual_seed(0)
    model = torch.nn.Linear(16, 1)
    batches = [(torch.randn(8, 16), torch.randn(8, 1)) for _ in range(STEPS)]
    prepared = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3), DataLoader(batches, None))
    model, optimizer, loader = prepared

    def run() -> float:
        ends = []
        for x, y in loader:
            loss = mse_loss(model(x), y)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            ends.append(time.perf_counter())
        return statistics.median(end - begin for begin, end in itertools.pairwise(ends))

    return run


def main() -> None:
    from accelerate import Accelerator

    if "telemetry" not in inspect.signature(Accelerator).parameters:
        return  # the peer has none
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        loops = {"off": make_loop(False), "on": make_loop(folder)}
        os.environ["ACCELERATE_STATUS_DIR"] = folder
        loops["status"] = make_loop(False)
        Path(folder, "rank_00000.status").unlink()
        loops["both"] = make_loop(str(Path(folder, "both")))
        rounds = []
        for _ in range(ROUNDS):
            rounds.append({name: loop() for name, loop in loops.items()})
    off = statistics.median(found["off"] for found in rounds)
    for name, added in (("telemetry", "on"), ("telemetry status", "status"), ("telemetry both", "both")):
        emit(name, "us", off, off + statistics.median(found[added] - found["off"] for found in rounds))


if __name__ == "__main__":
    main()
