# SPDX-License-Identifier: Apache-2.0
"""The devices of this process: which kind is here, which one it takes, and when its memory has run out."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import Any

import torch

from . import env
from .device_kinds import DEVICES, DeviceKind
from .enums import DistributedType
from .errors import AccelerateError, ConfigurationError
from .imports import is_available


def kind_of(device: torch.device | str) -> DeviceKind:
    """The row of a device; a type that torch knows and the table does not is taken to speak gloo."""
    name = torch.device(device).type
    return DEVICES.get(name) or DeviceKind(
        name, "gloo", DistributedType.MULTI_CPU, pin_memory=False
    )


def accelerator_type() -> str | None:
    """The type of this machine's accelerator (`cuda`, `xpu`, `npu`, ...), or None on a machine without one."""
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None:
        return None
    return found.type


def device_count(kind: str | None = None) -> int:
    """Return the number of devices of a kind, by default the accelerators; 0 for the CPU."""
    kind = kind or accelerator_type()
    if kind is None or kind == "cpu":
        return 0
    return int(torch.accelerator.device_count())


def module_of(device: torch.device | str) -> Any:
    """`torch.cuda`, `torch.xpu`, ...: the module of a device's type."""
    return torch.get_device_module(torch.device(device))


def select(local_rank: int, local_world_size: int, cpu: bool = False) -> torch.device:
    """The device of a process: the requested one, else the accelerator of its local rank, else the CPU.

    Raises ConfigurationError where more processes than devices share a machine: two ranks on one device would
    train, and hang in the first collective.
    """
    requested = env.get("ACCELERATE_TORCH_DEVICE")
    if requested is not None and not cpu:
        return torch.device(requested)
    kind = None if cpu else accelerator_type()
    if kind is None:
        if cpu:
            return torch.device("cpu")
        return xla_device() or torch.device("cpu")
    if kind == "mps":
        return torch.device("mps", 0)
    present = device_count(kind)
    if local_rank >= present:
        visible = DEVICES[kind].visible if kind in DEVICES else None
        if visible and env.get(visible):
            note = f" ({visible}={env.get(visible)})"
        else:
            note = ""
        raise ConfigurationError(
            f"local rank {local_rank} of {local_world_size} does not have a device: this machine "
            f"has {present} {kind} device(s){note}. Start at most {present} processes here, or "
            "pass cpu=True."
        )
    device = torch.device(kind, local_rank)
    torch.accelerator.set_device_index(device)
    return device


def xla_device() -> torch.device | None:
    """This process's device of torch_xla, which is not a `torch.accelerator`; None if it is not installed."""
    if not is_available("torch_xla"):
        return None
    import torch_xla

    return torch.device(torch_xla.device())


@functools.cache
def supports_bf16(kind: str) -> bool:
    """Whether the device computes in bfloat16. The CPU does in this torch, in software where it must."""
    if kind == "cuda":
        return bool(torch.cuda.is_bf16_supported())
    if kind == "mps":
        return bool(torch.backends.mps.is_macos_or_newer(14, 0))
    return True


def synchronize(device: torch.device) -> None:
    """Wait for the device's queued work; nothing to wait for on the CPU."""
    if device.type not in ("cpu", "meta"):
        torch.accelerator.synchronize(device)


def generator_module(kind: str) -> Any:
    """The module that reads and sets the state of the generator of a kind of device."""
    if kind == "cpu":
        return torch
    return module_of(kind)


def is_initialized(kind: str) -> bool:
    """Whether this process uses devices of a kind already; False where that is not known.

    Only their module is queried: a search for devices makes a context, which forked processes cannot use.
    """
    known = getattr(getattr(torch, kind, None), "is_initialized", None)
    return known is not None and bool(known())


def memory_info(device: torch.device) -> tuple[int, int]:
    """Free and total bytes of a device. Raises RuntimeError where its backend does not report them."""
    try:
        free, total = torch.accelerator.get_memory_info(device.index)
    except RuntimeError:
        # Backends outside of torch may have it in their own module alone.
        own = getattr(module_of(device), "mem_get_info", None)
        if own is None:
            raise
        free, total = own(device)
    return int(free), int(total)


def empty_cache() -> None:
    """Return the accelerator's cached memory to the driver; nothing to do on a machine without one."""
    kind = accelerator_type()
    if kind is not None:
        module = module_of(kind)
        if hasattr(module, "empty_cache"):
            module.empty_cache()


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
    empty_cache()


def release_memory(*objects: Any) -> list[None]:
    """Release the accelerator's cached memory; return as many None as `objects`, to overwrite the caller's names.

    The memory of the objects is free once the names are overwritten; the next call then releases it from the cache.

    Example:
        model, optimizer = release_memory(model, optimizer)
    """
    clear_device_cache(garbage_collection=True)
    return [None for _ in objects]


def should_reduce_batch_size(exception: Exception) -> bool:
    """Whether an error means that memory ran out, so that a smaller batch may work."""
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
