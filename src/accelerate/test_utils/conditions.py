# SPDX-License-Identifier: Apache-2.0
"""Decorators that skip a test without the device, the number of devices or the package that it needs."""

from __future__ import annotations

import unittest
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch

from ..core import availability as have
from ..core import devices, env
from ..core.imports import is_torch_version

T = TypeVar("T", bound=Callable[..., Any])

torch_device: str = devices.accelerator_type() or "cpu"
# The number of devices of that kind; the CPU counts as one.
device_count: int = max(1, devices.device_count())


class Decorator(Protocol):
    """A decorator that returns a test function or class of the same type."""

    def __call__(self, test_case: T, /) -> T:
        """Decorate a test."""


def _only_if(condition: Callable[[], bool], reason: str) -> Decorator:
    """A decorator that skips a test unless the condition holds when the test is defined."""

    def decorate(test_case: T) -> T:
        return unittest.skipUnless(condition(), f"test requires {reason}")(test_case)

    return decorate


def _here(*kinds: str) -> Callable[[], bool]:
    return lambda: torch_device in kinds


def _many(*kinds: str) -> Callable[[], bool]:
    return lambda: (
        torch_device != "cpu" and (not kinds or torch_device in kinds) and device_count > 1
    )


def _one(*kinds: str) -> Callable[[], bool]:
    return lambda: (
        (not kinds or torch_device in kinds) and torch_device != "cpu" and device_count == 1
    )


def __getattr__(name: str) -> Decorator:
    """`require_X` for each package and kind of device X that `accelerate.utils` has an `is_X_available` for."""
    needed = name.removeprefix("require_")
    available = getattr(have, f"is_{needed}_available", None)
    if needed == name or available is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    decorator: Decorator = globals().setdefault(name, _only_if(available, needed))
    return decorator


# Devices
require_cpu: Decorator = _only_if(_here("cpu"), "a machine without an accelerator")
require_non_cpu: Decorator = _only_if(lambda: torch_device != "cpu", "an accelerator")
require_cuda_or_hpu: Decorator = _only_if(_here("cuda", "hpu"), "a GPU or HPU")
require_cuda_or_xpu: Decorator = _only_if(_here("cuda", "xpu"), "a GPU or XPU")
require_non_xpu: Decorator = _only_if(lambda: torch_device != "xpu", "a device other than an XPU")
require_non_hpu: Decorator = _only_if(lambda: torch_device != "hpu", "a device other than an HPU")
require_tpu: Decorator = _only_if(lambda: have.is_torch_xla_available(check_is_tpu=True), "a TPU")
require_non_torch_xla: Decorator = _only_if(
    lambda: not have.is_torch_xla_available(), "no torch_xla"
)
require_single_device: Decorator = _only_if(_one(), "a single accelerator")
require_single_gpu: Decorator = _only_if(_one("cuda"), "a single GPU")
require_single_xpu: Decorator = _only_if(_one("xpu"), "a single XPU")
require_multi_device: Decorator = _only_if(_many(), "several accelerators")
require_multi_gpu: Decorator = _only_if(_many("cuda"), "several GPUs")
require_multi_xpu: Decorator = _only_if(_many("xpu"), "several XPUs")
require_multi_gpu_or_xpu: Decorator = _only_if(_many("cuda", "xpu"), "several GPUs or XPUs")

# Precisions and modules of torch
require_fsdp2: Decorator = _only_if(
    lambda: is_torch_version(">=", "2.5.0"), "torch with fully_shard"
)
require_tp: Decorator = _only_if(
    lambda: is_torch_version(">=", "2.3.0"), "torch with tensor parallelism"
)

require_huggingface_suite: Decorator = _only_if(
    lambda: have.is_transformers_available() and have.is_datasets_available(),
    "transformers and datasets",
)
require_trackers: Decorator = _only_if(
    lambda: (
        have.is_wandb_available()
        and have.is_tensorboard_available()
        and not have.is_comet_ml_available()
    ),
    "wandb and tensorboard, and no comet_ml",
)


def require_torch_min_version(test_case: T | None = None, version: str | None = None) -> Any:
    """Skip the test under an older torch: `@require_torch_min_version(version="2.13")`.

    Args:
        test_case: the test, where this is not called as a decorator.
        version: the oldest torch version that the test runs under.

    Raises:
        ValueError: `version` is not given.
    """
    if version is None:
        raise ValueError("require_torch_min_version needs version=, such as '2.13'")
    decorate = _only_if(lambda: is_torch_version(">=", version), f"torch {version} or later")
    if test_case is None:
        return decorate
    return decorate(test_case)


def skip(test_case: T) -> T:
    """Skip the test."""
    return unittest.skip("Test was skipped")(test_case)


def slow(test_case: T) -> T:
    """Skip the test unless the variable RUN_SLOW is true."""
    return _only_if(lambda: env.get_flag("RUN_SLOW"), "RUN_SLOW=1, because it is slow")(test_case)


def run_first(test_case: T) -> T:
    """Run the test before the others (needs the plugin pytest-order)."""
    import pytest

    marked: T = pytest.mark.order(1)(test_case)
    return marked


def get_backend() -> tuple[str, int, Callable[[], int]]:
    """Return the device that training uses here, for scripts that run on any device.

    Returns:
        The device type ("cpu" without an accelerator), the number of devices, and a function that returns the bytes
        allocated on the present one.

    Example:
        device, _, _ = get_backend()
    """
    return torch_device, device_count, memory_allocated_func


def memory_allocated_func() -> int:
    """Return the bytes that torch has allocated on the current accelerator; 0 on the CPU."""
    if torch_device == "cpu":
        return 0
    return int(torch.accelerator.memory_allocated())
