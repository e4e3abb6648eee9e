# SPDX-License-Identifier: Apache-2.0
"""A run of a plan: what its first steps need is printed next to the plan's estimate, and added to the plan's file."""

from __future__ import annotations

import itertools
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import torch

from ..core import devices, json_text, messages
from ..core.errors import ConfigurationError
from ..core.files import atomic_write
from ..core.objects import size_of
from ..core.observers import RunObserver
from ..state import PartialState
from ..telemetry.recorder import device_memory

# Optimizer steps before the timing starts, and timed ones.
WARMUP, TIMED = 2, 4


class PlannedRun(RunObserver):
    """Compares the first steps of this process with an estimate.

    Args:
        path: of the estimate, which `accelerate plan --write` wrote.
        device: of the run.
    """

    def __init__(self, path: str, device: torch.device) -> None:
        self._path = Path(path)
        try:
            self._plan: dict[str, Any] = json_text.read(self._path, limit=1 << 20, numbers=True)
            self._planned = self._plan["memory_bytes"], self._plan["step_seconds"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigurationError(
                f"ACCELERATE_PLAN_FILE={path} is not a file that `accelerate plan --write` wrote "
                f"({error}). Write it again, or remove plan_file from the configuration"
            ) from None
        self._device = device
        self._before = psutil.Process().memory_info().rss
        self._times: list[float] = []

    def after_step(self, optimizer: Any) -> None:
        """Time the step; does nothing once the figures are known."""
        if len(self._times) > WARMUP + TIMED:
            return
        devices.synchronize(self._device)
        self._times.append(time.perf_counter())
        if len(self._times) == WARMUP + TIMED + 1:
            self._report()

    def _report(self) -> None:
        ends = self._times[WARMUP:]
        seconds = min(after - before for before, after in itertools.pairwise(ends))
        allocated = device_memory(self._device)
        kind = meaning = "tensors"
        if math.isnan(allocated):
            kind, meaning = "process", "growth of the process, including libraries"
            used = _largest_process() - self._before
        else:
            used = int(allocated)
        (low, high), (fast, slow) = self._planned
        if PartialState().is_main_process:
            messages.show(
                f"plan {self._plan['layout']}: memory {size_of(used)} ({meaning}), planned {size_of(low)} to "
                f"{size_of(high)}; step {seconds:.4g} s, planned {fast:.4g} to {slow:.4g} s"
            )
            self._plan["measured"] = {
                "memory_bytes": used,
                "memory_of": kind,
                "step_seconds": seconds,
            }
            with atomic_write(self._path, "w") as file:
                json.dump(self._plan, file, indent=2)


def _largest_process() -> int:
    """The largest resident size of this process, in bytes."""
    if sys.platform == "win32":
        return psutil.Process().memory_info().peak_wset
    import resource

    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if sys.platform == "darwin":
        return size
    return size * 1024
