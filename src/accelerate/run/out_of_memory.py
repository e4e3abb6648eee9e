# SPDX-License-Identifier: Apache-2.0
"""What is printed when memory runs out: what uses it, by kind, and where the allocator's state was written.

The error itself is not changed. It is seen where it leaves `Accelerator.backward`, ends an attempt of
`find_executable_batch_size`, or ends the process.
"""

from __future__ import annotations

import contextlib
import functools
import pickle
import sys
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
import torch

from ..core import devices, messages
from ..core.errors import add_remedy
from ..core.files import atomic_write
from ..core.objects import size_of
from ..state import PartialState
from ..telemetry.recorder import RunRecorder
from .objects import RunObjects

_watching: weakref.WeakSet[OutOfMemory] = weakref.WeakSet()
_VIEWER = "https://docs.pytorch.org/memory_viz"


class OutOfMemory:
    """Reports the first out-of-memory error of a run.

    Args:
        objects: the prepared objects of the run. The reference is weak.
        recorder: of the run, for events, and with the folder for the allocator's state; a temporary one by default.
    """

    def __init__(self, objects: RunObjects, recorder: RunRecorder | None) -> None:
        self._objects = weakref.ref(objects)
        self._recorder = recorder
        self._has_reported = False
        if _notify not in devices.exhausted_hooks:
            devices.exhausted_hooks.append(_notify)
            sys.excepthook = functools.partial(_report_uncaught, sys.excepthook)
        _watching.add(self)

    def report(self, error: BaseException) -> None:
        """Print and record the error, once a run."""
        objects = self._objects()
        if self._has_reported or objects is None or not objects.models:
            return
        self._has_reported = True
        message = (str(error).splitlines() or [type(error).__name__])[0][:500]
        rank, device = PartialState().process_index, PartialState().device
        self._record(message)
        folder = None
        if self._recorder is not None:
            folder = self._recorder.folder
        lines = [f"out of memory on rank {rank}: {message}"]
        try:
            lines.append(f"  {_by_kind(objects, device)}")
            for name, path in write_allocator_state(device, folder, rank).items():
                lines.append(f"  {name}: {path}")
                self._record(f"{name} of rank {rank}", path=str(path))
        except Exception as failure:
            # What an allocator reports differs between devices and versions of torch; the first error counts.
            lines.append(f"  the rest could not be reported: {failure!r}"[:500])
        lines.append(
            "  `accelerate plan` estimates the memory of a step for each layout and batch size, "
            "with and without recomputing activations"
        )
        messages.show("\n".join(lines))

    def _record(self, message: str, **fields: str) -> None:
        if self._recorder is not None:
            self._recorder.event("out_of_memory", message=message, **fields)


def _notify(error: BaseException) -> None:
    for run in list(_watching):
        run.report(error)


def _report_uncaught(
    former: Callable[..., Any],
    kind: type[BaseException],
    error: BaseException,
    trace: TracebackType | None,
) -> None:
    """The hook of exceptions that end the process. It calls the former one."""
    with contextlib.suppress(Exception):
        devices.report_exhausted(error)
        add_remedy(error)
    former(kind, error, trace)


def _by_kind(objects: RunObjects, device: torch.device) -> str:
    """The memory of this process by kind; activations are a part of the rest."""
    from ..parallel.report import models

    optimizers = [optimizer.optimizer for optimizer in objects.optimizers]
    usage = models.memory_usage(objects.models, optimizers, windows=False)
    listed = [f"{kind} {size_of(size)}" for kind, size in usage.items() if size]
    allocated = getattr(devices.module_of(device), "memory_allocated", None)
    if device.type == "cpu" or allocated is None:
        used = psutil.Process().memory_info().rss
        remainder = "activations, libraries and everything else in the process"
    else:
        used = int(allocated(device))
        remainder = "activations and other tensors"
    listed.append(f"{remainder} {size_of(max(0, used - sum(usage.values())))}")
    if device.type != "cpu":
        with contextlib.suppress(RuntimeError):
            listed[-1] += f"; the device has {size_of(devices.memory_info(device)[1])}"
    return ", ".join(listed)


def write_allocator_state(device: torch.device, folder: Path | None, rank: int) -> dict[str, Path]:
    """Write what the allocator of a device reports: a summary, and a snapshot of its blocks for torch's viewer.

    Args:
        device: of the run.
        folder: of the run; None makes a temporary one.
        rank: of this process.

    Returns:
        {what it is: its file}; empty for a device whose allocator reports nothing.
    """
    module = devices.module_of(device)
    contents: dict[str, tuple[str, bytes]] = {}
    if hasattr(module, "memory_summary"):
        contents["memory summary"] = ".txt", str(module.memory_summary(device)).encode()
    if hasattr(module, "memory_snapshot"):
        # The viewer takes what `torch.cuda.memory` dumps; the history of allocations is not in the public function.
        snapshot = {"segments": module.memory_snapshot(), "device_traces": []}
        contents[f"memory snapshot ({_VIEWER} opens it)"] = ".pickle", pickle.dumps(snapshot)
    if not contents:
        return {}
    if folder is None:
        folder = Path(tempfile.mkdtemp(prefix="accelerate-"))
    folder /= "memory"
    folder.mkdir(parents=True, exist_ok=True)
    files = {}
    for name, (suffix, data) in contents.items():
        files[name] = folder / f"rank_{rank:05d}{suffix}"
        with atomic_write(files[name]) as file:
            file.write(data)
    return files
