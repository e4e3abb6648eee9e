# SPDX-License-Identifier: Apache-2.0
"""The device feed: while the present batch is computed on, the next one is copied on a stream of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data._utils.pin_memory import pin_memory

from ..core import devices, trees


def feed_for(device: torch.device | None, non_blocking: bool = False) -> DeviceFeed | PlainFeed | None:
    """How batches get to `device`; None on the CPU, where they are already."""
    if device is None or device.type in ("cpu", "meta"):
        return None
    module = devices.module_of(device)
    if hasattr(module, "Stream") and hasattr(module, "stream") and hasattr(module, "current_stream"):
        return DeviceFeed(device, module, devices.kind_of(device).pin_memory)
    return PlainFeed(device, non_blocking)


class PlainFeed:
    """Copies a batch when it is asked for: for devices that have no streams (MPS, XLA)."""

    def __init__(self, device: torch.device, non_blocking: bool) -> None:
        self.device = device
        self.non_blocking = non_blocking

    def ahead(self, batches: Iterator[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
        for batch, *rest in batches:
            yield trees.send_to_device(batch, self.device, self.non_blocking), *rest


class DeviceFeed:
    """Copies the next batch from pinned memory on a side stream before the present one is handed out.

    The batch after the present one is read before the present one is computed on. The side stream waits for the work
    that was queued when a copy starts, so that memory that it is given again is free on the device too; the work
    that follows waits for the copy. `non_blocking` makes no difference here: no copy blocks.
    """

    def __init__(self, device: torch.device, module: Any, pins: bool) -> None:
        self.device = device
        self.module = module
        self.pins = pins
        self.stream = module.Stream(device)

    def ahead(self, batches: Iterator[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
        present = self._started(next(batches, None))
        while present is not None:
            moved, rest, source, done = present
            # A source that reuses its buffers may write into them from here on.
            done.synchronize()
            del source
            following = self._started(next(batches, None))
            done.wait(self.module.current_stream(self.device))
            present = None
            yield moved, *rest
            del moved
            present = following
            following = None

    def _started(self, item: tuple[Any, ...] | None) -> tuple[Any, ...] | None:
        if item is None:
            return None
        batch, *rest = item
        found = trees.find_device(batch)
        if self.pins and found is not None and found.type == "cpu":
            batch = pin_memory(batch, self.device.type)
        self.stream.wait_stream(self.module.current_stream(self.device))
        with self.module.stream(self.stream):
            moved = trees.send_to_device(batch, self.device, non_blocking=True)
        return moved, rest, batch, self.stream.record_event()
