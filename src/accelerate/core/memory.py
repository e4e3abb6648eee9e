# SPDX-License-Identifier: Apache-2.0
"""Release of cached memory, and recognition of out-of-memory errors."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch

from . import devices
from .errors import AccelerateError

# Messages of allocators and libraries when memory runs out.
EXHAUSTED = (
    " out of memory.",
    "out of memory (",
    "CUDA error: out of memory",
    "CUDNN_STATUS_NOT_SUPPORTED",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
)


# Called with an error that means that memory has run out, before it is handled or raised again.
exhausted_hooks: list[Callable[[BaseException], None]] = []


def report_exhausted(error: BaseException) -> None:
    """Call the hooks, once for each error, if it means that memory has run out."""
    if not isinstance(error, Exception) or getattr(error, "accelerate_reported", False):
        return
    if should_reduce_batch_size(error):
        error.accelerate_reported = True  # type: ignore[attr-defined]
        for hook in list(exhausted_hooks):
            hook(error)


def clear_device_cache(garbage_collection: bool = False) -> None:
    """Return the accelerator's unused cached memory to the driver.

    Args:
        garbage_collection: run Python's garbage collection first.
    """
    if garbage_collection:
        gc.collect()
    devices.empty_cache()


def release_memory(*objects: Any) -> list[None]:
    """Release the accelerator's cached memory; return as many None as `objects`, to overwrite the caller's names.

    What those names hold is free once they are overwritten; its cached memory goes with the next call.

    ```
    model, optimizer = release_memory(model, optimizer)
    ```
    """
    clear_device_cache(garbage_collection=True)
    return [None for _ in objects]


def should_reduce_batch_size(exception: Exception) -> bool:
    """Whether an error means that memory has run out, so that a smaller batch may work."""
    if isinstance(exception, (torch.OutOfMemoryError, MemoryError)):
        return True
    if isinstance(exception, AccelerateError):
        # It may quote another rank's error.
        return False
    cause = exception.__cause__
    if (
        isinstance(exception, RuntimeError)
        and isinstance(cause, Exception)
        and should_reduce_batch_size(cause)
    ):
        # torch's schedules of pipelines raise an error of their own from that of a stage.
        return True
    if isinstance(exception, RuntimeError) and len(exception.args) == 1:
        return any(text in str(exception.args[0]) for text in EXHAUSTED)
    return False
