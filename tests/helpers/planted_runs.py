# SPDX-License-Identifier: Apache-2.0
"""Runs that no process trained: files of telemetry with known values."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from accelerate.telemetry.records import FLAG_FIRST, STEP, events_file, header_bytes, steps_file

START = 1_760_000_000.0


def planted_records(
    steps: int,
    rank: int = 0,
    slow: str | None = None,
    begin: int = 1,
    time: float = START,
    wait: str = "communication",
) -> np.ndarray:
    """Records of steps of about 0.1 s. A slow rank loses 0.03 s in the phase `slow` from the middle on.

    The others wait for it in the phase `wait`.
    """
    random = np.random.default_rng(rank)
    number = np.arange(begin, begin + steps)
    found = np.zeros(steps, STEP)
    found["step"], found["steps"] = number, 1
    if begin == 1:
        found["flags"][0] = FLAG_FIRST
    noise = random.normal(1, 0.03, (7, steps)).astype("f4")
    late = np.where(np.arange(steps) >= steps // 2, 0.03, 0).astype("f4")
    found["data"] = 0.004 * noise[0]
    found["transfer"] = np.nan
    found["forward"], found["backward"] = 0.028 * noise[1], 0.05 * noise[2]
    found["communication"] = 0.009 * noise[3]
    found["optimizer"] = 0.006 * noise[4]
    found["checkpoint"] = np.where(number % 500 == 0, 0.2, 0)
    found[slow or wait] += late
    found["seconds"] = found["longest"] = 0.1 + late + found["checkpoint"] + 0.001 * noise[6]
    found["time"] = time + np.cumsum(found["seconds"].astype("f8"))
    found["samples"], found["tokens"] = 32, 32 * 512
    found["loss"] = 2.2 * np.exp(-number / (steps / 3)) + 1.4 + 0.15 * random.normal(size=steps)
    found["gradient_norm"] = 1.1 + 0.3 * random.random(steps)
    found["learning_rate"] = (
        3e-4 * np.minimum(1, number / (steps / 20 + 1)) * (0.55 + 0.45 * np.cos(number / steps * 3))
    )
    found["device_memory"] = 9.1e9 + 4e8 * random.random(steps) + 2e8 * rank
    found["host_memory"] = 3.2e9 + 40.0 * number
    return found


def write_steps(
    folder: Path,
    rank: int,
    world_size: int,
    records: np.ndarray,
    mode: str = "wb",
    **details: object,
) -> Path:
    path = steps_file(folder, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, mode) as file:
        if mode == "wb":
            described = {
                "host": f"node{rank // 4}",
                "device": "cuda:0",
                "started": START,
                **details,
            }
            file.write(header_bytes(rank, world_size, **described))
        records.tofile(file)
    return path


def write_lines(path: Path, *lines: dict, mode: str = "a") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, mode, encoding="utf-8") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def planted_run(
    folder: Path,
    steps: int = 1000,
    ranks: int = 2,
    slow: int | None = None,
    part: str = "data",
    wait: str = "communication",
) -> Path:
    """A run whose rank `slow` is slow in its second half, with events and logged values."""
    for rank in range(ranks):
        records = planted_records(steps, rank, part if rank == slow else None, wait=wait)
        write_steps(folder, rank, ranks, records)
        write_lines(
            events_file(folder, rank),
            {"time": START, "event": "start", "pid": 100 + rank, "restart": 0},
        )
    times = records["time"]
    for at in range(499, steps, max(500, steps // 20 // 500 * 500)):
        saved = {
            "event": "save",
            "path": f"checkpoints/checkpoint_{at // 500}",
            "step": at + 1,
            "seconds": 0.2,
        }
        write_lines(events_file(folder, 0), {"time": times[at], **saved})
    for at in range(0, steps, max(1, steps // 200)):
        values = {
            "eval/accuracy": 1 - np.exp(-at / steps * 3) * 0.9,
            "eval/loss": 1.5 + np.exp(-at / steps * 4),
        }
        write_lines(folder / "values.jsonl", {"time": times[at], "step": at + 1, "values": values})
    return folder


def unpacked(data):
    """What `accelerate.monitor.page_data.packed` has packed."""
    length = int.from_bytes(data[:4], "little")

    def array(found):
        if set(found) == {"at", "shape"}:
            start = 4 + length + 4 * found["at"]
            return np.frombuffer(data, "<f4", int(np.prod(found["shape"])), start).reshape(
                found["shape"]
            )
        return found

    return json.loads(data[4 : 4 + length], object_hook=array)
