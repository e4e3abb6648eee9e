# SPDX-License-Identifier: Apache-2.0
"""What a device's allocator holds when memory runs out, as files in the folder of the run."""

from __future__ import annotations

import pickle
from pathlib import Path

import torch

from ..core import devices
from ..core.files import atomic_write


def dump_memory(device: torch.device, folder: Path, rank: int) -> dict[str, Path]:
    """Write a summary of the allocator, and its snapshot, which the viewer of torch (`memory_viz`) opens.

    Called where the error is noticed, while its frames still hold the tensors of the step. The snapshot has the
    history of allocations if the script records it, as `torch.cuda.memory._record_memory_history()` does.

    Args:
        device: of the run.
        folder: of the run.
        rank: of this process.

    Returns:
        {"memory summary" or "memory snapshot": its file}, the latest of each; empty for a device without them.
    """
    module = devices.module_of(device)
    found: dict[str, Path] = {}
    where = folder / "memory"
    summary = _summary(module, device)
    if summary:
        where.mkdir(parents=True, exist_ok=True)
        found["memory summary"] = where / f"rank_{rank:05d}.txt"
        with atomic_write(found["memory summary"], "w") as file:
            file.write(summary)
    take = getattr(getattr(module, "memory", None), "_snapshot", None)
    if take is not None:
        where.mkdir(parents=True, exist_ok=True)
        found["memory snapshot"] = where / f"rank_{rank:05d}.pickle"
        with atomic_write(found["memory snapshot"]) as file:
            pickle.dump(take(device), file)
    return found


def _summary(module: object, device: torch.device) -> str:
    if hasattr(module, "memory_summary"):
        return str(module.memory_summary(device))
    if hasattr(module, "memory_stats"):
        return "".join(f"{name}: {value}\n" for name, value in module.memory_stats(device).items())
    return ""
