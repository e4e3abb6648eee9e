# SPDX-License-Identifier: Apache-2.0
"""Copy batches to the device: while one batch is computed on, the next one is copied on a separate stream."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch

from ..core import devices, trees
from .batch_source import pin_memory
from .steps import ShardStep


def feed_for(
    device: torch.device | None, non_blocking: bool = False
) -> DeviceFeed | PlainFeed | None:
    """What copies batches to `device`; None for the CPU."""
    if device is None or device.type in ("cpu", "meta"):
        return None
    module = devices.module_of(device)
    if all(hasattr(module, name) for name in ("Stream", "stream", "current_stream")):
        return DeviceFeed(device, module, devices.kind_of(device).pin_memory)
    return PlainFeed(device, non_blocking)


class PlainFeed:
    """Copies a batch when it is requested: for devices without streams (MPS, XLA)."""

    def __init__(self, device: torch.device, non_blocking: bool) -> None:
        self.device = device
        self.non_blocking = non_blocking
        self.copy_seconds: float = 0.0  # of the host, so far

    def ahead(self, steps: Iterator[ShardStep]) -> Iterator[ShardStep]:
        """The steps with their batches on the device."""
        for step in steps:
            begin = perf_counter()
            step.data = trees.send_to_device(step.data, self.device, self.non_blocking)
            self.copy_seconds += perf_counter() - begin
            yield step


class DeviceFeed:
    """Copies the next batch from pinned memory on a side stream before the present one is yielded.

    The side stream waits for work that is queued when a copy starts, so that the device no longer uses the memory
    that the copy gets. Work that follows waits for the copy. No copy blocks the host.
    """

    def __init__(self, device: torch.device, module: Any, pins: bool) -> None:
        self.device = device
        self.module = module
        self.pins = pins
        self.stream: Any = module.Stream(device)
        self.copy_seconds: float = 0.0  # of the host, so far

    def ahead(self, steps: Iterator[ShardStep]) -> Iterator[ShardStep]:
        """The steps with their batches on the device."""
        present = self._started(next(steps, None))
        while present is not None:
            begin = perf_counter()
            # From here on a source that reuses its buffers may write into them.
            present.done.synchronize()
            present.source = None
            self.copy_seconds += perf_counter() - begin
            following = self._started(next(steps, None))
            present.done.wait(self.module.current_stream(self.device))
            yield present.step
            present, following = following, None

    def _started(self, step: ShardStep | None) -> _Copy | None:
        if step is None:
            return None
        begin = perf_counter()
        source = step.data
        if self.pins:
            device = trees.find_device(source)
            if device is not None and device.type == "cpu":
                source = pin_memory(source)
        self.stream.wait_stream(self.module.current_stream(self.device))
        with self.module.stream(self.stream):
            step.data = trees.send_to_device(source, self.device, non_blocking=True)
        self.copy_seconds += perf_counter() - begin
        return _Copy(step, source, self.stream.record_event())


@dataclass(slots=True)
class _Copy:
    """A copy in progress: its step, the source, and the event after the copy."""

    step: ShardStep
    source: Any
    done: Any
