# SPDX-License-Identifier: Apache-2.0
"""What the recorder adds to a step: Linear(16, 1), batch 8, SGD, clipping, a prepared loader; with and without it.

The added time is that of the best windows: the loop itself takes about 100 us, and the machine has other load.
"""

from __future__ import annotations

import inspect
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from timing import emit
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

STEPS = 256
WINDOW = 8
ROUNDS = 40


def make_loop(telemetry: str | bool) -> Callable[[], float]:
    """A function that trains for an epoch and returns the seconds of a step in its best window."""
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
        return min(end - begin for begin, end in zip(ends[:-WINDOW], ends[WINDOW:], strict=True)) / WINDOW

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
        best = dict.fromkeys(loops, float("inf"))
        for _ in range(ROUNDS):
            for name, loop in loops.items():
                best[name] = min(best[name], loop())
    emit("telemetry", "us", best["off"], best["on"])
    emit("telemetry status", "us", best["off"], best["status"])
    emit("telemetry both", "us", best["off"], best["both"])


if __name__ == "__main__":
    main()
