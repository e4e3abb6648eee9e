# SPDX-License-Identifier: Apache-2.0
"""What the benchmark scripts share: alternate the contestants, take medians, print one JSON line a figure."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping


def alternate(
    contestants: Mapping[str, Callable[[], object]], rounds: int = 15, repeat: int = 1, warmup: int = 2
) -> dict[str, float]:
    """Seconds a call of each contestant: the median over `rounds`, in each of which every one runs `repeat` times.

    They run in turn, so that whatever slows the machine meanwhile slows all of them alike.
    """
    for run in contestants.values():
        for _ in range(warmup):
            run()
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, run in contestants.items():
            begin = time.perf_counter()
            for _ in range(repeat):
                run()
            seconds[name].append((time.perf_counter() - begin) / repeat)
    return {name: statistics.median(values) for name, values in seconds.items()}


SCALE = {"s": 1.0, "ms": 1e3, "us": 1e6}


def emit(what: str, unit: str, raw: float | None, own: float, **more: object) -> None:
    """Print one figure. `raw` and `own` are in seconds, printed in `unit`; no `raw`: nothing stands beside it."""
    scale = SCALE[unit]
    line = {"what": what, "unit": unit, "raw": None if raw is None else raw * scale, "own": own * scale, **more}
    print(json.dumps(line), flush=True)
