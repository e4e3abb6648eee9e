# SPDX-License-Identifier: Apache-2.0
"""Helpers of the benchmark scripts: time functions alternately, and print each result as a JSON line."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping


def alternate(
    functions: Mapping[str, Callable[[], object]],
    rounds: int = 15,
    repeat: int = 1,
    warmup: int = 2,
) -> dict[str, float]:
    """Return the median seconds per call of each function.

    Each round calls every function `repeat` times, in turn, so that other load on the machine affects all of them
    equally.
    """
    for run in functions.values():
        for _ in range(warmup):
            run()
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, run in functions.items():
            begin = time.perf_counter()
            for _ in range(repeat):
                run()
            seconds[name].append((time.perf_counter() - begin) / repeat)
    return {name: statistics.median(values) for name, values in seconds.items()}


SCALE = {"": 1.0, "s": 1.0, "ms": 1e3, "us": 1e6, "MB": 1e-6}


def emit(name: str, unit: str, raw: float | None, own: float, **more: object) -> None:
    """Print one result. `raw` (None if there is no baseline) and `own` are in seconds or bytes, printed in `unit`."""
    scale = SCALE[unit]
    line = {
        "name": name,
        "unit": unit,
        "raw": None if raw is None else raw * scale,
        "own": own * scale,
        **more,
    }
    print(json.dumps(line), flush=True)
