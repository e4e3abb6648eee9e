# SPDX-License-Identifier: Apache-2.0
"""Samples per second of `map_dataset` on 1 and 2 processes, and of a plain loop, for a model that computes.

    OMP_NUM_THREADS=1 python benchmarks/map_dataset.py --ranks 1 2

Runs take turns, and each process has one thread. A run counts from the moment at which all its processes are ready. On
a machine with other load, "undisturbed" is the figure to compare: it leaves out the time in which a process was ready
to run and waited for a processor, which Linux counts.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import socket
import statistics
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

from accelerate import PartialState
from accelerate.core import env
from accelerate.inference import map_dataset

WIDTH, DEPTH, BATCH, PART = 768, 16, 32, 128


def build() -> nn.Module:
    torch.manual_seed(0)
    blocks = [layer for _ in range(DEPTH) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    return nn.Sequential(*blocks, nn.Linear(WIDTH, 4))


def waited() -> float:
    """Seconds in which this thread was ready to run and had no processor."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9


def plain(dataset: torch.Tensor) -> tuple[float, float]:
    """Samples per second of a loop over batches that keeps the results in memory: as measured, and undisturbed."""
    model = build().eval()
    model(dataset[:BATCH])
    begin, before = time.perf_counter(), waited()
    rows: list[list[float]] = []
    for first in range(0, len(dataset), BATCH):
        rows += model(dataset[first : first + BATCH]).tolist()
    seconds = time.perf_counter() - begin
    return len(rows) / seconds, len(rows) / (seconds - waited() + before)


def work(
    variables: dict[str, object], samples: int, folder: str, results: multiprocessing.Queue
) -> None:
    """One process of a run: puts its seconds, and those in which it waited for a processor."""
    env.publish(variables)
    torch.set_num_threads(1)
    dataset, model = torch.randn(samples, WIDTH), build()
    model(dataset[:BATCH])
    state = PartialState(cpu=True)
    state.wait_for_everyone()
    begin, before = time.perf_counter(), waited()
    files = map_dataset(model, dataset, folder, batch_size=BATCH, part_size=PART)
    results.put((time.perf_counter() - begin, waited() - before))
    if state.is_main_process:
        assert sum(len(file.read_text().splitlines()) for file in files) == samples
    state.destroy_process_group()


def run(ranks: int, samples: int) -> tuple[float, float]:
    """Samples per second of a run by its slowest process: as measured, and undisturbed."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        workers = []
        for rank in range(ranks):
            variables: dict[str, object] = {"ACCELERATE_USE_CPU": "true"}
            if ranks > 1:
                variables |= {
                    "RANK": rank,
                    "LOCAL_RANK": rank,
                    "WORLD_SIZE": ranks,
                    "LOCAL_WORLD_SIZE": ranks,
                }
                variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            workers.append(context.Process(target=work, args=(variables, samples, folder, results)))
            workers[-1].start()
        found = [results.get(timeout=600) for _ in workers]
        for worker in workers:
            worker.join()
    return samples / max(seconds for seconds, _ in found), samples / max(
        seconds - lost for seconds, lost in found
    )


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", nargs="*", type=int, default=[1, 2])
    parser.add_argument("--samples", type=int, default=16384)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    dataset = torch.randn(given.samples, WIDTH)
    rates: dict[str, list[tuple[float, float]]] = {}
    for _ in range(given.rounds):
        rates.setdefault("a plain loop", []).append(plain(dataset))
        for ranks in given.ranks:
            rates.setdefault(f"{ranks} ranks", []).append(run(ranks, given.samples))
    for name, found in rates.items():
        measured, undisturbed = (
            round(statistics.median(column)) for column in zip(*found, strict=True)
        )
        line = {
            "name": f"map_dataset, {name}",
            "unit": "samples/s",
            "measured": measured,
            "undisturbed": undisturbed,
        }
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
