# SPDX-License-Identifier: Apache-2.0
"""What the recorder adds to a step: a small model, SGD, clipping, a prepared loader; with and without it.

The loader batches samples, or the dataset has batches, whose sizes the recorder must look up.

An epoch with the recorder alternates with one without, in changing order. Both train the same model on the same
tensors: where those lie in memory makes a larger difference than the recorder. A figure is the median, over these
pairs, of the difference between the mean durations of a step, which contains what the recorder does in its thread.
A second loop without the recorder shows how precise that is.
"""

from __future__ import annotations

import inspect
import os
import random
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
WARMUP = 512  # steps


class Training:
    """A model, its optimizer and its data, which several loops train in turn.

    Args:
        width: of the samples and the hidden layer; below 100 there is none.
        batch: samples of a batch.
        steps: of an epoch.
        batched: the dataset has batches.
    """

    def __init__(self, width: int, batch: int, steps: int = STEPS, batched: bool = False) -> None:
        torch.manual_seed(0)
        hidden = [] if width < 100 else [torch.nn.Linear(width, width), torch.nn.ReLU()]
        self.model = torch.nn.Sequential(*hidden, torch.nn.Linear(width, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        data = TensorDataset(torch.randn(steps * batch, width), torch.randn(steps * batch, 1))
        self.loader = DataLoader(data, batch)
        if batched:
            self.loader = DataLoader([tuple(pair) for pair in self.loader], None)
        self.steps = steps

    def loop(self, telemetry: str | bool) -> Callable[[], float]:
        """A function that trains for an epoch and returns the mean duration of a step in seconds."""
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True, telemetry=telemetry)
        model, optimizer, loader = accelerator.prepare(self.model, self.optimizer, self.loader)

        def run() -> float:
            begin = time.perf_counter()
            for x, y in loader:
                loss = mse_loss(model(x), y)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            return (time.perf_counter() - begin) / self.steps

        return run


def added(loops: dict[str, Callable[[], float]], steps: int) -> tuple[float, dict[str, float]]:
    """The seconds of a step of the first loop, and what each of the others adds."""
    first, *others = loops
    order, rounds = list(loops), []
    for _ in range(WARMUP // steps + ROUNDS):
        random.shuffle(order)
        rounds.append({name: loops[name]() for name in order})
    rounds = rounds[WARMUP // steps :]
    usual = statistics.median(found[first] for found in rounds)
    return usual, {
        name: statistics.median(found[name] - found[first] for found in rounds) for name in others
    }


def main() -> None:
    from accelerate import Accelerator

    if "telemetry" not in inspect.signature(Accelerator).parameters:
        return  # the peer has none
    torch.set_num_threads(1)
    random.seed(0)
    with tempfile.TemporaryDirectory() as folder:
        short = Training(16, 8)
        loops = {"off": short.loop(False), "telemetry, twice without": short.loop(False)}
        loops["telemetry"] = short.loop(folder)
        os.environ["ACCELERATE_STATUS_DIR"] = folder
        loops["telemetry status"] = short.loop(False)
        Path(folder, "rank_00000.status").unlink()
        loops["telemetry both"] = short.loop(str(Path(folder, "both")))
        compared = [(loops, short.steps)]
        del os.environ["ACCELERATE_STATUS_DIR"]
        others = {
            "given batches": Training(16, 8, batched=True),
            "a long step": Training(640, 256, 64, batched=True),
        }
        for name, training in others.items():
            loops = {
                "off": training.loop(False),
                f"telemetry of {name}, twice without": training.loop(False),
            }
            loops[f"telemetry of {name}"] = training.loop(str(Path(folder, name)))
            compared.append((loops, training.steps))
        for loops, steps in compared:
            usual, more = added(loops, steps)
            for name, seconds in more.items():
                emit(name, "us", usual, usual + seconds)


if __name__ == "__main__":
    main()
